"""How many prompt tokens go into the next chunk, and what requests teach about the chain.

Small chunks fill a pipeline of stages sooner and hold up other requests for less time; large ones cost less
in all. Pure bookkeeping: what is measured comes in, sizes go out.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Final

import attrs

from skippy.config import OpenAIOptions
from skippy.protocol import ReplyStats

MIN_CHUNK: Final = 16
"""Fewest tokens that a policy of its own accord puts into a chunk while others decode; with fewer an engine
wastes its time."""
SINGLE_STAGE_CHUNK: Final = 512
"""Tokens per chunk where one stage is the whole chain, so that no pipeline waits to be filled: what llama.cpp
computes at once anyway (``n_ubatch``)."""
SMOOTHING: Final = 0.25
"""Weight of the newest request in an estimate."""
_LEAST_COMPUTE_MS: Final = 0.001


class ChunkPolicy(abc.ABC):
    """Cuts the prompt of one request."""

    @abc.abstractmethod
    def size(self, index: int, total: int, *, live_decodes: bool = False) -> int:
        """Tokens of chunk ``index``, at least 1; the caller cuts it at the prompt's end.

        Args:
            total: tokens of the whole prefill.
            live_decodes: other requests are being decoded, and a chunk holds them up.
        """

    def calibrate(self, ms_per_token: float) -> None:  # noqa: B027 - fixed sizes learn nothing
        """Take what a token costs the slowest stage; no effect unless finite and above 0."""

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:  # noqa: B027
        """A chunk was computed, handed on, and waited for credit, on this stage."""


class ScheduledChunks(ChunkPolicy):
    """The sizes of a list, the last of them for all chunks that follow. A list of one is a fixed size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def size(self, index: int, total: int, *, live_decodes: bool = False) -> int:
        return self._sizes[min(index, len(self._sizes) - 1)]


class AdaptiveRamp(ChunkPolicy):
    """Grows while computing hides what passing chunks on takes, and shrinks where it does not.

    Args:
        single: a prefill of at most this many tokens is one chunk.
        start, step, largest: sizes, in tokens; ``start`` is also the smallest while nothing else is decoded.
        target_ms: how long a chunk should take the slowest stage at most.
    """

    def __init__(self, *, single: int, start: int, step: int, largest: int, target_ms: float) -> None:
        self._single = single
        self._start = start
        self._step = step
        self._largest = largest
        self._target_ms = target_ms
        self._next = start
        self._ceiling = largest
        self._affordable: int | None = None
        """Tokens that the slowest stage computes within the target, once it is known."""

    def size(self, index: int, total: int, *, live_decodes: bool = False) -> int:
        size = self._single if index == 0 and total <= self._single else self._next
        if live_decodes and self._affordable is not None:
            # In whole slices: that is how stages compute a chunk beside decode steps.
            size = min(size, max(MIN_CHUNK, self._affordable - self._affordable % MIN_CHUNK))
        return size

    def calibrate(self, ms_per_token: float) -> None:
        if not (math.isfinite(ms_per_token) and ms_per_token > 0):
            return
        # A target of many years, or a rate near zero, must not overflow.
        self._affordable = math.floor(min(self._target_ms / ms_per_token, self._largest))
        predicted = self._affordable if self._affordable > 0 else self._start
        steps = (predicted - self._start) // self._step
        self._ceiling = min(max(self._start + steps * self._step, self._start), self._largest)
        self._next = min(self._next, self._ceiling)

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
        compute_ms = max(compute_ms, _LEAST_COMPUTE_MS)
        if wait_ms <= 0.75 * compute_ms and write_ms <= 0.25 * compute_ms:
            size = min(self._next + self._step, self._largest)
        elif wait_ms > 1.25 * compute_ms or write_ms > 0.75 * compute_ms:
            size = max(self._next - self._step, self._start)
        else:
            size = self._next
        self._next = min(size, self._ceiling)


@attrs.define(slots=True)
class PrefillEstimate:
    """What prefills have cost so far, over all lanes of a chain. Every request with a prefill counts once.

    Attributes:
        ms_per_token: of the slowest stage; 0.0 before anything is known.
        bottleneck_ms: what its largest chunk took.
        write_ratio, wait_ratio: longest hand-over of a chunk, and longest wait for credit, on any stage, as
            parts of that time.
        observations: requests.
        latest: the last request's statistics: which stage was slowest, how many tokens it had, and which edge
            held chunks up the most.
    """

    ms_per_token: float = 0.0
    bottleneck_ms: float = 0.0
    write_ratio: float = 0.0
    wait_ratio: float = 0.0
    observations: int = 0
    latest: ReplyStats = attrs.field(factory=ReplyStats)

    def learn(self, stats: ReplyStats) -> bool:
        """Take what the stages of a chain have observed of one request; False where that is nothing."""
        micros = stats.prefill_compute_us_at_slowest_rate
        tokens = stats.prefill_compute_token_count_at_slowest_rate
        if micros <= 0 or tokens <= 0:
            return False
        sample = {
            "ms_per_token": micros / 1000 / tokens,
            "bottleneck_ms": micros / 1000,
            "write_ratio": stats.prefill_edge_write_us_max / micros,
            "wait_ratio": stats.prefill_edge_wait_us_max / micros,
        }
        for name, value in sample.items():
            old = getattr(self, name)
            setattr(self, name, old + SMOOTHING * (value - old) if self.observations else value)
        self.observations += 1
        self.latest = stats
        return True

    def seed(self, policy: ChunkPolicy) -> None:
        """Give a new request's policy what is known; it may take its first step by that."""
        if self.observations:
            policy.calibrate(self.ms_per_token)
            policy.observe(1.0, self.write_ratio, self.wait_ratio)


def fixed_sizes(options: OpenAIOptions) -> tuple[int, ...]:
    """Sizes of chunks, the last one's again and again, where nothing is measured."""
    return options.prefill_chunk_schedule or (options.prefill_chunk_size,)


def make_policy(options: OpenAIOptions, *, single_stage: bool, safe: bool = False) -> ChunkPolicy:
    """The policy that ``options`` ask for, as new.

    A chain of one has nothing to fill or to hide: there ``adaptive-ramp`` is SINGLE_STAGE_CHUNK tokens.

    Args:
        safe: results must not depend on what was measured: ``adaptive-ramp`` is ``fixed``.
    """
    if options.prefill_chunk_schedule is not None or options.prefill_chunk_policy == "fixed" or safe:
        return ScheduledChunks(fixed_sizes(options))
    if single_stage:
        return ScheduledChunks((SINGLE_STAGE_CHUNK,))
    return AdaptiveRamp(
        single=options.prefill_chunk_size,
        start=options.prefill_adaptive_start,
        step=options.prefill_adaptive_step,
        largest=options.prefill_adaptive_max,
        target_ms=options.prefill_adaptive_target_ms,
    )
