"""The decode steps of one generation: each begins as soon as the token before it is there.

Whoever brings a token, the return stream's reader or the engine's own report, begins the next step before
anyone has looked at the token, so that detokenising and HTTP overlap with computing. How far the steps may
run ahead of their reader is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from skippy.engine import Vocabulary
from skippy.protocol import (
    FinishHint,
    Message,
    MessageKind,
    PositionLogProbabilities,
    ReplyAnnex,
    StageState,
    default_state,
)
from skippy.stage import ChainRun, LaneLost, LocalRun, PendingReply, StageError
from skippy.stage.runs import MAX_AHEAD
from skippy.telemetry import Level, Telemetry, names

from .generation import FinishReason, GenerationRequest
from .lanes import PooledLane

_STATE: Final = default_state(MessageKind.DECODE_EMBD)

Token = tuple[int, PositionLogProbabilities | None]
"""A token id, and its log-probabilities where the request asked for them."""


class DecodeLoop:
    """Tokens of one generation on one lane, in order, from the end of its prefill on.

    Call :meth:`begin` once, then :meth:`next` until it gives None; :meth:`stop` on every path.

    Args:
        pooled: the lane, leased; its frames bear ``pooled.request`` and ``pooled.generation``.
        generated: how many tokens the generation had before, on lanes that were lost.
        express: as that of a :class:`skippy.frontend.generation.TokenStream`.

    Attributes:
        finish_reason: why there are no more tokens; None before that is known.
    """

    def __init__(
        self,
        pooled: PooledLane,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        telemetry: Telemetry,
        generated: int = 0,
        express: Callable[[Token], bool] = lambda _: False,
    ) -> None:
        self._pooled = pooled
        self._request = request
        self._vocabulary = vocabulary
        assert pooled.request is not None
        self._ids = pooled.request
        self._generation = pooled.generation
        self._telemetry = telemetry
        self._express = express
        sampling = request.sampling
        self._ignores_eos = sampling is not None and sampling.ignores_eos
        self._tokens: deque[Token] = deque()
        self._predicted = generated
        self._held: int | None = None
        """The token whose step does not begin before the reader has taken one."""
        self._unsent: Message | None = None
        """A step that could not begin without waiting, which the reader does."""
        self._run: LocalRun | ChainRun | None = None
        """Steps that follow each other by themselves."""
        self._error: Exception | None = None
        self._stopped = False
        self._reader: trio.lowlevel.Task | None = None
        self.finish_reason: FinishReason | None = None

    def begin(self, first: PendingReply | None = None) -> None:
        """Begin the first step, unless it has begun and ``first`` is its prediction's place. Never waits."""
        if first is None:
            self._step(self._request.prompt[-1])
        else:
            first.then(self._arrived)

    def stop(self) -> None:
        """Begin no further step. Never waits; a step that has begun ends by itself."""
        self._stopped = True
        if self._run is not None:
            self._run.stopped = True

    async def next(self) -> Token | None:
        """The next token; None once ``finish_reason`` is known. Cancelled while waiting, nothing is lost.

        Raises StageError: the lane has ended; or what ``express`` has raised.
        """
        while not self._tokens:
            if self.finish_reason is not None:
                return None
            if self._error is not None:
                raise self._error
            if self._unsent is not None:
                message, self._unsent = self._unsent, None
                (await self._pooled.handle(message)).then(self._arrived)
            else:
                await self._wait()
        return self._taken()

    def _taken(self) -> Token:
        """Take the first token, which may let another step begin."""
        token = self._tokens.popleft()
        if self._run is not None:
            self._run.taken += 1
        elif self._held is not None:
            held, self._held = self._held, None
            self._step(held)
        return token

    async def _wait(self) -> None:
        self._reader = trio.lowlevel.current_task()

        def give_up(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def _wake(self) -> None:
        """Wake the reader if it waits and there is something for it."""
        if self._reader is not None and self._tokens:
            self._offer()
        if self._reader is not None and (self._tokens or self._ended or self._unsent is not None):
            task, self._reader = self._reader, None
            trio.lowlevel.reschedule(task)

    def _offer(self) -> None:
        """Save the reader, which waits, a token."""
        try:
            if self._express(self._tokens[0]):
                self._taken()
        except Exception as exc:  # for the reader to raise, not for whoever has brought the token
            self._tokens.clear()
            self._error, self.finish_reason = exc, None
            self.stop()

    @property
    def _ended(self) -> bool:
        return self.finish_reason is not None or self._error is not None

    def _step(self, token: int) -> None:
        """Begin the step that executes ``token``, or leave it to the reader."""
        message = self._message(self._predicted, token)
        if self._pooled.lane.is_whole_chain and self._start_run(message):
            return
        if (place := self._pooled.handle_now(message)) is not None:
            place.open_run = self._open_run
            place.then(self._arrived)
        else:
            self._unsent = message
            self._wake()

    def _message(self, step: int, token: int) -> Message:
        """Step number ``step``, which executes ``token``."""
        count = len(self._request.prompt)
        # Spelled out: this runs for every token.
        return Message(
            MessageKind.DECODE_EMBD,
            StageState(
                phase=_STATE.phase,
                checkpoint_generation=self._generation,
                prompt_token_count=count,
                decode_step=step,
                current_token=token,
            ),
            pos_start=count - 1 + step,
            token_count=1,
            request_id=self._ids[0],
            session_id=self._ids[1],
            tokens=(token,),
        )

    def _open_run(self) -> ChainRun | None:
        """Steps that follow the one under way by themselves, in a chain of several stages."""
        if self._stopped or self._request.top_logprobs is not None:
            return None
        first = self._predicted
        self._run = ChainRun(
            self._request.max_tokens - first,
            self._ends,
            self._came,
            taken=-len(self._tokens),
            message=lambda steps, token: self._message(first + steps, token),
            ended=self._chain_run_ended,
        )
        return self._run

    def _chain_run_ended(self) -> None:
        self._run = None

    def _start_run(self, message: Message) -> bool:
        run = LocalRun(self._request.max_tokens - self._predicted, self._ends, self._came)
        end = self._pooled.lane.start_run(message, run)
        if end is None:
            return False
        self._run = run
        end.then(self._run_ended)
        return True

    def _arrived(self, place: PendingReply) -> None:
        """A step has ended: keep its token, and begin the next one."""
        try:
            self._came(place.result().predicted, place.annex, False)
        except StageError as exc:
            self._error = exc
            self._wake()

    def _run_ended(self, place: PendingReply) -> None:
        self._run = None
        try:
            place.result()
        except StageError as exc:
            self._error = exc
            self._wake()
        if self._held is not None and not self._tokens and not self._stopped:  # the reader was faster
            held, self._held = self._held, None
            self._step(held)

    def _came(self, token: int, annex: ReplyAnnex | None, goes_on: bool) -> None:
        """A step has given a token; ``goes_on``: the next one has begun."""
        if goes_on and self._pooled.lane.is_whole_chain:
            self._pooled.lane.went_on()
        if self._ended:
            return  # the engine was one step ahead
        try:
            self._take(token, annex)
        except StageError as exc:
            self._error = exc
            self.stop()
        if not goes_on and self._error is None:
            if self._stopped:
                self._pooled.lane.pause()
            elif len(self._tokens) < MAX_AHEAD and self._run is None:
                self._step(token)
            else:
                self._held = token
                self._pooled.lane.pause()
        self._wake()

    def _take(self, token: int, annex: ReplyAnnex | None) -> None:
        request = self._request
        if token < 0:
            raise self._lose("the last stage predicted nothing")
        logprobs = None
        if request.top_logprobs is not None:
            scores = () if annex is None else annex.log_probabilities
            wanted = min(request.top_logprobs, self._vocabulary.size)
            if [(s.chosen.token, len(s.top)) for s in scores] != [(token, wanted)]:
                raise self._lose("the last stage did not send the log-probabilities that were asked for")
            logprobs = scores[0]
        if self._telemetry.enabled(Level.DEBUG):
            self._telemetry.emit(
                names.STAGE_OPENAI_DECODE_TOKEN,
                level=Level.DEBUG,
                request_id=self._ids[0],
                decode_step=self._predicted,
            )
        if self._ends(token):
            self._finish("stop")
            return
        self._tokens.append((token, logprobs))
        self._predicted += 1
        if annex is not None and annex.finish_hint is FinishHint.MUST_END:
            self._finish("stop")
        elif self._predicted >= request.max_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.stop()

    def _ends(self, token: int) -> bool:
        return not self._ignores_eos and self._vocabulary.is_end_of_generation(token)

    def _lose(self, reason: str) -> LaneLost:
        """End a lane whose last stage does not answer what was asked: its next answer is worth no more."""
        lost = LaneLost(reason)
        self._pooled.lane.fail(lost)
        return lost
