"""Prompts on their way into the chain: settings first, then chunk after chunk of what the stages do not have.

Where a generation is taken up again on another lane, what it had generated follows the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from skippy.config import OpenAIOptions
from skippy.kv.replay import MAX_REPLAY_TOKENS
from skippy.kv.schedule import ChunkPlan
from skippy.protocol import Message, MessageKind, ReplyStats, default_state
from skippy.stage import GenerationSettings, PendingReply, Stage
from skippy.telemetry import Level, Span, Telemetry, names

from .chunks import ChunkPolicy, PrefillEstimate, fixed_sizes, make_policy
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
        # Where sequences share their cells, numbers depend on what else is in these, whatever the chunks.
        sizes = fixed_sizes(options) if self._safe and not stage.config.kv_unified else ()
        self._sizes = tuple(min(size, self._max_chunk) for size in sizes)

    def chunks(self, request: GenerationRequest) -> ChunkPlan | None:
        """The chunks in which a prompt is always computed, and so all of it that may be restored.

        None where that is not promised: only in safe mode an answer depends on the request alone.
        """
        return ChunkPlan(self._sizes, len(request.prompt) - 1) if self._sizes else None

    async def configure(
        self,
        pooled: PooledLane,
        request: GenerationRequest,
        *,
        audit: int = 0,
        checkpoints: tuple[int, ...] = (),
    ) -> PendingReply:
        """Send the request's settings; the place of their acknowledgement.

        It need not be waited for: the replies of a lane come in order, so a lane that refuses the settings
        ends, and the first prediction with it. Cancellation: they may have been taken here and not further
        down.

        Args:
            audit: so many of the first tokens each stage compares with what it remembers; 0: none.
            checkpoints: behind which tokens each stage is to keep its state, if a chunk ends there.
        """
        grammar = "" if request.constraint is None else request.constraint.grammar
        settings = GenerationSettings(
            request.top_logprobs,
            request.namespace,
            audit,
            grammar=grammar,
            cache_checkpoints=checkpoints,
            cache_chunks=self._sizes,
        )
        return await send_settings(
            pooled, settings, prompt_token_count=len(request.prompt), sampling=request.sampling
        )

    async def run(
        self,
        pooled: PooledLane,
        request: GenerationRequest,
        generated: Sequence[int] = (),
        held: int = 0,
        schedule: Sequence[int] = (),
        checkpoints: Sequence[int] = (),
        *,
        joined: bool = False,
    ) -> PendingReply | None:
        """Send, behind the settings, every prompt token but the last; that one is the first decode step.

        Where that is ``joined`` with the last chunk, which predicts then, returns its prediction's place.

        With ``generated``, which a lane that was lost had come to, the whole prompt and then those are sent.
        The last stage takes all of them into its sampler and draws only what follows the last one: returns
        the place of that prediction. A few, as known answers are, and in safe mode all go one by one, as they
        were first computed: rows in other batches would move the numbers of a quantised model.

        Args:
            held: of all those tokens, how many the session has on every stage, so that they are not sent; the
                last one is never among them.
            schedule: sizes of the first chunks, where they are not free.
            checkpoints: behind which tokens a chunk must end, ascending.
            joined: spares the stages a pass for one token, where the prompt's rows are few.

        Cancellation: between two chunks, or in one that may have run here and not further down.
        """
        prompt = request.prompt
        request_id, _ = pooled.request or (0, 0)
        place = None
        with self._telemetry.span(names.STAGE_OPENAI_PREFILL, request_id=request_id) as span:
            few = len(generated) <= MAX_REPLAY_TOKENS or self._safe
            prefilled = prompt[:-1] if few and not joined else prompt
            total = len(prefilled) + (0 if few else len(generated))
            chunks = self.chunks(request)
            done = 0 if chunks is None else sum(1 for _ in chunks.ends(held))
            feed = self._feed(pooled, total - held, schedule, checkpoints, done)
            place = await feed.prefill(prefilled, held, predicts=joined and not generated)
            if generated:
                feed.largest = 1 if few else self._max_chunk
                await feed.prefill(prompt, max(held, len(prefilled)))
                place = await feed.replay(len(prompt), generated, max(0, held - len(prompt)))
                span["replayed_token_count"] = len(generated)
            span["restored_token_count"] = held
            if self._telemetry.enabled(Level.DEBUG):
                self._describe(span, feed.sizes, feed.times)
        self._decoding.add(pooled)
        return place

    def _feed(
        self, pooled: PooledLane, total: int, schedule: Sequence[int], checkpoints: Sequence[int], done: int
    ) -> _Feed:
        """``done``: chunks of the prompt that are restored, where the others go on from them."""
        policy = make_policy(self._options, single_stage=self._single_stage, safe=self._safe)
        self.estimate.seed(policy)

        def size(index: int) -> int:
            if index < len(schedule):
                return schedule[index]
            return policy.size(done + index, total, live_decodes=bool(self._decoding))

        return _Feed(pooled, policy, size, self._telemetry, self._max_chunk, checkpoints)

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


@attrs.define(slots=True)
class _Feed:
    """The rows of one request on their way into a lane.

    Attributes:
        size: tokens of the chunk of this number at most.
        largest: tokens of any chunk at most.
        ends: positions that no chunk of a prompt goes across, ascending.
        sizes, times: of the chunks so far.
    """

    _pooled: PooledLane
    _policy: ChunkPolicy
    _size: Callable[[int], int]
    _telemetry: Telemetry
    largest: int
    ends: Sequence[int] = ()
    sizes: list[int] = attrs.field(factory=list)
    times: list[_ChunkTimes] = attrs.field(factory=list)

    def _next_size(self) -> int:
        return min(self._size(len(self.sizes)), self.largest)

    async def prefill(
        self, tokens: Sequence[int], start: int = 0, *, predicts: bool = False
    ) -> PendingReply | None:
        """Send the first tokens of the request, those from ``start`` on.

        ``predicts``: they are all of the prompt; returns the place of what follows it.
        """
        place = None
        while start < len(tokens):
            end = next((end for end in self.ends if end > start), len(tokens))
            chunk = tokens[start : min(end, start + self._next_size())]
            header = {"seq_id": len(self.sizes), "prompt_token_count": len(tokens)}
            if predicts and start + len(chunk) == len(tokens):
                place = await self._send(
                    MessageKind.PREFILL_FINAL_EMBD, start, chunk, decode_step=0, **header
                )
            else:
                await self._send(MessageKind.PREFILL_EMBD, start, chunk, **header)
            start += len(chunk)
        return place

    async def replay(self, prompt_tokens: int, generated: Sequence[int], done: int = 0) -> PendingReply:
        """Send what was generated behind the prompt, but for the first ``done``; the place of what follows.

        Step ``n`` executes the ``n``-th generated token, so a frame's step is that of its last one.
        """
        while True:
            chunk = generated[done : done + self._next_size()]
            start, done = prompt_tokens + done, done + len(chunk)
            ends = done == len(generated)
            place = await self._send(
                MessageKind.DECODE_REPLAY_FINAL_EMBD if ends else MessageKind.DECODE_REPLAY_EMBD,
                start,
                chunk,
                prompt_token_count=prompt_tokens,
                decode_step=done,
            )
            if ends:
                return place

    async def _send(self, kind: MessageKind, start: int, chunk: Sequence[int], **header: int) -> PendingReply:
        lane = self._pooled.lane
        with self._telemetry.span(
            names.STAGE_OPENAI_PREFILL_CHUNK,
            seq_id=len(self.sizes),
            pos_start=start,
            token_count=len(chunk),
            prefill_credit_limit=lane.machine.credit.limit,
            prefill_pending_replies_before=lane.machine.credit.outstanding,
        ) as span:
            place = await send(
                self._pooled, kind, pos_start=start, tokens=chunk, current_token=chunk[-1], **header
            )
            span["prefill_pending_replies_after"] = lane.machine.credit.outstanding
            if (spent := lane.stats.take_times()) is not None:
                taken = _ChunkTimes(spent.compute_us / 1000, spent.write_us / 1000, spent.wait_us / 1000)
                self._policy.observe(*attrs.astuple(taken))
                self.times.append(taken)
                for name, value in attrs.asdict(taken).items():
                    span[name] = value
        self.sizes.append(len(chunk))
        return place


async def send_settings(pooled: PooledLane, settings: GenerationSettings, **header: Any) -> PendingReply:
    """Hand settings to the lane; ``header`` as of :func:`send`."""
    metadata = settings.to_metadata()
    return await send(pooled, MessageKind.CONFIGURE_GENERATION, chat_sampling_metadata=metadata, **header)


async def send(
    pooled: PooledLane,
    kind: MessageKind,
    *,
    pos_start: int = 0,
    tokens: Sequence[int] = (),
    token_count: int | None = None,
    **header: Any,
) -> PendingReply:
    """Hand one message to the lane; ``header`` holds state words, or settings of the request.

    ``token_count``: as in the message; None: that of ``tokens``.
    """
    sampling, metadata = header.pop("sampling", None), header.pop("chat_sampling_metadata", None)
    assert pooled.request is not None
    request_id, session_id = pooled.request
    return await pooled.handle(
        Message(
            kind,
            attrs.evolve(default_state(kind), checkpoint_generation=pooled.generation, **header),
            pos_start=pos_start,
            token_count=len(tokens) if token_count is None else token_count,
            request_id=request_id,
            session_id=session_id,
            sampling=sampling,
            chat_sampling_metadata=metadata,
            tokens=tokens,
        )
    )
