"""Questions about a cached prefix: answered from this stage's cache, and asked of the stages behind it.

Each stage restores the longest prefix that it has, and asks the next one for no more than that. The answer
that comes back up is the length that all of them have, and each shortens its session to it on the way. See
:mod:`skippy.protocol.restores`.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from skippy.protocol import (
    EMPTY_STATS,
    Message,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyKind,
    ReplyStats,
    UpstreamState,
    ask_for,
    default_state,
    settled_length,
)
from skippy.protocol.stats import merge, stage_count, stage_mask
from skippy.telemetry import names

from .errors import LaneLost
from .queues import PendingReply
from .remembering import RememberedSession
from .restored import RestoreFailed
from .settings import GenerationSettings
from .steps import Steps

MISS = ReplyStats(kv_lookup_misses=1)
HIT = ReplyStats(kv_lookup_hits=1)
_ERROR = ReplyStats(kv_lookup_errors=1)


class Restores(Steps):
    """Answers what is asked about a prefix.

    Attributes:
        plain: a neighbour on this lane is a plain generation-8 peer, which knows nothing of stale frames, nor
            of namespaces.
        whole: the upstream peer takes all of a prefix or nothing.
    """

    plain = False
    whole = False
    _below = 0
    """Positions that the stages behind have restored."""

    async def _restore(self, message: Message) -> None:
        """Answer, when it is settled what the chain has. Raises as :meth:`Execution.carry_out`.

        Cancellation: the session may hold what was restored; Stop gives it back.
        """
        kind = message.kind
        if kind is MessageKind.PROBE_PREFILL:
            await self._probe(message)
        else:
            await self._settle(message, whole=self.whole or kind is MessageKind.RESTORE_PREFILL)

    async def _probe(self, message: Message) -> None:
        """Say how much of the prefix there is, and restore nothing."""
        cache, session, length = self._context.cache, self._session, 0
        if session is not None and session.holding is not None:
            length = session.holding.longest(message.tokens)
        elif cache is not None:
            length = cache.longest("", message.tokens)
        if length < len(message.tokens) and self.whole:
            length = 0
        stats, below = (HIT, EMPTY_STATS) if length else (MISS, EMPTY_STATS)
        if length:
            length, below = await self._ask_below(message, length, message.kind)
        await self._answer_restore(length, merge(stats, below))

    async def _settle(self, message: Message, *, whole: bool) -> None:
        """Restore what all stages have: with ``whole`` all of the prefix, or nothing."""
        session, tokens = self._ensure_session(), message.tokens
        kind = MessageKind.RESTORE_PREFILL if whole and self._negotiated else message.kind
        length, stats = await self._begin_recall(session, tokens, whole)
        if length:
            asked = length
            # The stages behind restore theirs while this one does.
            length, below = await self._ask_below(message, length, kind)
            if not await self._complete(session):
                length, stats = 0, _ERROR
            stats = merge(stats, below)
            if 0 < length < asked and not session.sliceable:
                # Less of it is another entry, and perhaps a shorter one: all take that then, or none.
                settled, (length, again) = length, await self._recall(session, tokens[:length], False)
                if 0 < length < settled:
                    agreed, below = await self._ask_below(message, length, kind)
                    length, again = (length if agreed == length else 0), merge(again, below)
                stats = merge(stats, again)
        if length:
            session.settle(message, length)
            stats = merge(stats, self._restored(length))
        else:
            session.unrestore()
            await self._empty_below(message)
        await self._answer_restore(length, stats)

    async def _recall(
        self, session: RememberedSession, tokens: Sequence[int], whole: bool
    ) -> tuple[int, ReplyStats]:
        """How much of the prefix is in the session now, and what that is for the statistics."""
        length, stats = await self._begin_recall(session, tokens, whole)
        return (length, stats) if not length or await self._complete(session) else (0, _ERROR)

    async def _begin_recall(
        self, session: RememberedSession, tokens: Sequence[int], whole: bool
    ) -> tuple[int, ReplyStats]:
        """:meth:`_recall` before it is certain: how much of the prefix there is."""
        try:
            length = await session.restore(tokens, whole=whole)
        except RestoreFailed:
            return 0, _ERROR
        return length, HIT if length else MISS

    async def _complete(self, session: RememberedSession) -> bool:
        """Wait until the session has what was found; False where it has nothing, after all."""
        try:
            await session.complete()
        except RestoreFailed:
            session.unrestore()
            return False
        return True

    async def _ask_below(self, message: Message, length: int, kind: MessageKind) -> tuple[int, ReplyStats]:
        """How much of ``length`` tokens the stages behind this one have too, and their statistics."""
        if self.downstream is None:
            return length, EMPTY_STATS
        reply = await self._ask(ask_for(message, length, kind))
        settled = settled_length(reply, length, negotiated=self.downstream.restores)
        if kind is not MessageKind.PROBE_PREFILL:
            self._below = settled
        stats = reply.stats
        if not (settled or stats.kv_lookup_misses or stats.kv_lookup_errors):
            stats = merge(stats, MISS)  # it did not even look
        return settled, stats

    async def _empty_below(self, message: Message) -> None:
        """Have the stages behind give back what they restored."""
        if self._below and self.downstream is not None:
            kind = MessageKind.TRIM_SESSION
            empty = attrs.evolve(ask_for(message, 0, kind), state=default_state(kind), token_count=0)
            await self._ask(empty)
        self._below = 0

    async def _ask(self, message: Message) -> Reply:
        """Send a message on and wait for its acknowledgement. Cancelled then, it is still owed."""
        assert self.downstream is not None
        place = PendingReply()

        def on_ack(reply: Reply) -> None:
            if self._machine.state is not UpstreamState.CLOSED:  # which has failed the place
                self._owed.remove(place)
                place.set(reply)

        await self.downstream.send(message, on_ack=on_ack, on_queued=lambda: self._owed.append(place))
        return await place.wait()

    async def _answer_restore(self, length: int, stats: ReplyStats) -> None:
        """``length`` is what the chain has settled on."""
        if self._context.stage_index == 0:
            self._report(length, stats)
        await self._owe(Reply(ReplyKind.ACK, 0 if self.whole else length, stats=self.stats.take(stats)))

    def _restored(self, length: int) -> ReplyStats:
        index = self._context.stage_index
        return ReplyStats(kv_imported_pages=1, kv_imported_tokens=length, kv_hit_stage_mask=stage_mask(index))

    def _report(self, length: int, stats: ReplyStats) -> None:
        """What the chain is spared."""
        stages, row_bytes = stage_count(stats.kv_hit_stage_mask), self._context.info.output_width * 4
        self._context.telemetry.emit(
            names.STAGE_KV_RESTORE,
            restored_token_count=length,
            hit_stage_count=stages,
            lookup_hits=stats.kv_lookup_hits,
            lookup_misses=stats.kv_lookup_misses,
            lookup_errors=stats.kv_lookup_errors,
            stage0_activation_bytes_avoided=length * row_bytes,
            inter_stage_activation_bytes_avoided=length * row_bytes * max(0, stages - 1),
        )

    @property
    def _negotiated(self) -> bool:
        """Whether the next stage may answer with less than it is asked for."""
        return self.downstream is not None and self.downstream.restores

    def _bypasses(self, settings: GenerationSettings) -> bool:
        """Whether a neighbour would restore what the request must not be given."""
        return self.plain and bool(settings.cache_namespace or settings.cache_chunks)

    def _check_skippable(self, message: Message) -> None:
        """RemoteProtocolError where a neighbour would not know a frame without rows, or its answer."""
        if self.plain:
            raise RemoteProtocolError(
                f"{message.kind.name} of generation {message.state.checkpoint_generation} is not carried "
                "out, and a plain generation-8 peer in this chain cannot be told so"
            )

    async def _owe(self, reply: Reply) -> None:
        await self._replies.put(PendingReply(reply))

    def _ensure_session(self) -> RememberedSession:
        """The lane's session: a new one before its first rows, settings or prefix. LaneLost: it ended."""
        if self._machine.state is UpstreamState.CLOSED:
            raise LaneLost("the lane has ended")
        if self._session is None:
            self._session = RememberedSession(self._context.scheduler, self._windows, self._context.cache)
        return self._session
