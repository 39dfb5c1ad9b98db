"""What one stage does with the messages of one lane: each is carried out here and passed on."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

from skippy.protocol import (
    DATA_KINDS,
    EMPTY_STATS,
    Buffer,
    Message,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyStats,
    UpstreamConnection,
    UpstreamState,
    VerifyPipeline,
    encode_forwarded,
    is_skipped,
    requires_predicted_reply,
    set_seq_id,
    stale_reply,
)
from skippy.telemetry import Level, names

from .answers import Answers
from .context import StageContext
from .downstream import Downstream
from .errors import RequestFailed, StageError
from .express import Express, Frame, decode_span, prediction_frame, reported
from .framing import allocate
from .intake import ONE_TOKEN, RESTORES, check_data, check_restore, sequence_of, wave_of
from .interfaces import LaneTasks, ReplySink
from .local_run import LocalRun
from .predictions import Predictions
from .queues import PendingReply
from .session import Predicted, Sink, StageSession
from .settings import parse_metadata
from .statistics import LaneStats, Times, microseconds
from .work import Work


class Execution:
    """Carries out the messages of one lane, in order. It waits in its caller's task and has none of its own.

    Attributes:
        downstream: the connection to the next stage, given before the first message; None on the last stage.
        plain: a neighbour on this lane is a plain generation-8 peer, which knows nothing of stale frames.
        waves: the upstream peer agreed to decode waves; without it, the word in its frames means nothing.
        predictions: what stage 0 is owed on this lane; unused on other stages.
        stats: what was observed on this lane.
    """

    def __init__(self, context: StageContext, replies: ReplySink, lane: LaneTasks) -> None:
        self.downstream: Downstream | None = None
        self.plain = False
        self.waves = False
        self._context = context
        self._replies = replies
        self._lane = lane
        self._machine = UpstreamConnection()
        self._windows = VerifyPipeline()
        self._session: StageSession | None = None
        self.stats = LaneStats(context.stage_index)
        self._answers = Answers(context, replies, lane.start)
        self.tell_why = self._answers.tell_why
        self._started: Work | None = None
        """The frame handled last, if :meth:`start_decode` took it: perhaps still with the engine."""
        self._owed: deque[PendingReply] = deque()
        self.predictions = Predictions(context.hub, context.info.vocab_size, self._windows, lane.lose)

    def end(self, failure: StageError) -> None:
        """The lane has ended: whatever is owed fails. Never waits."""
        live = self._machine.live
        if live is not None and isinstance(failure, RequestFailed):
            self._answers.fail(live[0], failure)
        self._machine.close()
        for reply in self._owed:
            reply.fail(failure)
        self._owed.clear()
        self.predictions.fail(failure)

    async def wait_settled(self) -> None:
        """Wait until every acknowledgement and prediction owed so far has come.

        Raises the lane's failure, or waits for ever, when the lane ends first.
        """
        await self.wait_started()
        if self.downstream is not None:
            await self.downstream.wait_drained()
        for place in [*self._owed, *self.predictions.places]:
            await place.wait()

    def settle(self) -> bool:
        """Settle what :meth:`start_decode` gave the engine; False while the engine is at it. Never waits."""
        return self._started is None or self._started.settle()

    async def wait_started(self) -> None:
        """Wait until the engine is done with what :meth:`start_decode` gave it."""
        if self._started is not None:
            await self._started.wait()

    def receive(self, message: Message) -> bool:
        """Check that a message fits here and now, else RemoteProtocolError; returns whether it is stale."""
        session = self._session
        stale = is_skipped(message) if session is None else session.is_stale(message)
        self._machine.receive(message, stale=stale)
        return stale

    async def carry_out(self, message: Message) -> None:
        """Execute a received message; replies owed for it go to the sink.

        Cancellation: the message may have run here and not further down.

        Raises:
            ProtocolError, LinkClosed, RequestFailed, DownstreamUnavailable: the lane cannot go on.
        """
        await self.wait_started()
        kind = message.kind
        if kind in DATA_KINDS:
            await self._run_data(message)
        elif kind is MessageKind.CONFIGURE_GENERATION:
            await self._configure(message)
        elif kind is MessageKind.STOP:
            await self._stop(message)
        elif kind is MessageKind.TRIM_SESSION:
            await self._trim(message)
        elif kind in RESTORES:
            await self._restore(message)
        else:
            assert kind is MessageKind.RETIRE_VERIFY_WINDOW, "the machine lets nothing else through"
            await self._retire(message)

    # -- data ------------------------------------------------------------------------------------------

    async def _run_data(self, message: Message) -> None:
        context = self._context
        check_data(message, context.stage_index, context.info.max_batch)
        wave = wave_of(message) if self.waves else None
        if message.kind is MessageKind.PREFILL_EMBD:
            await self._owe(Reply.ack())
        session = await self._ensure_session()
        downstream = self.downstream
        output = allocate(message.token_count * context.info.output_width * 4) if downstream else None
        outcome: list[Predicted] = []

        def keep(predicted: Predicted, _: Work) -> bool:
            outcome.append(predicted)
            return True

        work = await session.prepare(message, output, keep)
        if work is None:
            await self._skip(message)
            return
        work.wave, work.forms_waves = wave, self._forms_waves(message)
        times = self.stats.measure(message)
        place = self._place_for(message, times)
        with decode_span(context.telemetry, message) as span:
            await session.run(work)
            span["compute_ms"], span["decode_batch_size"] = work.compute_us / 1000, work.batch_size
        if times is not None:
            times.compute_us = work.compute_us
        if downstream is None or output is None:
            if times is not None:
                self.stats.observe(message, times, sent=False)
            await self._answer(session, message, outcome[0])
        else:
            frame = downstream.with_wave(message.forwarded(context.stage_index, output), work.wave)
            await self._forward(downstream, frame, place, times)
        if place is not None:
            await self._replies.put(place)
        elif message.kind is MessageKind.VERIFY_WINDOW:
            self._windows.resolve(message.state.seq_id, message.token_count)

    def start_decode(self, message: Message) -> bool:
        """Hand a frame of one token to the engine, whose thread sends what comes of it.

        False, and nothing has happened, where something would have to be waited for, or the frame is not of
        that kind. What it refers to is in use until the next message is carried out. See
        :mod:`skippy.stage.express`. Only after :meth:`settle`. Raises as :meth:`carry_out`.
        """
        session, downstream, context = self._session, self.downstream, self._context
        if (
            message.kind not in ONE_TOKEN
            or session is None
            or session.is_stale(message)
            or session.wants_settings(message)
        ):
            return False
        if downstream is None and self._answers.stay_here:
            return not self._replies.full and self._start_local(session, message)
        if session.scores:
            return False
        is_ours = downstream is not None and context.stage_index == 0  # so the prediction comes back here
        if is_ours and self._replies.full:
            return False
        reservation = (downstream or self._answers).reserve()
        if reservation is None:
            return False
        self._machine.receive(message)
        check_data(message, context.stage_index, context.info.max_batch)
        wave = wave_of(message) if self.waves else None
        output, frame = self._frame_to_come(message)
        express = Express(reservation, frame, self._lane.fail_for)
        work = session.prepare_now(message, output, self._reported(express.sink, message), express.settle)
        work.wave, work.forms_waves = wave, self._forms_waves(message)
        place = self._place_for(message, None)
        if place is not None:
            self.predictions.keep(message.kind, place)
            self._replies.put_nowait(place)
        self._started = work
        session.start(work)
        return True

    def _frame_to_come(self, message: Message) -> tuple[memoryview | None, Frame]:
        """The buffer for the boundary of a one-token frame, and what is sent once its row has run."""
        downstream, info = self.downstream, self._context.info
        if downstream is None:
            stats = self.stats.take()
            if stats is EMPTY_STATS:
                return None, prediction_frame
            return None, functools.partial(prediction_frame, stats=stats)
        output = allocate(message.token_count * info.output_width * 4)
        # The header only refers to the activation, which the engine is about to compute.
        buffers = encode_forwarded(message, self._context.stage_index, output, info.output_width)

        def frame(_: Predicted, work: Work) -> Sequence[Buffer]:
            set_seq_id(buffers[0], downstream.wave_word(work.wave))
            return buffers

        return output, frame

    def _start_local(self, session: StageSession, message: Message) -> bool:
        """As :meth:`start_decode`, where this stage is all of the chain: the reply goes to the sink."""
        self._machine.receive(message)
        check_data(message, self._context.stage_index, self._context.info.max_batch)
        place = PendingReply()
        outcome: list[Predicted] = []

        def sink(predicted: Predicted, _: Work) -> bool:
            outcome.append(predicted)
            return True

        def settle(error: Exception | None) -> None:
            if error is not None:
                self._lane.fail_for(error)
            elif self._machine.state is not UpstreamState.CLOSED:  # which has failed the place
                self._owed.remove(place)
                predicted = outcome[0]
                assert isinstance(predicted, int)
                place.set(Reply.predicted_token(predicted, self.stats.take()), session.take_annex())

        work = session.prepare_now(message, None, self._reported(sink, message), settle)
        self._owed.append(place)
        self._replies.put_nowait(place)
        self._started = work
        session.start(work)
        return True

    def start_run(self, message: Message, run: LocalRun) -> PendingReply | None:
        """Hand the engine a decode step, after which it goes on by itself, as ``run`` says.

        Returns the place of what ends the run: an Ack, or the lane's failure. None, and nothing has happened,
        where this stage is not all of the chain, or something would have to be waited for. Only after
        :meth:`settle`. Raises as :meth:`carry_out`.
        """
        session = self._session
        if (
            not (self.downstream is None and self._answers.stay_here)
            or session is None
            or session.is_stale(message)
            or session.wants_settings(message)
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
        telemetry = self._context.telemetry
        return reported(sink, telemetry, message) if telemetry.enabled(Level.DEBUG) else sink

    def _forms_waves(self, message: Message) -> bool:
        """Whether stage 0 may compute this row together with those of other lanes, as a wave."""
        return self.downstream is not None and not self._context.stage_index and message.kind in ONE_TOKEN

    def _place_for(self, message: Message, times: Times | None) -> PendingReply | None:
        """Predictions come back to stage 0 of a longer chain, so there a place is kept for each."""
        if self.downstream is None or self._context.stage_index or not requires_predicted_reply(message.kind):
            return None
        self.predictions.check_awaited(message.kind)
        complete = self.stats.complete
        if times is not None and message.kind is MessageKind.VERIFY_WINDOW:
            complete = functools.partial(self.stats.complete_window, message, times)
        return PendingReply(complete=complete)

    async def _answer(self, session: StageSession, message: Message, predicted: Predicted) -> None:
        """The last stage's reply to a data message, where it owes one.

        The lane may have ended, and dropped ``session``, just as the engine was done.
        """
        if predicted is None:
            if message.kind is MessageKind.DECODE_REPLAY_EMBD:
                await self._owe(Reply.ack(self.stats.take()))
            return
        stats, annex = self.stats.take(), session.take_annex()
        if isinstance(predicted, int):
            reply = Reply.predicted_token(predicted, stats)
        else:
            reply = Reply.of_predicted_tokens(predicted, message.state.seq_id, stats)
        await self._answers.send(reply, annex)

    async def _forward(
        self, downstream: Downstream, frame: Message, place: PendingReply | None, times: Times | None = None
    ) -> None:
        """Send a data message on, the ordinary way; ``times`` where it was carried out and is observed."""

        def keep() -> None:
            if times is not None:
                times.sent_at = microseconds()
            if place is not None:
                self.predictions.keep(frame.kind, place)

        if frame.kind is MessageKind.DECODE_REPLAY_EMBD:
            await self._request(downstream, frame)
            return
        early = frame.kind is MessageKind.PREFILL_EMBD
        spent = await downstream.send(
            frame,
            credit=early,
            on_ack=(lambda reply: self.stats.add(reply.stats)) if early else None,
            on_queued=keep,
        )
        if times is None:
            return
        times.write_us, times.wait_us = spent
        if place is None or frame.kind is not MessageKind.VERIFY_WINDOW:
            self.stats.observe(frame, times, sent=True)

    async def _skip(self, message: Message) -> None:
        """Pass on a stale data message without its rows; the last stage answers that nothing ran."""
        self._check_skippable(message)
        if self.downstream is not None:
            frame = self.downstream.with_wave(message.skipped(self._context.stage_index), None)
            place = self._place_for(frame, None)
            await self._forward(self.downstream, frame, place)
            if place is not None:
                await self._replies.put(place)
                return
        elif requires_predicted_reply(message.kind):
            await self._answers.send(stale_reply(message))
        elif message.kind is not MessageKind.PREFILL_EMBD:  # that one is acknowledged already
            await self._owe(stale_reply(message))
        if message.kind is MessageKind.VERIFY_WINDOW:
            self._windows.resolve(message.state.seq_id, 0)

    def _check_skippable(self, message: Message) -> None:
        """RemoteProtocolError where a neighbour would not know a frame without rows, or its answer."""
        if self.plain:
            raise RemoteProtocolError(
                f"{message.kind.name} of generation {message.state.checkpoint_generation} is not carried "
                "out, and a plain generation-8 peer in this chain cannot be told so"
            )

    # -- controls --------------------------------------------------------------------------------------

    async def _configure(self, message: Message) -> None:
        context = self._context
        session = await self._ensure_session(sequence_of(message) if self.waves else None)
        settings = parse_metadata(message.chat_sampling_metadata)
        if context.info.is_last:
            await session.configure(message.sampling, settings)
            await self._answers.open(message)
        # Predictions come from below, and leave upstream from the two ends of a chain alone.
        channels = [self.downstream or self._answers, *([] if context.stage_index else [self._replies])]
        settings.check_annexed(context.stage_index, channels)
        if self.downstream is None:
            await self._owe(Reply.ack(self.stats.take()))
            return
        if context.stage_index == 0:
            self.predictions.await_stream(message.request_id, message.session_id)
        await self._request(self.downstream, self.downstream.with_sequence(message, session.sequence))

    async def _stop(self, message: Message) -> None:
        stale = 0 if self._session is None else self._session.stale_frames
        self.drop_session()
        self._context.telemetry.emit(
            names.STAGE_BINARY_SESSION_STOP,
            level=Level.DEBUG,
            request_id=message.request_id,
            stale_frames=stale,
        )
        if self.downstream is None:
            await self._answers.release()
            self._stopped()
            await self._owe(Reply.ack(self.stats.take()))
            return
        await self.wait_settled()
        await self.predictions.release()
        await self._request(self.downstream, message, then=self._stopped)

    def _stopped(self) -> None:
        self._machine.stopped()
        self._windows.clear()

    async def _trim(self, message: Message) -> None:
        if self._session is not None:
            await self._session.trim(message)
        if self.downstream is None:
            await self._owe(Reply.ack(self.stats.take()))
            return
        await self._request(self.downstream, message)

    async def _retire(self, message: Message) -> None:
        """No checkpoint to drop: an attention cache can be cut back to any length without one."""
        self._windows.retire(message)
        if self.downstream is not None:
            await self.downstream.send(message)

    async def _restore(self, message: Message) -> None:
        """Answer a question about a cached prefix. There is no cache yet: a miss, and nobody else is asked.

        What TryRestorePrefillDecode asks for is a prediction, so behind stage 0 the last stage answers it,
        on the return stream, and a stage in between passes it on without its rows.
        """
        context = self._context
        check_restore(message, context.stage_index)
        miss = Reply.ack(self.stats.take(ReplyStats(kv_lookup_misses=1)))
        if message.kind is not MessageKind.TRY_RESTORE_PREFILL_DECODE:
            await self._owe(miss)
            return
        if self._session is not None and self._session.is_stale(message):
            self._session.skip(message)
        else:
            self._machine.restore_missed()
        if context.stage_index == 0:
            await self._owe(miss)
        elif self.downstream is not None:
            self._check_skippable(message)
            await self.downstream.send(message.skipped(context.stage_index))
        else:
            await self._answers.open(message)
            await self._answers.send(miss)

    async def _request(
        self, downstream: Downstream, message: Message, then: Callable[[], None] = lambda: None
    ) -> None:
        """Send a message on whose acknowledgement, with its statistics, becomes ours."""
        place = PendingReply()

        def on_ack(reply: Reply) -> None:
            if self._machine.state is UpstreamState.CLOSED:
                return  # it arrived as the lane ended, which has failed the place
            self._owed.remove(place)
            then()
            place.set(Reply.ack(self.stats.take(reply.stats)))

        await downstream.send(message, on_ack=on_ack, on_queued=lambda: self._owed.append(place))
        await self._replies.put(place)

    async def _owe(self, reply: Reply) -> None:
        await self._replies.put(PendingReply(reply))

    # -- sessions --------------------------------------------------------------------------------------

    async def _ensure_session(self, wanted: int | None = None) -> StageSession:
        if self._session is None:
            self._session = await StageSession.open(self._context.scheduler, self._windows, wanted)
        return self._session

    def pause(self) -> None:
        """Batches must not wait for the session's next step. Never waits."""
        if self._session is not None:
            self._session.pause()

    def drop_session(self) -> bool:
        """Give the session's sequence back; False when there was none. Never waits."""
        if self._session is None:
            return False
        self._session.close()
        self._session = None
        return True
