"""What a chain is doing, for people: its stages and lanes, who waits, what was done. No text of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import trio

from skippy.protocol import LaneState
from skippy.stage import Stage

if TYPE_CHECKING:
    from .admission import AdmissionGate
    from .generation import GenerationRequest, Timings
    from .lanes import LanePool, PooledLane
    from .prefill import Prefill
    from .restoring import Restorer
    from .work import Work

LaneActivity = Literal["connecting", "idle", "prefill", "decode", "cleaning"]
GAP_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets of times between tokens, in seconds."""


class TokenGaps:
    """How long tokens came after the one before, over all generations, in buckets.

    Attributes:
        counts: of gaps up to each of :data:`GAP_BOUNDS`, and of longer ones.
        total_secs: of all gaps.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS) + 1)
        self.total_secs = 0.0

    def add(self, secs: float) -> None:
        """Count one. Runs for every token."""
        self.counts[bisect_left(GAP_BOUNDS, secs)] += 1
        self.total_secs += secs


@attrs.define(slots=True, kw_only=True)
class Totals:
    """Sums over generations since the endpoint's start.

    Attributes:
        cached_tokens: of ``prompt_tokens``, those that were not computed.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, work: Work) -> None:
        """Count what a generation has come to."""
        self.requests += bool(work.request_id)  # not what this endpoint asks the chain itself
        self.prompt_tokens += work.demand.prompt_tokens - work.prompt_left
        self.cached_tokens += work.cached_tokens
        self.generated_tokens += work.generated

    def plus(self, works: Iterable[Work]) -> Totals:
        """These and what runs."""
        totals = attrs.evolve(self)
        for work in works:
            totals.add(work)
        return totals


@attrs.frozen(slots=True, kw_only=True)
class StageStatus:
    """One stage as stage 0 knows it. ``layer_end`` None: it is not known where its layers end."""

    stage_id: str
    index: int
    layer_start: int
    layer_end: int | None
    endpoint: str


@attrs.frozen(slots=True, kw_only=True)
class LaneStatus:
    """One lane, and what runs on it. Times in seconds, rates per second; zeros where nothing runs.

    Attributes:
        id: of this connection through the chain; None while it is being made.
        request_id: the client's, None where nothing runs.
        tokens_per_second: of the answer so far.
    """

    id: int | None = None
    state: LaneActivity = "connecting"
    request_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int = 0
    running_secs: float = 0.0
    tokens_per_second: float = 0.0


@attrs.frozen(slots=True, kw_only=True)
class HopTimes:
    """What stages say of the prompt of the last request: of all stages, the one where it took longest.

    Attributes:
        compute_stage, compute_ms, compute_tokens: the slowest stage and its largest chunk.
        edge_stage, edge_write_ms, edge_wait_ms, edge_bytes: the stage that was longest in handing a chunk to
            the next one: writing it, and waiting for room to send more.
    """

    compute_stage: int
    compute_ms: float
    compute_tokens: int
    edge_stage: int
    edge_write_ms: float
    edge_wait_ms: float
    edge_bytes: int


@attrs.frozen(slots=True, kw_only=True)
class StageTimes:
    """What the prompt of the last request took one stage, all of its chunks together.

    Attributes:
        compute_ms: of ``tokens``, in ``chunks``.
        write_ms, wait_ms: handing them to the next stage, ``bytes`` in all, and waiting for room.
    """

    index: int
    chunks: int
    tokens: int
    compute_ms: float
    write_ms: float
    wait_ms: float
    bytes: int


def stage_times(reports: Iterable[Mapping[str, Any]]) -> list[StageTimes]:
    """The times in what stages have told (:func:`skippy.stage.reports.timing_report`), stage 0's first.

    Those of another request than stage 0's, and what is none, are left out.
    """
    found, request_id = [], None
    for report in reports:
        try:
            index, prompt = int(report["stage_index"]), report["prompt"]
            request_id = prompt["request_id"] if index == 0 else request_id
            if prompt["request_id"] != request_id:
                continue
            times = StageTimes(
                index=index,
                chunks=int(prompt["chunks"]),
                tokens=int(prompt["tokens"]),
                compute_ms=prompt["compute_us"] / 1000,
                write_ms=prompt["write_us"] / 1000,
                wait_ms=prompt["wait_us"] / 1000,
                bytes=int(prompt["activation_bytes"]),
            )
        except (LookupError, TypeError, ValueError):
            continue
        found.append(times)
    return found


@attrs.frozen(slots=True, kw_only=True)
class LastRequest:
    """Where the time of the generation that has ended last went, in milliseconds."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_ms: float
    restore_ms: float
    prefill_ms: float
    first_token_ms: float
    answer_ms: float

    @classmethod
    def of(cls, request: GenerationRequest, generated: int, timings: Timings) -> LastRequest:
        return cls(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt),
            cached_tokens=timings.cached_tokens,
            generated_tokens=generated,
            queue_ms=timings.queue_ms,
            restore_ms=timings.restore_ms,
            prefill_ms=timings.prefill_ms,
            first_token_ms=timings.prompt_ms,
            answer_ms=timings.answer_ms,
        )


@attrs.frozen(slots=True, kw_only=True)
class ChainStatus:
    """A chain at one moment.

    Attributes:
        unready: why nothing can be generated now; None while it can.
        queue_depth: requests that wait for a lane, or have their prompt prepared; ``queue_capacity`` may.
        kv_tokens, reserved_kv_tokens: cache positions, and those that running requests may come to use.
        times: of the last prompt, where stages were asked for them and took part in it.
        cache_lookups, cache_hits: prompts that a stage was asked for, and that it had, over all stages.
    """

    unready: str | None
    stages: Sequence[StageStatus]
    lanes: Sequence[LaneStatus]
    concurrency: int
    running: int
    queue_depth: int
    queue_capacity: int
    kv_tokens: int
    reserved_kv_tokens: int
    cache_lookups: int
    cache_hits: int
    totals: Totals
    gaps: TokenGaps = attrs.field(repr=False)
    hops: HopTimes | None = None
    last: LastRequest | None = None
    times: Sequence[StageTimes] = ()


def chain_status(
    stage: Stage,
    pool: LanePool,
    gate: AdmissionGate,
    restorer: Restorer,
    prefill: Prefill,
    last: LastRequest | None,
    times: Sequence[StageTimes],
) -> ChainStatus:
    """The chain of which ``stage`` is the first. Costs nothing but this call."""
    kv = restorer.totals
    return ChainStatus(
        unready=pool.unready,
        stages=_stages(stage),
        lanes=_lanes(pool),
        concurrency=gate.concurrency,
        running=gate.running,
        queue_depth=gate.queue_depth,
        queue_capacity=gate.queue_capacity,
        kv_tokens=gate.kv_tokens,
        reserved_kv_tokens=gate.reserved_tokens,
        cache_lookups=kv.kv_lookup_hits + kv.kv_lookup_misses + kv.kv_lookup_errors,
        cache_hits=kv.kv_lookup_hits,
        totals=gate.totals(),
        gaps=gate.gaps,
        hops=_hops(prefill),
        last=last,
        times=times,
    )


def _stages(stage: Stage) -> list[StageStatus]:
    if stage.topology is not None:
        return [
            StageStatus(
                stage_id=placed.stage_id,
                index=placed.stage_index,
                layer_start=placed.layer_start,
                layer_end=placed.layer_end,
                endpoint=placed.endpoint,
            )
            for placed in stage.topology.stages
        ]
    config = stage.config
    stages = [
        StageStatus(
            stage_id=config.stage_id,
            index=config.stage_index,
            layer_start=config.layer_start,
            layer_end=config.layer_end,
            endpoint=str(stage.endpoint),
        )
    ]
    if (peer := config.downstream) is not None:
        stages.append(
            StageStatus(
                stage_id=peer.stage_id,
                index=peer.stage_index,
                layer_start=config.layer_end,
                layer_end=None,
                endpoint=peer.endpoint,
            )
        )
    return stages


def _lanes(pool: LanePool) -> list[LaneStatus]:
    lanes = [_lane(pooled) for pooled in sorted(pool.lanes, key=lambda pooled: pooled.lane.number)]
    return lanes + [LaneStatus()] * (pool.size - len(lanes))


def _lane(pooled: PooledLane) -> LaneStatus:
    work, number = pooled.work, pooled.lane.number
    if work is None:
        return LaneStatus(id=number, state="idle" if pooled.lane.state is LaneState.IDLE else "cleaning")
    now, first = trio.current_time(), work.first_token_at
    decoding = 0.0 if first is None else now - first
    return LaneStatus(
        id=number,
        state="prefill" if first is None else "decode",
        request_id=work.request_id or None,
        prompt_tokens=work.demand.prompt_tokens,
        cached_tokens=work.cached_tokens,
        generated_tokens=work.generated,
        max_tokens=work.demand.max_tokens,
        running_secs=round(now - work.began, 3),
        tokens_per_second=round((work.generated - 1) / decoding, 2) if work.generated > 1 else 0.0,
    )


def _hops(prefill: Prefill) -> HopTimes | None:
    if not prefill.estimate.observations:
        return None
    stats = prefill.estimate.latest
    return HopTimes(
        compute_stage=stats.prefill_compute_stage_index,
        compute_ms=stats.prefill_compute_us_at_slowest_rate / 1000,
        compute_tokens=stats.prefill_compute_token_count_at_slowest_rate,
        edge_stage=stats.prefill_edge_stage_index,
        edge_write_ms=stats.prefill_edge_write_us_max / 1000,
        edge_wait_ms=stats.prefill_edge_wait_us_max / 1000,
        edge_bytes=stats.prefill_edge_activation_bytes_max,
    )
