"""Arithmetic on the 27 reply statistics.

The rules are the original's (``docs/protocol.md``, section "Statistics"), with one difference: sums saturate
at the limits of i64 where the original's would wrap or abort.
"""

from __future__ import annotations

import math
from typing import Final

import attrs

from .messages import ReplyStats

I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1
_NAMES: Final = tuple(a.name for a in attrs.fields(ReplyStats))
_MASKS: Final = frozenset({"kv_hit_stage_mask", "kv_record_stage_mask"})
_MAXIMA: Final = frozenset(
    {"verify_window_max_tokens", "prefill_edge_write_us_max", "prefill_edge_wait_us_max"}
)
_EDGE: Final = (
    "prefill_edge_total_us_max",
    "prefill_edge_stage_index",
    "prefill_edge_activation_bytes_max",
)
_COMPUTE: Final = (
    "prefill_compute_us_at_slowest_rate",
    "prefill_compute_stage_index",
    "prefill_compute_token_count_at_slowest_rate",
)
_SUMS: Final = tuple(n for n in _NAMES if n not in _MASKS | _MAXIMA and n not in _EDGE + _COMPUTE)
_EMPTINESS: Final = (*_NAMES[:17], "prefill_edge_observation_count", "prefill_compute_observation_count")


def _clamp(value: int) -> int:
    return min(max(value, I64_MIN), I64_MAX)


def stats_fields(stats: ReplyStats) -> tuple[int, ...]:
    """The 27 values in wire order."""
    return tuple(getattr(stats, name) for name in _NAMES)


def clamped(stats: ReplyStats) -> ReplyStats:
    """The same statistics with every field within i64."""
    fields = stats_fields(stats)
    if min(fields) >= I64_MIN and max(fields) <= I64_MAX:
        return stats
    return ReplyStats(*map(_clamp, fields))


def is_empty(stats: ReplyStats) -> bool:
    """Whether nothing was recorded: fields 0 to 16 and both observation counts are zero."""
    return not any(getattr(stats, name) for name in _EMPTINESS)


def merge(stats: ReplyStats, other: ReplyStats) -> ReplyStats:
    """``stats`` with ``other`` (a later stage's, or a later reply's) added; ties keep ``stats``' own."""
    changes = {name: _clamp(getattr(stats, name) + getattr(other, name)) for name in _SUMS}
    changes |= {name: getattr(stats, name) | getattr(other, name) for name in _MASKS}
    changes |= {name: max(getattr(stats, name), getattr(other, name)) for name in _MAXIMA}
    if other.prefill_edge_total_us_max > stats.prefill_edge_total_us_max:
        changes |= {name: getattr(other, name) for name in _EDGE}
    if _is_better_sample(
        other.prefill_compute_us_at_slowest_rate, other.prefill_compute_token_count_at_slowest_rate, stats
    ):
        changes |= {name: getattr(other, name) for name in _COMPUTE}
    return attrs.evolve(stats, **changes)


def observe_edge_transport(
    stats: ReplyStats, stage_index: int, write_us: int, wait_us: int, activation_bytes: int
) -> ReplyStats:
    """Record one prefill chunk sent downstream: µs writing, µs waiting for its Ack, its bytes."""
    write_us, wait_us = _clamp(max(write_us, 0)), _clamp(max(wait_us, 0))
    total = _clamp(write_us + wait_us)
    stats = attrs.evolve(
        stats,
        prefill_edge_write_us_max=max(stats.prefill_edge_write_us_max, write_us),
        prefill_edge_wait_us_max=max(stats.prefill_edge_wait_us_max, wait_us),
        prefill_edge_observation_count=_clamp(stats.prefill_edge_observation_count + 1),
    )
    if total <= stats.prefill_edge_total_us_max:
        return stats
    return attrs.evolve(
        stats,
        prefill_edge_total_us_max=total,
        prefill_edge_stage_index=_clamp(stage_index),
        prefill_edge_activation_bytes_max=_clamp(activation_bytes),
    )


def observe_compute(stats: ReplyStats, stage_index: int, compute_us: int, token_count: int) -> ReplyStats:
    """Record one prefill chunk computed: microseconds and tokens. Every call counts, also one that loses."""
    compute_us, token_count = _clamp(max(compute_us, 0)), _clamp(max(token_count, 1))
    count = _clamp(stats.prefill_compute_observation_count + 1)
    if not _is_better_sample(compute_us, token_count, stats):
        return attrs.evolve(stats, prefill_compute_observation_count=count)
    return attrs.evolve(
        stats,
        prefill_compute_us_at_slowest_rate=compute_us,
        prefill_compute_stage_index=_clamp(stage_index),
        prefill_compute_token_count_at_slowest_rate=token_count,
        prefill_compute_observation_count=count,
    )


def observe_verify_window(
    stats: ReplyStats, compute_us: int, write_us: int, wait_us: int, token_count: int
) -> ReplyStats:
    """Record one verify window on one stage: µs computing, writing it downstream and waiting; its tokens."""
    compute_us, write_us, wait_us = (_clamp(max(us, 0)) for us in (compute_us, write_us, wait_us))
    token_count = _clamp(max(token_count, 0))
    window = ReplyStats(
        verify_window_compute_us=compute_us,
        verify_window_forward_write_us=write_us,
        verify_window_downstream_wait_us=wait_us,
        verify_window_total_us=_clamp(compute_us + write_us + wait_us),
        verify_window_stage_count=1,
        verify_window_request_count=1,
        verify_window_token_count=token_count,
        verify_window_max_tokens=token_count,
    )
    return merge(stats, window)


def _is_better_sample(us: int, tokens: int, current: ReplyStats) -> bool:
    """Whether (us, tokens) is the better calibration sample: more tokens first, then slower."""
    if us <= 0 or tokens <= 0:
        return False
    current_us = current.prefill_compute_us_at_slowest_rate
    current_tokens = current.prefill_compute_token_count_at_slowest_rate
    if current_us <= 0 or current_tokens <= 0:
        return True
    if tokens != current_tokens:
        return tokens > current_tokens
    return us > current_us


def stage_mask(stage_index: int) -> int:
    """The bit of a stage in ``kv_hit_stage_mask``: ``1 << index`` for 0 to 62, else 0."""
    return 1 << stage_index if 0 <= stage_index <= 62 else 0


def stage_count(mask: int) -> int:
    """How many stages a ``kv_hit_stage_mask`` names; a negative one, which no stage makes, names none."""
    return max(0, mask).bit_count()


def fused_hit(last: ReplyStats) -> ReplyStats:
    """The lookups and the mask of a restore whose answer is a prediction: only the last stage's come with it.

    There is one only where every stage had all of the prefix.
    """
    stages = max(0, last.kv_hit_stage_mask).bit_length()
    return ReplyStats(kv_lookup_hits=stages, kv_hit_stage_mask=(1 << stages) - 1)


def us_of_ms(milliseconds: float) -> int:
    """Microseconds, rounded half away from zero; 0 for what is not finite or not positive."""
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        return 0
    us = milliseconds * 1000
    return I64_MAX if us >= I64_MAX else math.floor(us + 0.5)
