"""The order of admission and the prediction of waits, without clock or tasks."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.frontend.queueing import (
    ESTIMATE_SAMPLES,
    MAX_PASSES,
    Demand,
    Estimate,
    ServiceRates,
    WaitingLine,
    default_queue_capacity,
    work_limit_secs,
)


@attrs.define(eq=False)
class Request:
    tokens: int
    passed: int = 0

    @property
    def demand(self) -> Demand:
        return Demand(1, self.tokens - 1)


def line_of(*sizes: int) -> tuple[WaitingLine[Request], list[Request]]:
    line: WaitingLine[Request] = WaitingLine()
    requests = [Request(size) for size in sizes]
    for request in requests:
        line.join(request)
    return line, requests


def test_order_of_arrival() -> None:
    line, requests = line_of(5, 2, 9)
    assert [line.take(10) for _ in range(4)] == [*requests, None]
    assert [request.passed for request in requests] == [0, 0, 0]


def test_a_smaller_request_overtakes_one_that_does_not_fit() -> None:
    line, (large, middle, small) = line_of(9, 5, 2)
    assert line.take(4) is small
    assert (large.passed, middle.passed) == (1, 1)
    assert line.take(4) is None
    assert line.take(8) is middle
    assert (large.passed, middle.passed) == (2, 1)
    assert line.take(9) is large
    assert len(line) == 0


def test_after_32_passes_the_pool_is_kept_for_the_oldest() -> None:
    line, (large, *small) = line_of(9, *[2] * (MAX_PASSES + 1))
    assert [line.take(8) for _ in range(MAX_PASSES)] == small[:-1]
    assert line.take(8) is None
    assert line.take(9) is large
    assert line.take(8) is small[-1]


def test_the_reservation_ends_when_the_oldest_leaves() -> None:
    line, (large, *small) = line_of(9, *[2] * (MAX_PASSES + 1))
    for _ in range(MAX_PASSES):
        line.take(8)
    line.leave(large)
    assert line.take(8) is small[-1]


@given(st.lists(st.integers(1, 20), max_size=60), st.data())
def test_nobody_starves(sizes: list[int], data: st.DataObject) -> None:
    """However requests come and pools fill, none is overtaken by more than MAX_PASSES, in any order."""
    line, requests = line_of(*sizes)
    left = list(requests)
    while left:
        chosen = line.take(data.draw(st.integers(0, 20)))
        if chosen is None:
            chosen = line.take(20)
            assert chosen is left[0]
        left.remove(chosen)
    assert all(request.passed <= MAX_PASSES for request in requests)
    assert len(line) == 0


def test_an_estimate_is_the_larger_of_average_and_percentile() -> None:
    rate = Estimate()
    assert rate.value is None
    rate.observe(8)
    assert rate.value == 8
    rate.observe(4)  # average 7, percentile 8
    assert rate.value == 8
    for _ in range(ESTIMATE_SAMPLES - 1):
        rate.observe(4)
    assert rate.value == pytest.approx(4)  # the 8 is out of the window, and forgotten by the average
    for _ in range(2):
        rate.observe(12)  # 3 % of the samples: the average has it, the percentile has not
    assert rate.value == pytest.approx(4 + 8 * (1 - 0.75**2))


def test_the_percentile_of_64_samples_is_the_61st() -> None:
    rate = Estimate()
    for sample in range(64, 0, -1):
        rate.observe(sample)
    assert rate.value == 61


def test_costs_are_unknown_until_something_like_it_has_finished() -> None:
    rates = ServiceRates()
    assert rates.secs(1, 1) is None
    assert rates.secs(0, 0) == 0
    rates.observe(100, prefill_ms=200, generated=1, decode_ms=0)
    assert rates.secs(50, 0) == pytest.approx(0.1)
    assert rates.secs(50, 1) is None
    rates.observe(100, prefill_ms=200, generated=21, decode_ms=200)
    assert rates.secs(50, 5) == pytest.approx(0.1 + 0.05)


def test_what_a_short_prompt_waited_for_is_not_the_price_of_each_token_of_a_long_one() -> None:
    rates = ServiceRates()
    for _ in range(ESTIMATE_SAMPLES // 2):
        rates.observe(1000, prefill_ms=4000, generated=101, decode_ms=2000)
        rates.observe(1, prefill_ms=3000, generated=2, decode_ms=300)
    long, decode = rates.secs(1000, 0), rates.secs(0, 100)
    assert long is not None
    assert decode is not None
    # Not 3000: for the 1001 tokens of a pair 7 s went by, and the short one was last.
    assert 4.0 <= long <= 8.0
    assert 2.0 <= decode <= 3.0


def test_answers_are_expected_to_be_as_long_as_others_were() -> None:
    rates = ServiceRates()
    assert rates.answer_tokens(4000) == 4000
    for generated in (10, 20, 30):
        rates.observe(1, prefill_ms=1, generated=generated, decode_ms=1)
    assert rates.answer_tokens(4000) == 30
    assert rates.answer_tokens(7) == 7


@pytest.mark.parametrize(("lanes", "capacity"), [(1, 16), (2, 16), (4, 32), (32, 256), (99, 256)])
def test_default_capacity(lanes: int, capacity: int) -> None:
    assert default_queue_capacity(lanes) == capacity


@pytest.mark.parametrize(
    ("prompt", "timeout", "limit"),
    [(1, 0, 60), (3840, 0, 60), (6400, 0, 100), (10**6, 0, 1800), (6400, 150, 150), (1, 10**4, 1800)],
)
def test_work_limit(prompt: int, timeout: float, limit: float) -> None:
    assert work_limit_secs(prompt, timeout) == limit
