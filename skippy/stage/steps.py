"""One lane's decode steps: handed to the engine, whose thread sends what comes of them.

A token crosses every stage once, so nothing here waits. What a lane does with all other messages, and with a
step that has to wait for something, is in :mod:`skippy.stage.execution`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from skippy.protocol import (
    EMPTY_STATS,
    Buffer,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    ReplyDecoder,
    StepHeader,
    UpstreamConnection,
    UpstreamState,
    VerifyPipeline,
    Wave,
    encode_forwarded,
    requires_predicted_reply,
    set_seq_id,
)
from skippy.telemetry import Level, names

from .answers import Answers
from .context import StageContext
from .downstream import Downstream
from .errors import RequestFailed, StageError
from .express import Express, Frame, prediction_frame, reported, token_frame
from .framing import allocate
from .intake import ONE_TOKEN, check_data, wave_of
from .interfaces import LaneTasks, ReplySink
from .lending import lend_predictions
from .links import Link
from .predictions import Predictions
from .queues import PendingReply
from .relay import Loan, Relay
from .remembering import RememberedSession
from .runs import LocalRun
from .session import Predicted, Sink
from .statistics import LaneStats, Times
from .work import Work

D = TypeVar("D", bound=MessageDecoder | ReplyDecoder)


class Steps:
    """What the messages of one lane share, and decode steps: begun without waiting for anything.

    Attributes:
        downstream: the connection to the next stage, given before the first message; None on the last stage.
        waves: the upstream peer agreed to decode waves; without it, the word in its frames means nothing.
        predictions: what stage 0 is owed on this lane; unused on other stages.
        stats: what was observed on this lane.
        repeats: whether what leaves after the step begun last differs from what leaves after the next one by
            position and token alone.
    """

    def __init__(self, context: StageContext, replies: ReplySink, lane: LaneTasks) -> None:
        self.downstream: Downstream | None = None
        self.waves = False
        self._context = context
        self._replies = replies
        self._lane = lane
        self._machine = UpstreamConnection()
        self._windows = VerifyPipeline()
        self._session: RememberedSession | None = None
        self.stats = LaneStats(context.stage_index, context.last_prompt)
        self._answers = Answers(context, replies, lane.start)
        self.tell_why = self._answers.tell_why
        self._started: Work | None = None
        """The frame handled last, if :meth:`start_decode` took it: perhaps still with the engine."""
        self._express: Express | None = None
        """Of the frame in ``_started``."""
        self._header: StepHeader | None = None
        """Of the frame that leaves after that, where it is but a step's."""
        self.repeats = False
        self._relay: Relay[Any, Any] | None = None
        self._owed: deque[PendingReply] = deque()
        self.predictions = Predictions(
            context.hub,
            context.info.vocab_size,
            self._windows,
            lane.lose,
            functools.partial(lend_predictions, self),
        )

    @property
    def state(self) -> UpstreamState:
        """How far the lane's request has come."""
        return self._machine.state

    def end(self, failure: StageError) -> None:
        """The lane has ended: whatever is owed fails. Never waits."""
        self.revoke_relay()
        live = self._machine.live
        if live is not None and isinstance(failure, RequestFailed):
            self._answers.fail(live[0], failure)
        self._machine.close()
        for reply in self._owed:
            reply.fail(failure)
        self._owed.clear()
        self.predictions.fail(failure)

    @property
    def owes(self) -> bool:
        """Whether an acknowledgement or a prediction is still to come."""
        return bool(self._owed or self.predictions.places)

    def settle(self) -> bool:
        """Settle what :meth:`start_decode` gave the engine; False while the engine is at it. Never waits."""
        self.revoke_relay()
        return self._started is None or self._started.settle()

    async def wait_started(self) -> None:
        """Wait until the engine is done with what :meth:`start_decode` gave it."""
        self.revoke_relay()
        if self._started is not None:
            await self._started.wait()

    def start_decode(self, message: Message) -> bool:
        """Hand a frame of one token to the engine, whose thread sends what comes of it.

        False, and nothing has happened, where something would have to be waited for, or the frame is not of
        that kind. What it refers to is in use until the next message is carried out. See
        :mod:`skippy.stage.express`. Only after :meth:`settle`. Raises as :meth:`carry_out`.
        """
        if not self._is_step(message):
            return False
        if self.gets_predictions and self._replies.full:
            return False
        reservation = (self.downstream or self._answers).reserve()
        if reservation is None:
            return False
        place = self._place_for(message, None)
        self._begin(message, lambda frame: Express(reservation, frame, self._lane.fail_for))
        if place is not None:
            self.predictions.keep(message.kind, place)
            self._replies.put_nowait(place)
        return True

    @property
    def gets_predictions(self) -> bool:
        """Predictions come back here: this is stage 0 of more than one."""
        return self.downstream is not None and self._context.stage_index == 0

    def _is_step(self, message: Message) -> bool:
        """Whether a message is a decode step that the engine can take as it is."""
        session = self._session
        return (
            message.kind in ONE_TOKEN
            and session is not None
            and session.takes_now(message)
            and not session.scores
        )

    def _begin(self, message: Message, make_express: Callable[[Frame], Express]) -> Work:
        """Check a decode step, and hand it to the engine. Raises as :meth:`carry_out`."""
        assert self._session is not None
        self._machine.receive(message)
        check_data(message, self._context.stage_index, self._context.info.max_batch)
        wave = wave_of(message) if self.waves else None
        output, frame = self._frame_to_come(message)
        self._express = express = make_express(frame)
        held = self._session.length
        work = self._session.prepare_now(
            message, output, self._reported(express.sink, message), express.settle
        )
        self._tell_rewound(held, work)
        work.wave, work.forms_waves = wave, self._forms_waves(message)
        self._started = work
        self._session.start(work)
        return work

    # -- on loan to the engine's thread ----------------------------------------------------------------

    def lend(self, link: Link, decoder: D) -> Loan[D] | None:
        """What the engine's thread needs to receive the frames that follow the step started just now.

        None where it cannot. See :mod:`skippy.stage.relay`.
        """
        context, express, downstream = self._context, self._express, self.downstream
        inbox, descriptor = context.scheduler.inbox, link.descriptor
        if (
            inbox is None
            or descriptor is None
            or express is None
            or not (express.pending and decoder.at_boundary)
            or not (downstream is None or downstream.drained)
            or context.telemetry.enabled(Level.DEBUG)
        ):
            return None
        return Loan(link, descriptor, decoder, express, context.scheduler, inbox)

    def lent(self, relay: Relay[Any, Any]) -> None:
        """``relay`` has what :meth:`lend` gave."""
        assert self._started is not None
        self._relay, self._started.report = relay, relay.revoke

    def go_on(self, message: Message, express: Express, on_urgent: Callable[[], object]) -> Express | None:
        """In the engine's thread: begin the next step, with the right to send of the one before.

        None where the message is something else, or the step before it did not end well. ``on_urgent`` is
        called in the event loop's thread once a step needs it. Raises ProtocolError.
        """
        before = self._started
        if before is None or not before.over or before.urgent or not self._is_step(message):
            return None
        before.settle()
        work = self._begin(message, express.followed_by)
        work.report, work.lasting = on_urgent, True
        return self._express

    def again(self, token: int, activation: memoryview | None, wave: Wave | None) -> bool:
        """In the engine's thread: the step begun last is done again, one position on.

        Its frame was the one expected, word by word, so all that holds for the last one holds for this one.
        False, and nothing has happened, where the step before it has not ended well.
        """
        work, session = self._started, self._session
        if work is None or session is None or not work.over or work.urgent:
            return False
        session.went_on()
        if self._header is not None:
            self._header.move_on(token)
        work.again(token, activation)
        work.wave = wave
        self._context.scheduler.add(work)
        return True

    def revoke_relay(self) -> None:
        """What is on loan is the event loop's again when this returns."""
        if self._relay is not None:
            self._relay.revoke()

    def _frame_to_come(self, message: Message) -> tuple[memoryview | None, Frame]:
        """The buffer for the boundary of a one-token frame, and what is sent once its row has run."""
        downstream, info = self.downstream, self._context.info
        if downstream is None:
            stats = self.stats.take()
            self.repeats = stats is EMPTY_STATS
            if self.repeats:
                return None, token_frame
            return None, functools.partial(prediction_frame, stats=stats)
        output = allocate(message.token_count * info.output_width * 4)
        # The header only refers to the activation, which the engine is about to compute.
        buffers = encode_forwarded(message, self._context.stage_index, output, info.output_width)
        self.repeats = StepHeader.fits(buffers[0])
        self._header = StepHeader(buffers[0]) if self.repeats else None

        def frame(_: Predicted, work: Work) -> Sequence[Buffer]:
            set_seq_id(buffers[0], downstream.wave_word(work.wave))
            return buffers

        return output, frame

    def start_run(self, message: Message, run: LocalRun) -> PendingReply | None:
        """Hand the engine a decode step, after which it goes on by itself, as ``run`` says.

        Returns the place of what ends the run: an Ack, or the lane's failure. None, and nothing has happened,
        where this stage is not all of the chain, something would have to be waited for, or each step is to be
        recorded. Only after :meth:`settle`. Raises as :meth:`carry_out`.
        """
        session = self._session
        if (
            not (self.downstream is None and self._answers.stay_here)
            or session is None
            or not session.takes_now(message)
            or self._context.telemetry.enabled(Level.DEBUG)
        ):
            return None
        self._machine.receive(message)
        check_data(message, self._context.stage_index, self._context.info.max_batch)
        place = PendingReply()

        def settle(error: Exception | None) -> None:
            if error is not None:
                self._lane.fail_for(error)
            elif self._machine.state is not UpstreamState.CLOSED:  # which has failed the place
                self._owed.remove(place)
                place.set(Reply.ack())

        self._started = session.prepare_run(message, run, settle)
        self._owed.append(place)
        session.start(self._started)
        return place

    def went_on(self) -> None:
        """A step of the run has begun by itself."""
        if self._session is not None:
            self._session.went_on()

    def _reported(self, sink: Sink, message: Message) -> Sink:
        telemetry, index = self._context.telemetry, self._context.stage_index
        return reported(sink, telemetry, message, index) if telemetry.enabled(Level.DEBUG) else sink

    def _tell_rewound(self, held: int, work: Work) -> None:
        """Record that a session that held so many positions goes on from an earlier one."""
        position = work.segment.position
        if position < held:
            first = self._context.stage_index == 0
            self._context.telemetry.emit(
                names.STAGE_OPENAI_SESSION_AUTO_ALIGN if first else names.STAGE_BINARY_SESSION_AUTO_ALIGN,
                level=Level.DEBUG,
                before_token_count=held,
                after_token_count=position,
            )

    def _forms_waves(self, message: Message) -> bool:
        """Whether stage 0 may compute this row together with those of other lanes, as a wave."""
        return self.gets_predictions and message.kind in ONE_TOKEN

    def _place_for(self, message: Message, times: Times | None) -> PendingReply | None:
        """Predictions come back to stage 0 of a longer chain, so there a place is kept for each."""
        if not self.gets_predictions or not requires_predicted_reply(message.kind):
            return None
        self.predictions.check_awaited(message.kind)
        complete = self.stats.complete
        if times is not None and message.kind is MessageKind.VERIFY_WINDOW:
            complete = functools.partial(self.stats.complete_window, message, times)
        return PendingReply(complete=complete)

    def pause(self) -> None:
        """Batches must not wait for the session's next step. Never waits."""
        if self._session is not None:
            self._session.pause()

    def drop_session(self) -> bool:
        """Give the session's sequence back; False when there was none. Never waits."""
        self.revoke_relay()
        if self._session is None:
            return False
        self._session.close()
        self._session = None
        return True
