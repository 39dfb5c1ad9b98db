"""Those who ask: each checks every token that it gets, and how its request ends."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.errors import ApiError
from skippy.frontend.generation import FinishReason, GenerationError, GenerationRequest, Generator
from skippy.frontend.running import GenerationTask
from skippy.frontend.text import Detokeniser, StopMatcher

from .cluster import SimCluster
from .oracle import ToyModel, expected
from .scenario import Asked
from .trace import Trace
from .violation import require

STALL_SECS = 30.0
"""As the server gives a client that does not read."""
EVENTS = 4
"""Pieces of text that may wait for their reader."""


def expected_text(
    tokens: list[int], reason: FinishReason, stops: tuple[str, ...]
) -> tuple[str, FinishReason]:
    """The text of tokens, cut at the first stop string, and why it ends then."""
    vocabulary, detokeniser, matcher = ToyVocabulary(), Detokeniser(), StopMatcher(stops)
    text = ""
    for token in tokens:
        text += matcher.feed(detokeniser.feed(vocabulary.piece(token)))
        if matcher.stopped:
            return text, "stop"
    text += matcher.feed(detokeniser.finish()) + matcher.finish()
    return text, "stop" if matcher.stopped else reason


@attrs.define(eq=False)
class Client:
    """One request and what becomes of it. :meth:`run` is its task; it raises Violation.

    Args:
        may_differ: whether bytes that arrived changed may be why something is not as it must be.

    Attributes:
        outcome: ``completed``, ``failed``, ``left``, ``no server`` or ``server died``, once it has ended.
        error: why it failed.
        got: tokens, or pieces of text.
        began, ended: virtual times.
    """

    name: str
    asked: Asked
    model: ToyModel
    cluster: SimCluster
    trace: Trace
    may_differ: Callable[[float], bool]
    outcome: str | None = None
    error: GenerationError | ApiError | None = None
    got: int = 0
    began: float = 0.0
    ended: float = 0.0

    async def run(self) -> None:
        await trio.sleep_until(self.asked.at)
        request = self.asked.request
        self.began = trio.current_time()
        self.trace(f"{self.name} asks: {len(request.prompt)} + {request.max_tokens}")
        front = self.cluster.front
        if front is None:
            self._end("no server")
            return
        scope = trio.CancelScope()
        if self.asked.patience is not None:
            scope.deadline = self.began + self.asked.patience
        self.cluster.clients[scope] = None
        read = self._read_tokens if self.asked.stops is None else self._read_text
        try:
            with scope:
                outcome = await read(front.generator, request)
        except (GenerationError, ApiError) as error:
            self.error, outcome = error, "failed"
        finally:
            del self.cluster.clients[scope]
        if scope.cancelled_caught:
            outcome = "left" if self.cluster.front is front else "server died"
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcome, self.ended = outcome, trio.current_time()
        why = "" if self.error is None else f" by {type(self.error).__name__}: {self.error}"
        self.trace(f"{self.name} {outcome}{why}")

    def _check(self, holds: bool, text: str) -> None:
        require(holds or self.may_differ(self.began), f"{self.name} {text}")

    async def _read_tokens(self, generator: Generator, request: GenerationRequest) -> str:
        wanted, reason = expected(self.model, request)
        async with generator.generate(request) as stream:
            if self.asked.leaves_after == 0:
                return "left"
            async for token in stream:
                self.trace(f"{self.name} token {self.got}: {token}")
                right = wanted[self.got] if self.got < len(wanted) else "none"
                self._check(token == right, f"got {token} as token {self.got}, and must get {right}")
                scores = stream.logprobs
                asked, chosen = request.top_logprobs, scores and scores.chosen.token
                self._check(
                    chosen == (None if asked is None else token),
                    f"asked for log-probabilities of {asked} and got those of token {chosen} with {token}",
                )
                self.got += 1
                if self.got == self.asked.leaves_after:
                    return "left"
                if self.asked.pause:
                    await trio.sleep(self.asked.pause)
            self._check(self.got == len(wanted), f"got {self.got} tokens of {len(wanted)} and an end")
            self._check(stream.finish_reason == reason, f"ended by {stream.finish_reason}, not {reason}")
        return "completed"

    async def _read_text(self, generator: Generator, request: GenerationRequest) -> str:
        stops = self.asked.stops or ()
        wanted, reason = expected_text(*expected(self.model, request), stops)

        async def prepare() -> list[GenerationRequest]:
            await trio.lowlevel.checkpoint()
            return [request]

        task = GenerationTask(generator, prepare, stops, stall_secs=STALL_SECS, buffer=EVENTS)
        got = ""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task.run)
            async for piece in task.events:
                text = piece.text if piece is not None else ""
                got += text
                self.got += 1
                self.trace(f"{self.name} text {text!r}")
                self._check(wanted.startswith(got), f"got {got!r}, and must get {wanted!r}")
                if self.asked.leaves_after is not None and len(got) >= self.asked.leaves_after:
                    nursery.cancel_scope.cancel()
                    return "left"
                if self.asked.pause:
                    await trio.sleep(self.asked.pause)
        if task.error is not None:
            raise task.error
        self._check(got == wanted, f"got {got!r} and an end, and must get {wanted!r}")
        self._check(task.finish_reason == reason, f"ended by {task.finish_reason}, not {reason}")
        return "completed"
