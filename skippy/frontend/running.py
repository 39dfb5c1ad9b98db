"""One answer as a task: prompts in, pieces of text of all its choices out through a bounded channel."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal

import attrs
import trio

from skippy.stage.nurseries import leaves

from .choices import AnswerEnd, Choice, ChoiceResult, Piece, choice_sampling
from .errors import ApiError, from_generation_error, internal_error
from .generation import GenerationError, GenerationRequest, Generator, Timings

logger = logging.getLogger(__name__)

Outcome = Literal["running", "completed", "failed", "cancelled", "stalled"]

SHUTTING_DOWN: Final = "the server is shutting down"
_LEFT_OVER: Final = Piece(0, "")


@attrs.frozen(slots=True)
class Usage:
    """Token counts of a finished answer.

    ``prompt_tokens`` counts each prompt once, however many choices continue it. ``completion_tokens`` counts
    every generated token of every choice, also those whose text a stop string swallowed, but not the
    end-of-generation tokens. ``cached_tokens`` of the prompts were not computed for this answer;
    ``reasoning_tokens`` of the generated ones are no part of what is said.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class GenerationTask:
    """Owns one answer, from its prompts to the last token of its last choice.

    Start :meth:`run` in the nursery of the client's connection, wait for :meth:`started`, then read
    :attr:`events` to their end and look at :attr:`error` and :attr:`choices`. A lane is free as soon as the
    choice on it ends, whether or not its events have been read.

    Choices run at once as far as there are lanes, the others take their turns; none holds a lane while it
    waits. Where a prompt has several, it is first computed once and left to the stages' caches, where they
    keep it. If one choice fails, the answer does, and all of its lanes are freed.

    Args:
        prepare: makes the requests, one for each prompt, in this task; an ApiError from it is the answer's.
        n: choices for each prompt. Those of the first prompt come first.
        stall_secs: a reader that leaves a full channel alone for this long loses the answer.
        buffer: events the channel holds.

    Attributes:
        express: takes the index of a choice and a piece of its text in place of a reader that waits for one,
            which saves the switch to the reader's task with every token. False: the reader must go on, and
            gets an empty piece.
        express_piece: the same for pieces that are not only text.
        begun_at: when :attr:`begun` came true, on Trio's clock.
        choices: in the order of their indices; empty before the requests are there.
    """

    def __init__(
        self,
        generator: Generator,
        prepare: Callable[[], Awaitable[Sequence[GenerationRequest]]],
        stops: Sequence[str],
        *,
        n: int = 1,
        stall_secs: float,
        buffer: int,
    ) -> None:
        self._generator = generator
        self._prepare = prepare
        self._stops = stops
        self._n = n
        self._stall_secs = stall_secs
        self._send, self._receive = trio.open_memory_channel[Piece | None](buffer)
        self._scope = trio.CancelScope()
        self._begun = trio.Event()
        self.begun_at = self._ended_at = 0.0
        self._pause = trio.lowlevel.ParkingLot()
        self._turn = trio.Lock()
        self._admitted = trio.Event()
        """A choice has had a lane: the others are not refused for want of one any more."""
        self._prompt_tokens = 0
        self._cached_tokens = 0
        """Of prompts that several choices share."""
        self.express: Callable[[int, str], bool] | None = None
        self.express_piece: Callable[[Piece], bool] | None = None
        self.outcome: Outcome = "running"
        self.choices: list[Choice] = []
        self.error: ApiError | None = None

    @property
    def usage(self) -> Usage:
        cached = self._cached_tokens
        if self._n == 1:
            cached = sum(choice.timings.cached_tokens for choice in self.choices)
        reasoned = sum(choice.reasoned for choice in self.choices)
        return Usage(self._prompt_tokens, self._generated, cached, reasoned)

    @property
    def timings(self) -> Timings:
        """Of the one choice; of several, the first one's with the time in which all of them were answered."""
        if not self.choices:
            return Timings()
        first = self.choices[0].timings
        if len(self.choices) == 1:
            return first
        answer_ms = 1000 * (self._ended_at - self.begun_at)
        return attrs.evolve(first, cached_tokens=self.usage.cached_tokens, answer_ms=answer_ms)

    @property
    def finish_reason(self) -> AnswerEnd | None:
        """That of the first choice."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def finishing(self) -> bool:
        """All tokens have come; what is left is to hand the last text over."""
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices)

    @property
    def _generated(self) -> int:
        return sum(choice.generated for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Whether there has been a token, or an end without one."""
        return self._begun.is_set()

    async def wait_begun(self, secs: float) -> None:
        """Wait for :attr:`begun` to come true, but only for ``secs`` or until :meth:`probe`."""
        if not self.begun:
            with trio.move_on_after(secs):
                await self._pause.park()

    async def started(self) -> None:
        """Wait for the first token, or for the end if there is none.

        Raises:
            ApiError: the generation failed before its first token.
        """
        await self._begun.wait()
        if self.error is not None and not self._generated:
            raise self.error

    @property
    def events(self) -> trio.MemoryReceiveChannel[Piece | None]:
        """What the choices say; an empty piece says that :attr:`express` has left something to the reader.

        None: nothing has come for a while (:meth:`keep_alive`). Ends with the answer, however that ends.
        """
        return self._receive

    async def results(self) -> list[ChoiceResult]:
        """Read all events: the choices as wholes. Raises the ApiError of an answer that has failed."""
        results: dict[int, ChoiceResult] = {}
        async for piece in self._receive:
            if piece is not None:
                results.setdefault(piece.choice, ChoiceResult()).add(piece)
        if self.error is not None:
            raise self.error
        return [results[choice.index] for choice in self.choices]

    def end(self, error: ApiError) -> bool:
        """End the answer with an error that says why; whether it had not ended before. Does not wait."""
        if self.outcome != "running":
            return False
        self.error = error
        self._scope.cancel()
        return True

    async def run(self) -> None:
        """Run to the end. Never raises but for cancellation from outside; that frees the lane too."""
        try:
            with self._scope:
                await self._generate()
            if self.outcome == "running":
                self.outcome = "cancelled"
        except Exception as error:
            self.outcome, self.error = "failed", _shown(error)
        finally:
            if self.outcome == "running":
                self.outcome = "cancelled"
            if self.outcome == "cancelled" and self.error is None:
                self.error = ApiError("the request was cancelled", status=500, code="cancelled")
            self._begin()
            self._send.close()

    async def keep_alive(self, secs: float) -> None:
        """Tell the reader, after its first token, of each ``secs`` in which none came; until cancelled."""
        generated = 0
        while True:
            await trio.sleep(secs)
            if generated == self._generated > 0:
                self.probe()
            generated = self._generated

    def probe(self) -> None:
        """Tell a reader that has nothing to do that nothing has come; also one in :meth:`wait_begun`."""
        if not self.begun:
            self._pause.unpark_all()
        elif not self._send.statistics().current_buffer_used:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                self._send.send_nowait(None)

    async def _generate(self) -> None:
        with self._generator.preparing():
            requests = await self._prepare()
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self.choices = [
            self._choice(index, requests[index // self._n]) for index in range(self._n * len(requests))
        ]
        if len(self.choices) == 1:
            await self._run_choice(self.choices[0], requests[0])
        else:
            turns = zip(self.choices, (request for request in requests for _ in range(self._n)), strict=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_turns, turns)
                await self._admitted.wait()
                for _ in range(min(self._generator.lanes, len(self.choices)) - 1):
                    nursery.start_soon(self._take_turns, turns)
        self._ended_at = trio.current_time()
        self.outcome = "completed"

    def _choice(self, index: int, request: GenerationRequest) -> Choice:
        scored = request.top_logprobs is not None
        return Choice(index, self._generator.vocabulary, self._stops, scored=scored, reading=request.reading)

    async def _take_turns(self, turns: Iterator[tuple[Choice, GenerationRequest]]) -> None:
        """Run choices, one after the other, until none is left."""
        while True:
            async with self._turn:  # while a prompt is computed for all who share it, none of them begins
                turn = next(turns, None)
                if turn is None:
                    return
                choice, request = turn
                request = attrs.evolve(request, admitted=self._admitted.is_set())
                number = choice.index % self._n
                if self._n > 1 and not number:
                    self._cached_tokens += await self._generator.share(request)
            sampling = choice_sampling(request.sampling, number)
            await self._run_choice(choice, attrs.evolve(request, sampling=sampling))

    async def _run_choice(self, choice: Choice, request: GenerationRequest) -> None:
        async with self._generator.generate(request) as stream:
            self._admitted.set()
            stream.express, choice.timings = functools.partial(self._take_now, choice), stream.timings
            async for token in stream:
                if not self.begun:
                    self._begin()
                piece = choice.feed(token, stream.logprobs)
                if piece is not None:
                    await self._emit(piece)
                if choice.stopped:
                    break
        await self._emit(choice.finish(stream.finish_reason))

    def _begin(self) -> None:
        self.begun_at = self.begun_at or trio.current_time()
        self._begun.set()
        self._pause.unpark_all()

    def _take_now(self, choice: Choice, token: int) -> bool:
        """Take a token in place of :meth:`_run_choice`; False, and nothing has happened, where that must."""
        if self.express is None or not self._reader_waits:
            return False
        if choice.is_plain:
            text = choice.take(token)
            taken = not text or self.express(choice.index, text)
        elif self.express_piece is not None and choice.flows:
            piece = choice.feed(token, None)
            taken = piece is None or self.express_piece(piece)
        else:
            return False
        if not taken:
            self._send.send_nowait(_LEFT_OVER)
        return True

    @property
    def _reader_waits(self) -> bool:
        """Whether the reader has taken all there was, and waits."""
        return self._send.statistics().tasks_waiting_receive > 0

    async def _emit(self, piece: Piece) -> None:
        """Hand over a piece. If the reader has stalled or is gone, the answer ends: cancels :meth:`run`."""
        if self.express is not None and piece.is_only_text and self._reader_waits:
            if self.express(piece.choice, piece.text):
                return
            piece = _LEFT_OVER
        try:
            self._send.send_nowait(piece)
            return
        except trio.WouldBlock:
            pass
        except trio.BrokenResourceError:
            await self._end("cancelled")
        with trio.move_on_after(self._stall_secs):
            await self._send.send(piece)
            return
        self.error = self.error or ApiError("the client stopped reading its stream", status=408)
        await self._end("stalled")

    async def _end(self, outcome: Outcome) -> None:
        if self.outcome == "running":
            self.outcome = outcome
        self._scope.cancel()
        await trio.lowlevel.checkpoint()  # raises Cancelled


def _shown(error: BaseException) -> ApiError:
    """What the client is told, also out of the groups that nurseries wrap errors in."""
    for leaf in leaves(error):
        if isinstance(leaf, ApiError):
            return leaf
        if isinstance(leaf, GenerationError):
            return from_generation_error(leaf)
    logger.error("a generation failed", exc_info=error)
    return internal_error()
