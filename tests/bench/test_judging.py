"""How the benchmarks of overload, fairness and slow links judge what they saw."""

from __future__ import annotations

import pytest

from bench.fairness import Round as FairnessRound, gaps_within
from bench.load import Outcome
from bench.overload import explained_waits, growth, verdict
from bench.steps import bound, cycle_ms
from bench.wan import Bound, Row, ring_bytes, wire_ms
from skippy.config import WireConditions


def outcome(
    started: float = 0, times: tuple[float, ...] = (1.0,), ended: float = 2, **keys: object
) -> Outcome:
    values = {"client": 0, "status": 200, "started": started, "ended": ended, "times": times, "tokens": 1}
    return Outcome(**{**values, **keys})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "how"),
    [
        (outcome(), "answer"),
        (outcome(status=429, times=()), "429"),
        (outcome(error="lost"), "broken stream: lost"),
        (outcome(status=500, error="oops"), "status 500: oops"),
        (outcome(status=0, error="reset"), "status 0: reset"),
    ],
)
def test_a_request_ends_in_an_answer_a_429_or_a_fault(ended: Outcome, how: str) -> None:
    assert verdict(ended) == how


def test_memory_is_compared_with_what_it_was_after_a_third() -> None:
    flat = [50] * 10 + [100] * 20  # it may grow while it warms up
    assert growth(flat) == 1
    assert growth([*flat[:-3], 110, 110, 110]) == 1.1


def test_the_queue_explains_the_wait_for_those_that_asked_before() -> None:
    # The last one went second: what it saved another lost, and the place in the queue does not explain that.
    answers = [
        outcome(started=0, times=(2,)),
        outcome(started=1, times=(3,)),
        outcome(started=0.5, times=(9,)),
    ]
    assert explained_waits(answers) == [2, 2.5, 8]


def test_gaps_count_where_they_touch_the_time_looked_at() -> None:
    streams = [outcome(times=(0, 1, 2, 5, 6)), outcome(times=(4,))]
    assert gaps_within(streams, 1.5, 5.5) == [1000, 3000, 1000]


def test_fairness_is_p99_over_chunk_and_step() -> None:
    assert FairnessRound(during=[30.0] * 10, before=[], first=1, chunk=15, step=5).ratio == 1.5


def test_a_bound_allows_five_percent_or_a_third_of_a_millisecond_per_hop() -> None:
    short = Bound(compute=5, unrested=4, ring=1, wire=0)
    long = Bound(compute=20, unrested=4, ring=60, wire=20)
    assert short.allowed == pytest.approx(6.9)
    assert long.allowed == pytest.approx(105)
    assert Row(WireConditions(), short, [6.8, 6.8, 100]).holds
    assert not Row(WireConditions(), short, [7.0, 7.0, 1]).holds


def test_the_wire_takes_its_time_for_the_frames_of_a_ring() -> None:
    assert wire_ms(2500, 20) == 1
    assert wire_ms(2500, None) == 0
    row = 4 * 576
    assert 2 * row < ring_bytes(576, 3) < 2 * row + 600
    assert ring_bytes(576, 3) - ring_bytes(576, 2) == ring_bytes(576, 2) - ring_bytes(576, 1)


def test_the_bound_of_a_chain_is_the_best_way_to_group_its_streams() -> None:
    # Three stages; a step of 8 costs less than four of 2, but leaves all stages but one idle.
    times = {8: [8.0, 8.0, 8.0], 4: [5.0, 5.0, 5.0], 2: [4.0, 4.0, 4.0]}
    assert cycle_ms(times, 8, 1, cores=2) == 24  # one wave: stage after stage
    assert cycle_ms(times, 8, 2, cores=2) == 15  # two waves: as long as one takes, both cores busy
    assert cycle_ms(times, 8, 4, cores=2) == 24  # 48 ms of compute on two cores
    assert bound(times, 8, cores=2) == (pytest.approx(8000 / 15), 2)
    assert bound(times, 8, cores=1) == (pytest.approx(8000 / 24), 1)
