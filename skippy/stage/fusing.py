"""A prefix restored and a token decoded behind it in one message, TryRestorePrefillDecode.

It is a decode step that only runs where all of the prefix is restored, on every stage. Its answer is a
prediction, and takes the way of predictions: the last stage answers, stages in between reply nothing. A stage
without the prefix passes the frame on without its row, and the last stage then answers with the Ack of a
miss. So stages before it have run a row that is not to count. Stage 0 hears of that from the answer; one in
between takes it from the next message, which is no decode step then.
"""

from __future__ import annotations

from typing import Final

import attrs

from skippy.protocol import (
    Message,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyKind,
    UpstreamEvent,
    UpstreamState,
    default_state,
)
from skippy.protocol.stats import fused_hit, merge

from .errors import SettingsRefused
from .express import decode_span
from .framing import allocate
from .queues import PendingReply
from .remembering import RememberedSession
from .restoring import MISS, Restores
from .session import Predicted
from .settings import parse_metadata
from .work import Work

_REPLAYS: Final = (UpstreamEvent.REPLAY, UpstreamEvent.REPLAY_FINAL)
_AFTER_A_MISS: Final = frozenset(
    {
        UpstreamEvent.PREFILL,
        UpstreamEvent.PREFILL_FINAL,
        UpstreamEvent.CONFIGURE,
        *_REPLAYS,
        UpstreamEvent.RESTORE,
        UpstreamEvent.RESTORE_DECODE,
    }
)


class FusedRestores(Restores):
    """Carries out TryRestorePrefillDecode."""

    _fused_length = 0
    """Positions that were restored for the last one."""

    async def _restore_and_decode(self, message: Message) -> None:
        """Restore, decode and pass on or answer. Raises as :meth:`Execution.carry_out`.

        Cancellation: it may have run here and not further down.
        """
        stale = self._session is not None and self._session.is_stale(message)
        if stale and self._session is not None:
            self._session.skip(message)
        elif message.token_count and (session := await self._restore_whole(message)) is not None:
            await self._decode_behind(session, message)
            return
        if not stale:
            self._machine.restore_missed()
            await self._give_back_restored(message)
        await self._pass_on_miss(message)

    async def _give_back_restored(self, message: Message) -> None:
        """After a miss no stage holds what another question has restored, and stage 0 passes no miss on."""
        if self._session is not None:
            self._session.unrestore()
        if self._context.stage_index == 0:
            await self._empty_below(message)
        self._below = 0

    async def _restore_whole(self, message: Message) -> RememberedSession | None:
        """The session, with all of the prefix; None where this stage has not all of it."""
        session, tokens = self._ensure_session(), message.tokens[:-1]
        settings = parse_metadata(message.chat_sampling_metadata)
        if settings != type(settings)():
            raise SettingsRefused(f"{message.kind.name} brings settings that ConfigureGeneration alone can")
        length, stats = await self._recall(session, tokens, True)
        if not length:
            return None
        session.settle(message, length)
        self._fused_length = length
        self.stats.add(merge(stats, self._restored(length)))
        return session

    async def _decode_behind(self, session: RememberedSession, message: Message) -> None:
        context, downstream = self._context, self.downstream
        step = _as_step(message)
        output = allocate(context.info.output_width * 4) if downstream else None
        outcome: list[Predicted] = []

        def keep(predicted: Predicted, _: Work) -> bool:
            outcome.append(predicted)
            return True

        if downstream is None:
            await self._answers.open(message)
        work = await session.prepare(step, output, keep)
        assert work is not None, "what was restored for a frame does not make it stale"
        with decode_span(context.telemetry, message, context.stage_index) as span:
            await session.run(work)
            span["compute_ms"], span["decode_batch_size"] = work.compute_us / 1000, work.batch_size
        if downstream is None or output is None:
            self._machine.restore_hit()
            assert isinstance(outcome[0], int)
            reply = self._reported_hit(Reply.predicted_token(outcome[0], self.stats.take()))
            await self._answers.send(reply, session.take_annex())
            return
        place = None
        if context.stage_index == 0:
            if not self._machine.configured:
                self.predictions.await_stream(message.request_id, message.session_id)
            place = PendingReply(complete=self._answered)
        frame = message.forwarded(context.stage_index, output)

        def keep_place() -> None:
            if place is not None:
                self.predictions.keep(frame.kind, place)

        await downstream.send(frame, on_queued=keep_place)
        if place is not None:
            await self._replies.put(place)

    def _answered(self, reply: Reply) -> Reply:
        """Stage 0: the last stage has answered."""
        reply = self.stats.complete(reply)
        if self._machine.state is UpstreamState.FUSED:
            if reply.kind is ReplyKind.PREDICTED_TOKEN:
                self._machine.restore_hit()
                return self._reported_hit(reply)
            self._machine.restore_missed()
            if self._session is not None:
                self._session.roll_back()
        return reply

    def _reported_hit(self, reply: Reply) -> Reply:
        """The answer to a hit, which stage 0 tells of; one that is a miss is followed by another question."""
        if self._context.stage_index == 0:
            self._report(self._fused_length, fused_hit(reply.stats))
        return reply

    async def _pass_on_miss(self, message: Message) -> None:
        """The prefix, or part of it, is not here: the last stage says so, or stage 0 where it is its own."""
        if self._context.stage_index == 0:
            await self._owe(Reply.ack(self.stats.take(MISS)))
        elif self.downstream is not None:
            self._check_skippable(message)
            await self.downstream.send(message.skipped(self._context.stage_index))
        else:
            await self._answers.open(message)
            await self._answers.send(Reply.ack(self.stats.take(MISS)))

    def _undo_missed(self, event: UpstreamEvent, message: Message) -> None:
        """In between, behind a frame that was carried out here: is this what follows a miss further down?

        A replay is where it begins: behind a hit it goes on from what was restored.

        Raises:
            RemoteProtocolError: a replay that does not say where it begins. Our own stage 0 always does.
        """
        if event in _REPLAYS and message.pos_start < 0:
            raise RemoteProtocolError(
                f"{message.kind.name} without a position behind TryRestorePrefillDecode, whose answer this "
                "stage has not seen; give its pos_start"
            )
        behind_a_hit = event in _REPLAYS and message.pos_start > 0
        if event in _AFTER_A_MISS and not behind_a_hit and self._session is not None:
            self._session.roll_back()


def _as_step(message: Message) -> Message:
    """The decode step in it."""
    kind = MessageKind.DECODE_EMBD
    plain = default_state(kind)
    state = attrs.evolve(message.state, phase=plain.phase, flags=plain.flags)
    return attrs.evolve(message, kind=kind, state=state, tokens=message.tokens[-1:])
