"""Chunk policies: sizes from a list, sizes that follow what is measured, and what requests teach."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from skippy.config import OpenAIOptions
from skippy.frontend.chunks import (
    MIN_CHUNK,
    SINGLE_STAGE_CHUNK,
    AdaptiveRamp,
    ChunkPolicy,
    PrefillEstimate,
    make_policy,
)
from skippy.protocol import EMPTY_STATS, ReplyStats

HIDDEN = (100.0, 25.0, 75.0)
KEPT = (100.0, 25.1, 75.0)
EXPOSED = (100.0, 0.0, 125.1)


def ramp(**changes: Any) -> AdaptiveRamp:
    settings = {"single": 256, "start": 128, "step": 128, "largest": 384, "target_ms": 100.0}
    return AdaptiveRamp(**(settings | changes))


def policy(*, single_stage: bool = False, **options: Any) -> ChunkPolicy:
    return make_policy(OpenAIOptions(**options), single_stage=single_stage)


def sizes(policy: ChunkPolicy, count: int = 4) -> list[int]:
    return [policy.size(index, 10_000) for index in range(count)]


@pytest.mark.parametrize("single_stage", [False, True])
def test_fixed_and_scheduled_sizes(single_stage: bool) -> None:
    fixed = policy(single_stage=single_stage, prefill_chunk_policy=" Fixed ", prefill_chunk_size=64)
    scheduled = policy(
        single_stage=single_stage, prefill_chunk_policy="fixed", prefill_chunk_schedule="32, 64,128"
    )
    for each in (fixed, scheduled):  # nothing moves them
        each.calibrate(100.0)
        each.observe(*EXPOSED)
    assert sizes(fixed) == [64, 64, 64, 64]
    assert sizes(scheduled, 5) == [32, 64, 128, 128, 128]
    assert [fixed.size(0, 10, live_decodes=True), scheduled.size(0, 10, live_decodes=True)] == [64, 32]


def test_the_default_ramps_in_a_chain_and_is_one_size_in_a_chain_of_one() -> None:
    default = policy()
    assert default.size(0, 256) == 256
    assert default.size(0, 257) == 128
    assert sizes(policy(prefill_chunk_policy="ADAPTIVE", prefill_adaptive_start=100)) == [100] * 4
    single = policy(single_stage=True)
    single.observe(*HIDDEN)
    assert sizes(single) == [SINGLE_STAGE_CHUNK] * 4
    assert single.size(0, 100, live_decodes=True) == SINGLE_STAGE_CHUNK


@pytest.mark.parametrize("single_stage", [False, True])
def test_safe_mode_does_not_follow_what_is_measured(single_stage: bool) -> None:
    safe = make_policy(OpenAIOptions(), single_stage=single_stage, safe=True)
    safe.calibrate(4.0)
    safe.observe(*HIDDEN)
    assert sizes(safe) == [256] * 4
    assert safe.size(1, 10_000, live_decodes=True) == 256


def test_a_ramp_follows_what_is_exposed() -> None:
    steps = [(HIDDEN, 256), (KEPT, 256), (HIDDEN, 384), (HIDDEN, 384), (EXPOSED, 256), (EXPOSED, 128)]
    adaptive = ramp()
    seen = []
    for spent, _ in [*steps, (EXPOSED, 128)]:
        adaptive.observe(*spent)
        seen.append(adaptive.size(1, 10_000))
    assert seen == [expected for _, expected in steps] + [128]


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        ((100.0, 75.1, 0.0), 128),  # writing alone
        ((100.0, 75.0, 125.0), 256),  # neither
        ((0.0, 0.0, 0.0), 384),
        ((0.0, 0.00025, 0.00075), 384),  # against the floor of 0.001 ms
        ((0.0, 0.0, 0.00126), 128),
    ],
)
def test_what_counts_as_exposed(spent: tuple[float, float, float], expected: int) -> None:
    adaptive = ramp()
    adaptive.observe(*HIDDEN)
    adaptive.observe(*spent)
    assert adaptive.size(1, 10_000) == expected


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.1, 384),  # 1000 tokens within the target
        (0.3, 256),  # 333
        (100 / 256, 256),
        (100 / 255.9, 128),
        (4.0, 128),  # 25: below the start
        (1000.0, 128),  # none at all
        (0.0, 384),
        (-1.0, 384),
        (math.nan, 384),
        (math.inf, 384),
        (5e-324, 384),
    ],
)
def test_calibration_sets_a_ceiling(rate: float, expected: int) -> None:
    adaptive = ramp()
    adaptive.calibrate(rate)
    for _ in range(3):
        adaptive.observe(*HIDDEN)
    assert adaptive.size(1, 10_000) == expected


def test_a_ceiling_comes_down_on_what_is_next_but_not_on_a_short_prompt() -> None:
    adaptive = ramp()
    adaptive.observe(*HIDDEN)
    adaptive.observe(*HIDDEN)
    adaptive.calibrate(100 / 300)
    assert adaptive.size(1, 10_000) == 256
    adaptive.calibrate(4.0)
    assert adaptive.size(0, 10_000) == 128
    assert adaptive.size(0, 256) == 256


def test_while_others_decode_a_chunk_is_what_the_target_allows() -> None:
    adaptive = ramp()
    assert adaptive.size(1, 10_000, live_decodes=True) == 128  # nothing is known yet
    adaptive.calibrate(4.0)
    assert adaptive.size(1, 10_000, live_decodes=True) == 16  # of the 25 that the target allows
    assert adaptive.size(0, 200, live_decodes=True) == 16
    adaptive.calibrate(1.0)
    assert adaptive.size(1, 10_000, live_decodes=True) == 96
    adaptive.calibrate(50.0)
    assert adaptive.size(1, 10_000, live_decodes=True) == MIN_CHUNK
    assert adaptive.size(1, 10_000) == 128
    adaptive.calibrate(0.3)
    assert adaptive.size(1, 10_000, live_decodes=True) == 128  # never more than without


@given(
    start=st.integers(1, 1000),
    more=st.integers(0, 1000),
    step=st.integers(1, 1000),
    target=st.floats(1e-3, 1e9),
    events=st.lists(
        st.one_of(
            st.floats(allow_nan=True), st.tuples(*[st.floats(0, 1e6)] * 3).map(lambda times: ("times", times))
        ),
        max_size=30,
    ),
    live=st.booleans(),
)
def test_a_ramp_stays_between_its_ends(
    start: int, more: int, step: int, target: float, events: list[Any], live: bool
) -> None:
    adaptive = ramp(start=start, step=step, largest=start + more, target_ms=target)
    for event in events:
        if isinstance(event, float):
            adaptive.calibrate(event)
        else:
            adaptive.observe(*event[1])
        least = min(start, MIN_CHUNK) if live else start
        assert least <= adaptive.size(1, 10_000, live_decodes=live) <= start + more


def observed(micros: int, tokens: int, write: int, wait: int) -> ReplyStats:
    return ReplyStats(
        prefill_compute_us_at_slowest_rate=micros,
        prefill_compute_token_count_at_slowest_rate=tokens,
        prefill_compute_stage_index=1,
        prefill_edge_write_us_max=write,
        prefill_edge_wait_us_max=wait,
    )


def test_an_estimate_takes_the_first_request_as_it_is_and_a_quarter_of_each_later_one() -> None:
    estimate = PrefillEstimate()
    assert not estimate.learn(EMPTY_STATS)
    untouched = ramp()
    estimate.seed(untouched)
    assert untouched.size(0, 10_000) == 128
    assert estimate.learn(observed(100_000, 100, 10_000, 50_000))
    assert (estimate.ms_per_token, estimate.bottleneck_ms) == (1.0, 100.0)
    assert (estimate.write_ratio, estimate.wait_ratio) == (0.1, 0.5)
    assert estimate.learn(observed(300_000, 100, 90_000, 450_000))
    assert (estimate.ms_per_token, estimate.bottleneck_ms) == (1.5, 150.0)
    assert (estimate.write_ratio, estimate.wait_ratio) == pytest.approx((0.15, 0.75))
    assert not estimate.learn(EMPTY_STATS)
    assert estimate.observations == 2
    assert estimate.latest.prefill_compute_stage_index == 1


def test_an_estimate_seeds_a_policy_with_its_rate_and_a_first_step() -> None:
    fast = PrefillEstimate()
    fast.learn(observed(10_000, 100, 0, 0))
    seeded = ramp()
    fast.seed(seeded)
    assert seeded.size(0, 10_000) == 256
    slow = PrefillEstimate()
    slow.learn(observed(400_000, 100, 0, 0))
    seeded = ramp()
    slow.seed(seeded)
    assert seeded.size(0, 10_000) == 128
