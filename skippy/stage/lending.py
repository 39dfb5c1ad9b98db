"""What the engine's thread takes from the links of a lane that decodes: steps, or predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skippy.protocol import (
    AnnexedReplyDecoder,
    Message,
    MessageDecoder,
    Reply,
    ReplyDecoder,
    ReplyStats,
    StepHeader,
)

from .express import Express
from .links import Link
from .memory import FrameMemory
from .relay import Loan, Relay
from .repeat import Repeat, RepeatedPrediction, RepeatedStep
from .runs import ChainRun

if TYPE_CHECKING:
    from .steps import Steps


def lend_steps(
    steps: Steps, link: Link, decoder: MessageDecoder, memory: FrameMemory
) -> Relay[MessageDecoder, Message] | None:
    """Let the engine's thread receive the steps that follow the one which was started just now.

    None where it cannot; else run what is returned before receiving anything.
    """
    loan = None if steps.gets_predictions else steps.lend(link, decoder)
    if loan is None:
        return None
    relay = _StepRelay(steps, loan, memory)
    steps.lent(relay)
    return relay


def lend_predictions(steps: Steps, link: Link, decoder: ReplyDecoder) -> Relay[ReplyDecoder, Reply] | None:
    """Let the engine's thread receive the predictions that follow, each of which begins the next step.

    None where it cannot, or nothing is to follow by itself; else run what is returned before receiving.
    """
    open_run = steps.predictions.run_to_come
    loan = None if open_run is None else steps.lend(link, decoder)
    if loan is None or open_run is None or (run := open_run()) is None:
        return None
    relay = _PredictionRelay(steps, loan, run)
    steps.lent(relay)
    return relay


class _StepRelay(Relay[MessageDecoder, Message]):
    def __init__(self, steps: Steps, loan: Loan[MessageDecoder], memory: FrameMemory) -> None:
        super().__init__(loan)
        self._steps = steps
        self._memory = memory

    def _next_frame(self) -> Message | None:
        return self._decoder.next_message()

    def _is_stuck(self) -> bool:
        return not self._memory.is_small()

    def _take(self, frame: Message) -> Express | None:
        self._memory.forget()
        return self._steps.go_on(frame, self._express, self.revoke)

    def _repeated(self, frame: Message) -> Repeat | None:
        steps, expected = self._steps, StepHeader.of(frame)
        if expected is None or not steps.repeats:
            return None
        return RepeatedStep(expected, memoryview(frame.activation).nbytes, steps.waves, steps.again)


class _PredictionRelay(Relay[ReplyDecoder, Reply]):
    def __init__(self, steps: Steps, loan: Loan[ReplyDecoder], run: ChainRun) -> None:
        super().__init__(loan)
        self._steps = steps
        self._run = run

    def _next_frame(self) -> Reply | None:
        return self._decoder.next_reply()

    def _is_stuck(self) -> bool:
        return self._decoder.ended

    def _take(self, frame: Reply) -> Express | None:
        decoder, run, predictions = self._decoder, self._run, self._steps.predictions
        annex = decoder.annex if isinstance(decoder, AnnexedReplyDecoder) else None
        if not predictions.is_token(frame) or not run.follows(frame.predicted, annex):
            return None
        message = run.next_message(frame.predicted)
        express = self._steps.go_on(message, self._express, self.revoke)
        if express is not None:
            predictions.go_on(frame, message.kind)
            run.went_on(frame.predicted, annex, frame.stats)
            self._tell()
        return express

    def _repeated(self, frame: Reply) -> Repeat | None:
        if not self._steps.repeats:
            return None
        vocab_size = self._loan.scheduler.info.vocab_size
        return RepeatedPrediction(self._run, vocab_size, self._tell, self._steps.again)

    def _tell(self) -> None:
        self._loan.scheduler.tell(self._report)

    def _report(self) -> None:
        self._run.report(self._came)

    def _came(self, stats: ReplyStats) -> None:
        self._steps.predictions.moved()
        self._steps.stats.take(stats)

    def _end(self) -> None:
        self._report()
        self._run.ended()
