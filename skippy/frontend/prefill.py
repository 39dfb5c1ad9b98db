"""Prompts on their way into the chain: settings first, then chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from skippy.config import OpenAIOptions
from skippy.protocol import Message, MessageKind, ReplyStats, default_state
from skippy.stage import GenerationSettings, PendingReply, Stage
from skippy.telemetry import Level, Span, names

from .chunks import PrefillEstimate, make_policy
from .generation import GenerationRequest
from .lanes import PooledLane


class Prefill:
    """The prefills of one endpoint: how they are cut, and what they have taught about the chain."""

    def __init__(self, stage: Stage, options: OpenAIOptions) -> None:
        self._options = options
        self._telemetry = stage.context.telemetry
        self._safe = stage.context.scheduler.safe
        self._single_stage = stage.context.downstream is None
        self._max_chunk = stage.info.max_batch
        self._decoding: set[PooledLane] = set()
        self.estimate = PrefillEstimate()

    async def run(self, pooled: PooledLane, request: GenerationRequest) -> None:
        """Send the settings and every prompt token but the last; that one is the first decode step.

        The answer to the settings is not waited for: the replies of a lane come in order, so a lane that
        refuses them ends, and the first prediction with it.

        Cancellation: between two chunks, or in one that may have run here and not further down.
        """
        prompt = request.prompt
        request_id, _ = pooled.request or (0, 0)
        with self._telemetry.span(names.STAGE_OPENAI_PREFILL, request_id=request_id) as span:
            await _send(
                pooled,
                MessageKind.CONFIGURE_GENERATION,
                prompt_token_count=len(prompt),
                sampling=request.sampling,
                chat_sampling_metadata=GenerationSettings(request.top_logprobs).to_metadata(),
            )
            await self._send_chunks(pooled, prompt[:-1], span)
        self._decoding.add(pooled)

    def ended(self, pooled: PooledLane) -> None:
        """The generation on this lane is over, or never came to its decode steps."""
        self._decoding.discard(pooled)

    def learn(self, stats: ReplyStats) -> None:
        """Take what the stages of the chain have observed of one request."""
        estimate = self.estimate
        if not estimate.learn(stats):
            return
        self._telemetry.emit(
            names.STAGE_OPENAI_PREFILL_CALIBRATION,
            bottleneck_ms=estimate.bottleneck_ms,
            ms_per_token=estimate.ms_per_token,
            stage=stats.prefill_compute_stage_index,
            token_count=stats.prefill_compute_token_count_at_slowest_rate,
            write_ratio=estimate.write_ratio,
            wait_ratio=estimate.wait_ratio,
            edge_stage=stats.prefill_edge_stage_index,
            edge_activation_bytes=stats.prefill_edge_activation_bytes_max,
            observations=estimate.observations,
        )

    async def _send_chunks(self, pooled: PooledLane, tokens: Sequence[int], span: Span) -> None:
        policy = make_policy(self._options, single_stage=self._single_stage, safe=self._safe)
        self.estimate.seed(policy)
        lane, total = pooled.lane, len(tokens)
        start, sizes, times = 0, list[int](), list[_ChunkTimes]()
        while start < total:
            size = policy.size(len(sizes), total, live_decodes=bool(self._decoding))
            chunk = tokens[start : start + min(size, self._max_chunk)]
            with self._telemetry.span(
                names.STAGE_OPENAI_PREFILL_CHUNK,
                seq_id=len(sizes),
                pos_start=start,
                token_count=len(chunk),
                prefill_credit_limit=lane.machine.credit.limit,
                prefill_pending_replies_before=lane.machine.credit.outstanding,
            ) as chunk_span:
                await _send(
                    pooled,
                    MessageKind.PREFILL_EMBD,
                    seq_id=len(sizes),
                    pos_start=start,
                    tokens=chunk,
                    prompt_token_count=total,
                    current_token=chunk[-1],
                )
                chunk_span["prefill_pending_replies_after"] = lane.machine.credit.outstanding
                if (spent := lane.stats.take_times()) is not None:
                    taken = _ChunkTimes(spent.compute_us / 1000, spent.write_us / 1000, spent.wait_us / 1000)
                    policy.observe(*attrs.astuple(taken))
                    times.append(taken)
                    for name, value in attrs.asdict(taken).items():
                        chunk_span[name] = value
            sizes.append(len(chunk))
            start += len(chunk)
        if self._telemetry.enabled(Level.DEBUG):
            self._describe(span, sizes, times)

    def _describe(self, span: Span, sizes: Sequence[int], times: Sequence[_ChunkTimes]) -> None:
        """What the whole prefill was like, as attributes of its span."""
        for key, value in attrs.asdict(self._options).items():
            if key.startswith("prefill_"):
                span[key] = value
        span["prefill_token_count"] = sum(sizes)
        span["prefill_chunk_count"] = len(sizes)
        span["prefill_chunk_tokens_min"] = min(sizes, default=0)
        span["prefill_chunk_tokens_max"] = max(sizes, default=0)
        for field in attrs.fields(_ChunkTimes):
            values = [getattr(taken, field.name) for taken in times]
            span[field.name] = sum(values)
            span[f"{field.name}_max"] = max(values, default=0.0)
        span["estimate_ms_per_token"] = self.estimate.ms_per_token
        span["estimate_stage"] = self.estimate.latest.prefill_compute_stage_index
        span["estimate_edge_stage"] = self.estimate.latest.prefill_edge_stage_index


@attrs.frozen(slots=True)
class _ChunkTimes:
    """How stage 0 spent a chunk's time: computing it, handing it on, waiting for credit."""

    stage0_compute_ms: float
    forward_write_ms: float
    downstream_wait_ms: float


async def _send(
    pooled: PooledLane, kind: MessageKind, *, pos_start: int = 0, tokens: Sequence[int] = (), **header: Any
) -> PendingReply:
    """Hand one message to the lane; ``header`` holds state words, or settings of the request."""
    sampling, metadata = header.pop("sampling", None), header.pop("chat_sampling_metadata", None)
    assert pooled.request is not None
    request_id, session_id = pooled.request
    return await pooled.handle(
        Message(
            kind,
            attrs.evolve(default_state(kind), **header),
            pos_start=pos_start,
            token_count=len(tokens),
            request_id=request_id,
            session_id=session_id,
            sampling=sampling,
            chat_sampling_metadata=metadata,
            tokens=tokens,
        )
    )
