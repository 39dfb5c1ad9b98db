"""What one stage does with the messages of one lane: each is carried out here and passed on."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from skippy.protocol import (
    CACHE_CONTROL_KINDS,
    DATA_KINDS,
    Message,
    MessageKind,
    Reply,
    ReplyAnnex,
    UpstreamState,
    is_skipped,
    is_together,
    mark_together,
    requires_predicted_reply,
    stale_reply,
)
from skippy.telemetry import Level, names

from .clock import microseconds
from .downstream import Downstream
from .express import decode_span
from .framing import allocate
from .fusing import FusedRestores
from .intake import check_data, check_restore, sequence_of, wave_of
from .queues import PendingReply
from .remembering import RememberedSession
from .reports import cache_report, report_annex, timing_report
from .session import Predicted
from .settings import GenerationSettings, grammar_start, parse_metadata
from .statistics import Times
from .work import Work


def _no_annex(_: ReplyAnnex | None) -> None:
    """An acknowledgement carries none."""


class Execution(FusedRestores):
    """Carries out the messages of one lane, in order. It waits in its caller's task and starts none."""

    async def wait_settled(self) -> None:
        """Wait until every acknowledgement and prediction owed so far has come.

        Raises the lane's failure, or waits for ever, when the lane ends first.
        """
        await self.wait_started()
        if self.downstream is not None:
            await self.downstream.wait_drained()
        for place in [*self._owed, *self.predictions.places]:
            await place.wait()

    def receive(self, message: Message) -> bool:
        """Check that a message fits here and now, else RemoteProtocolError; returns whether it is stale."""
        session = self._session
        stale = is_skipped(message) if session is None else session.is_stale(message)
        undecided = self._machine.state is UpstreamState.FUSED
        event = self._machine.receive(message, stale=stale)
        if undecided:
            self._undo_missed(event, message)
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
        elif kind is MessageKind.TRY_RESTORE_PREFILL_DECODE:
            check_restore(message, self._context.stage_index)
            await self._restore_and_decode(message)
        elif kind in CACHE_CONTROL_KINDS:
            check_restore(message, self._context.stage_index)
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
        session = self._ensure_session()
        await session.place()
        downstream = self.downstream
        if downstream is not None and message.kind is MessageKind.PREFILL_EMBD:
            rows = session.held_rows(message)
            if rows is not None:
                frame = message.forwarded(context.stage_index, rows)
                await self._forward(downstream, mark_together(frame) if downstream.restores else frame, None)
                return
        output = allocate(message.token_count * context.info.output_width * 4) if downstream else None
        outcome: list[Predicted] = []

        def keep(predicted: Predicted, _: Work) -> bool:
            outcome.append(predicted)
            return True

        held = session.length
        work = await session.prepare(message, output, keep)
        if work is None:
            await self._skip(message)
            return
        self._tell_rewound(held, work)
        if session.holding is not None and self._is_together(message):
            session.holding.together()
        work.wave, work.forms_waves = wave, self._forms_waves(message)
        times = self.stats.measure(message)
        place = self._place_for(message, times)
        with decode_span(context.telemetry, message, context.stage_index) as span:
            await session.run(work)
            if not work.decodes:
                session.grow(message.token_count, message.state.prompt_token_count)
                if output is not None:
                    session.record_rows(output, message.token_count)
            span["compute_ms"], span["decode_batch_size"] = work.compute_us / 1000, work.batch_size
        if times is not None:
            times.compute_us = work.compute_us
        if downstream is None or output is None:
            if times is not None:
                self.stats.observe(message, times, sent=False)
            await self._answer(session, message, outcome[0])
        else:
            # Behind TryRestorePrefillDecode a stage in between does not know where the session ends.
            placed = message if message.pos_start >= 0 else attrs.evolve(message, pos_start=held)
            frame = downstream.with_wave(placed.forwarded(context.stage_index, output), work.wave)
            if not work.decodes and downstream.restores and not session.alone:
                frame = mark_together(frame)
            await self._forward(downstream, frame, place, times)
        if place is not None:
            await self._replies.put(place)
        elif message.kind is MessageKind.VERIFY_WINDOW:
            self._windows.resolve(message.state.seq_id, message.token_count)

    def _is_together(self, message: Message) -> bool:
        """Whether rows up to this message's were perhaps not computed alone further up, or are no chunk."""
        if message.kind is MessageKind.VERIFY_WINDOW:
            return True
        return self._context.stage_index > 0 and (self.whole or is_together(message))

    async def _answer(self, session: RememberedSession, message: Message, predicted: Predicted) -> None:
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

    # -- controls --------------------------------------------------------------------------------------

    async def _configure(self, message: Message) -> None:
        context = self._context
        session = self._ensure_session()
        settings = parse_metadata(message.chat_sampling_metadata)
        self.stats.begin_request(message.request_id)
        if settings.cache_drop and context.cache is not None:
            context.cache.forget_all(settings.cache_drop)
        if session.holding is None:
            await session.place(sequence_of(message) if self.waves else None)
        else:
            prompt_tokens = message.state.prompt_token_count
            session.holding.configure(settings, prompt_tokens, bypass=self._bypasses(settings))
        if context.info.is_last:
            grammar = None
            if settings.grammar:
                grammar = await context.grammars.open(settings.grammar, grammar_start(message))
            await session.configure(message.sampling, settings, grammar)
            await self._answers.open(message)
        # Predictions come from below, and leave upstream from the two ends of a chain alone.
        channels = [self.downstream or self._answers, *([] if context.stage_index else [self._replies])]
        settings.check_annexed(context.stage_index, channels)
        annex = self._reporter(settings)
        if self.downstream is None:
            await self._replies.put(PendingReply(Reply.ack(self.stats.take()), annex=annex(None)))
            return
        if context.stage_index == 0:
            self.predictions.await_stream(message.request_id, message.session_id)
        if self.plain:  # such peers know nothing of our caches
            settings.check_plain(context.stage_index)
            metadata = GenerationSettings(settings.top_logprobs).to_metadata()
            message = attrs.evolve(message, chat_sampling_metadata=metadata)
        message = self.downstream.with_sequence(message, session.sequence)
        await self._request(self.downstream, message, annex=annex)

    def _reporter(self, settings: GenerationSettings) -> Callable[[ReplyAnnex | None], ReplyAnnex | None]:
        """Makes the annex of the acknowledgement, where the upstream peer asks for a report, and takes it."""
        if not self._replies.annexed or not (settings.cache_report or settings.timing_report):
            return _no_annex
        make = cache_report if settings.cache_report else timing_report
        return functools.partial(report_annex, self._context, make=make)

    async def _stop(self, message: Message) -> None:
        session, alone = self._session, True
        if session is not None:
            if session.holding is not None and self._is_together(message):
                session.holding.together()
            alone = session.alone
        stale = 0 if session is None else session.stale_frames
        await self._finish_session()
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
        if not alone and self.downstream.restores:
            message = mark_together(message)
        await self._request(self.downstream, message, then=self._stopped)

    async def _finish_session(self) -> None:
        """The request has ended in good order."""
        self._below = 0
        self.revoke_relay()
        if self._session is not None:
            await self._session.finish()
            self._session = None
            self._context.served.set()

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

    async def _request(
        self,
        downstream: Downstream,
        message: Message,
        then: Callable[[], None] = lambda: None,
        annex: Callable[[ReplyAnnex | None], ReplyAnnex | None] = _no_annex,
    ) -> None:
        """Send a message on whose acknowledgement, with its statistics and ``annex`` of its, becomes ours."""
        place = PendingReply()

        def on_ack(reply: Reply) -> None:
            if self._machine.state is UpstreamState.CLOSED:
                return  # it arrived as the lane ended, which has failed the place
            self._owed.remove(place)
            then()
            place.set(Reply.ack(self.stats.take(reply.stats)), annex(downstream.annex))

        await downstream.send(message, on_ack=on_ack, on_queued=lambda: self._owed.append(place))
        await self._replies.put(place)
