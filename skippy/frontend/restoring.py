"""What the stages still have of a prompt: asked for before the rest of it is computed.

Stage 0 asks its own cache first, which costs nothing; only what it has itself is asked of the others. One
question goes down the chain, and its answer says how much all of them have: see ``docs/protocol.md``, section
"Cached prefixes".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from skippy.kv.replay import ReplayCache
from skippy.kv.schedule import ChunkPlan
from skippy.protocol import EMPTY_STATS, MessageKind, ReplyKind, ReplyStats, settled_length
from skippy.protocol.stats import fused_hit, merge, stage_count
from skippy.stage import PendingReply, Stage
from skippy.telemetry import Level, names

from .generation import GenerationRequest, HitKind
from .lanes import LanePool, PooledLane
from .prefill import send

MAX_AUDIT_CHUNKS: Final = 32
"""Chunks of an entry that are computed again: beyond, an audit would take a request too long."""


@attrs.frozen(slots=True, kw_only=True)
class Plan:
    """What stage 0 has of a request's tokens, before anyone else is asked.

    Attributes:
        length: how many of the first tokens its cache holds; 0: nothing that is worth asking for.
        audit: not 0: nothing is to be restored; the first ``audit`` tokens, computed in chunks of
            ``schedule`` as the entry was, are to be compared with it.
        schedule: sizes of the first chunks, where they are not free.
        checkpoints: behind which of the tokens a chunk is to end, so that every stage can keep its state.
    """

    length: int = 0
    audit: int = 0
    schedule: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()


NOTHING: Final = Plan()


@attrs.frozen(slots=True, kw_only=True)
class Restored:
    """What a lane's session holds on every stage.

    Attributes:
        length: tokens, the first of the request.
        first: the place of the first generated token, where that came with it.
        kind: how it came to be; None: there was nothing.
    """

    length: int = 0
    first: PendingReply | None = None
    kind: HitKind | None = None


class Restorer:
    """Restores prompts from the stages' caches.

    Args:
        chunks: those in which a request's prompt is always computed, and so all of it that is restored; None:
            it may be cut otherwise.
        draw: a number from [0, 1) for each hit; those below the audit rate are computed all the same.

    Attributes:
        era: how often answers were forgotten: what began in an earlier one leaves none.
        totals: what the stages have said of their caches, over all requests of the endpoint.
        hits_by_stage: how often each stage, by its index, had what it was asked for.
    """

    def __init__(
        self,
        stage: Stage,
        pool: LanePool,
        chunks: Callable[[GenerationRequest], ChunkPlan | None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._cache = stage.context.cache
        self._pool = pool
        self._chunks = chunks
        self._telemetry = stage.context.telemetry
        self._draw = draw
        settings = None if self._cache is None else self._cache.settings
        self._answers = None if settings is None else ReplayCache(settings)
        self.era = 0
        self.totals = EMPTY_STATS
        self.hits_by_stage: dict[int, int] = {}

    def chosen_for_audit(self) -> bool:
        """Whether the next request, if it is a hit, is to be computed all the same, and compared."""
        return self._cache is not None and self._draw() < self._cache.settings.audit_rate

    def keeps(self, length: int) -> bool:
        """Whether a prompt of so many tokens, once computed, is there for the next request."""
        if self._cache is None or not self._cache.settings.lookup:
            return False
        return length >= self._least

    @property
    def _least(self) -> int:
        assert self._cache is not None
        return max(1, self._cache.settings.min_tokens)

    def known_answer(self, request: GenerationRequest) -> tuple[int, ...]:
        """The first tokens that an equal request was given, where this one must be given the same."""
        if self._answers is None or request.top_logprobs is not None:
            return ()
        return self._answers.find(
            request.namespace, request.prompt, request.sampling, metadata=_metadata(request)
        )

    def record_answer(
        self, request: GenerationRequest, tokens: Sequence[int], era: int, *, audited: bool = False
    ) -> None:
        """Remember what a request was given that began in ``era``; ``audited``: it was computed afresh."""
        if tokens and self._answers is not None and era == self.era:
            self._answers.record(
                request.namespace,
                request.prompt,
                request.sampling,
                tokens,
                metadata=_metadata(request),
                audited=audited,
            )

    async def plan(self, request: GenerationRequest, generated: Sequence[int], *, audit: bool) -> Plan:
        """Look for the request's tokens in stage 0's own cache.

        Waits only while another request, which has just ended, may be leaving more of them there.

        Args:
            generated: follow the prompt.
            audit: a hit is to be computed all the same.
        """
        cache = self._cache
        if cache is None:
            return NOTHING
        namespace, tokens = request.namespace, tokens_before_last(request, generated)
        chunks = self._chunks(request)
        if not self.keeps(len(tokens)):
            return Plan(checkpoints=cache.plan_checkpoints(namespace, tokens, 0, chunks))
        length = cache.longest(namespace, tokens, chunks)
        if await self._pool.wait_kept(namespace, tokens, max(length, self._least - 1)):
            length = cache.longest(namespace, tokens, chunks)
        if not length:
            cache.missed()
        if length and audit:
            return self._audit(namespace, tokens, chunks) or Plan(length=length)
        checkpoints = cache.plan_checkpoints(namespace, tokens, length, chunks)
        return Plan(length=length, checkpoints=checkpoints)

    def _audit(self, namespace: str, tokens: tuple[int, ...], chunks: ChunkPlan | None) -> Plan | None:
        assert self._cache is not None
        match = self._cache.index.match(namespace, tokens, chunks)
        if match is None:
            return None
        schedule, audited = [], 0
        for size in match.entry.schedule[:MAX_AUDIT_CHUNKS]:
            if audited + size > match.length:
                break
            schedule.append(size)
            audited += size
        if match.entry.schedule and not audited:  # a part of its first chunk, not compared bit by bit
            schedule, audited = [match.length], match.length
        return Plan(audit=audited, schedule=tuple(schedule)) if audited else None

    async def restore(
        self, pooled: PooledLane, request: GenerationRequest, generated: Sequence[int], plan: Plan
    ) -> Restored:
        """Have every stage put what it has into the lane's new session, behind its settings.

        Cancellation: stages may have restored it, and this one may not know how much.

        Raises:
            StageError: the lane has ended.
        """
        if not plan.length:
            return Restored()
        tokens = tokens_before_last(request, generated)
        restored, stats = Restored(), EMPTY_STATS
        with self._telemetry.span(names.STAGE_OPENAI_KV_LOOKUP_DECISION, level=Level.SUMMARY) as span:
            if plan.length == len(tokens) and not generated:
                restored, stats = await self._fused(pooled, request, tokens)
            if restored.kind is None:
                restored, more = await self._plain(pooled, request, tokens, plan.length)
                stats = merge(stats, more)
            span["decision"] = restored.kind or "miss"
            span["asked_token_count"], span["restored_token_count"] = plan.length, restored.length
            span["hit_stage_count"] = stage_count(stats.kv_hit_stage_mask)
            span["lookup_hits"], span["lookup_misses"] = stats.kv_lookup_hits, stats.kv_lookup_misses
            span["lookup_errors"] = stats.kv_lookup_errors
        return restored

    def joins(self, request: GenerationRequest, plan: Plan, restored: Restored) -> bool:
        """Whether the prompt's last token is to go with the chunk before it, behind what was restored.

        Not where the stages keep their state as it is before that token, for equal prompts; nor where stage 0
        has more than was restored, and perhaps the boundary of whole chunks; nor in safe mode, where an equal
        prompt, whose last token runs alone, has to be given the same bits.
        """
        return (
            self._cache is not None
            and self._cache.sliceable
            and not self._cache.scheduler.safe
            and 0 < restored.length == plan.length < len(request.prompt) - 1
        )

    async def _fused(
        self, pooled: PooledLane, request: GenerationRequest, tokens: tuple[int, ...]
    ) -> tuple[Restored, ReplyStats]:
        """All of the prompt, and its first decode step in the same frame; nothing where a stage lacks any."""
        last = request.prompt[-1]
        place = await send(
            pooled,
            MessageKind.TRY_RESTORE_PREFILL_DECODE,
            pos_start=len(tokens),
            tokens=(*tokens, last),
            token_count=1,
            current_token=last,
            decode_step=0,
            prompt_token_count=len(request.prompt),
        )
        reply = await place.wait()
        if reply.kind is ReplyKind.ACK:
            return Restored(), reply.stats
        restored = Restored(length=len(tokens), first=place, kind="chain_fused_exact_prefix")
        return restored, fused_hit(reply.stats)

    async def _plain(
        self, pooled: PooledLane, request: GenerationRequest, tokens: tuple[int, ...], length: int
    ) -> tuple[Restored, ReplyStats]:
        """The first ``length`` tokens, or as many of them as all stages have."""
        place = await send(
            pooled,
            MessageKind.TRY_RESTORE_PREFILL,
            tokens=tokens[:length],
            token_count=length,
            prompt_token_count=length,
        )
        reply = await place.wait()
        settled = settled_length(reply, length, negotiated=True)
        return Restored(length=settled, kind="chain_prefix" if settled else None), reply.stats

    def forget(self) -> None:
        """Remember no answers, nor those of requests that run; they are soon known again."""
        self.era += 1
        if self._answers is not None:
            self._answers.clear()

    def learn(self, stats: ReplyStats) -> None:
        """Take what the stages have said of one request."""
        self.totals = merge(self.totals, stats)
        mask = max(0, stats.kv_hit_stage_mask)
        for index in range(mask.bit_length()):
            if mask >> index & 1:
                self.hits_by_stage[index] = self.hits_by_stage.get(index, 0) + 1


def tokens_before_last(request: GenerationRequest, generated: Sequence[int]) -> tuple[int, ...]:
    """All that is known of a request but its last token, which is always computed: it predicts the next."""
    return (*request.prompt, *generated)[:-1]


def _metadata(request: GenerationRequest) -> str | None:
    """What else than its sampling settings has a say in a request's answer."""
    return None if request.constraint is None else request.constraint.grammar
