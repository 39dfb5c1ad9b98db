"""The number of decode groups that is chosen, against the best one, on simulated chains."""

from __future__ import annotations

import functools

import pytest

from skippy.stage.groups import DecodeGroups
from tests.support.pipeline import Pipeline, Step, line, table

ONE = line(0, 1)
"""A second for each row."""


def rate_of(
    steps: list[Step], sessions: int, count: int, *, delay: float = 0.0, cores: int | None = None
) -> float:
    """Tokens per second with a fixed number of groups, once it runs evenly."""
    chain = Pipeline(steps, DecodeGroups(len(steps), count), delay=delay, cores=cores)
    for session in range(sessions):
        chain.join(session)
    chain.run(200.25)  # off the beat, so that no event falls on the edge
    return chain.run(720)


@pytest.mark.parametrize(
    ("sessions", "count", "cycle"),
    [(1, 1, 3), (3, 1, 9), (3, 2, 6), (3, 3, 3), (6, 3, 6), (6, 6, 6), (6, 2, 9), (4, 4, 4)],
)
def test_equal_stages(sessions: int, count: int, cycle: float) -> None:
    """Once around, or what one stage needs for all waves: whichever is longer."""
    assert rate_of([ONE] * 3, sessions, count) == pytest.approx(sessions / cycle, rel=1e-9)


def test_delay_is_filled_with_more_groups() -> None:
    """Three seconds of compute and three of delay: with three groups every stage rests half of the time."""
    assert rate_of([ONE] * 3, 3, 3, delay=1) == pytest.approx(3 / 6)
    assert rate_of([ONE] * 3, 6, 6, delay=1) == pytest.approx(6 / 6)
    assert rate_of([ONE] * 3, 6, 3, delay=1) == pytest.approx(6 / 9)


def test_a_slow_stage_sets_the_pace() -> None:
    assert rate_of([ONE, line(0, 3), ONE], 2, 2) == pytest.approx(2 / 6)
    assert rate_of([ONE, line(0, 3), ONE], 2, 1) == pytest.approx(2 / 10)
    assert rate_of([line(0, 3), ONE, ONE], 2, 2) == pytest.approx(2 / 6)


def test_shared_processors() -> None:
    """Nine seconds of work for three waves."""
    assert rate_of([ONE] * 3, 3, 3, cores=2) == pytest.approx(3 / 4.5)
    assert rate_of([ONE] * 3, 3, 3, cores=1) == pytest.approx(3 / 9)
    assert rate_of([ONE] * 3, 2, 2, cores=2) == pytest.approx(2 / 3)


def test_a_fixed_cost_is_paid_by_every_wave() -> None:
    assert rate_of([line(1, 1)] * 3, 3, 1) == pytest.approx(3 / 12)
    assert rate_of([line(1, 1)] * 3, 3, 3) == pytest.approx(3 / 6)
    assert rate_of([line(6, 0)] * 3, 6, 1) == pytest.approx(6 / 18)
    assert rate_of([line(6, 0)] * 3, 6, 6) == pytest.approx(6 / 36)


# -- the choice -----------------------------------------------------------------------------------------

EVEN = line(0.002, 0.001)
GPU_LIKE = line(0.010, 0.0001)
CPU_LIKE = line(0.0005, 0.003)
MEASURED = table({1: 0.0049, 2: 0.0094, 4: 0.016, 8: 0.028})
"""A third of a model of 135M parameters on one processor core."""
CHAINS: dict[str, tuple[list[Step], float, int | None]] = {
    "even": ([EVEN] * 3, 0.0, None),
    "even, 5 ms": ([EVEN] * 3, 0.005, None),
    "six stages": ([EVEN] * 6, 0.001, None),
    "slow middle": ([EVEN, line(0.006, 0.003), EVEN], 0.0, None),
    "slow first": ([line(0.006, 0.003), EVEN, EVEN], 0.0, None),
    "gpu": ([GPU_LIKE] * 3, 0.0, None),
    "gpu, 5 ms": ([GPU_LIKE] * 3, 0.005, None),
    "cpu": ([CPU_LIKE] * 3, 0.0, None),
    "cpu, 5 ms": ([CPU_LIKE] * 3, 0.005, None),
    "measured": ([MEASURED] * 3, 0.0, None),
    "measured, 2 cores": ([MEASURED] * 3, 0.0, 2),
    "measured, 1 core": ([MEASURED] * 3, 0.0, 1),
}


def chain_of(name: str, count: int | None, noise: float = 0.0) -> Pipeline:
    steps, delay, cores = CHAINS[name]
    return Pipeline(steps, DecodeGroups(len(steps), count), delay=delay, cores=cores, noise=noise)


@functools.cache
def best_of(name: str, sessions: int) -> tuple[int, float]:
    """The best number of groups and its tokens per second, by trying all."""

    def rate(count: int) -> float:
        chain = chain_of(name, count)
        for session in range(sessions):
            chain.join(session)
        chain.run(1)
        return chain.run(2)

    best, count = max((rate(count), -count) for count in range(1, sessions + 1))
    return -count, best


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("sessions", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("gap", [0, 0.3], ids=["at once", "one by one"])
def test_the_choice_is_nearly_the_best(name: str, sessions: int, gap: float) -> None:
    chain = chain_of(name, None)
    for session in range(sessions):
        chain.join(session)
        if gap:
            chain.run(gap)
    chain.run(8)
    count, rate = best_of(name, sessions)
    assert chain.run(4) >= 0.95 * rate, f"{chain.groups.count} groups; {count} would be best"


@pytest.mark.parametrize("name", CHAINS)
def test_noise_does_not_make_it_flap(name: str) -> None:
    chain = chain_of(name, None, noise=0.1)
    for session in range(8):
        chain.join(session)
    chain.run(10)
    before = chain.changes
    chain.run(10)
    assert chain.changes <= before + 8  # trials of both neighbours, and back, perhaps once more
    assert before <= 12


@pytest.mark.parametrize("name", ["even", "measured, 2 cores", "even, 5 ms"])
def test_sessions_that_come_and_go(name: str) -> None:
    """Short requests: somebody joins or leaves with every few tokens, so nothing is ever quite settled."""
    chain = chain_of(name, None, noise=0.05)
    for session in range(8):
        chain.join(session)

    def next_request(session: int) -> None:
        chain.leave(session - 8)
        while session - 8 in chain.groups:  # only then is there a lane for another one
            chain.run(0.002)
        chain.join(session)
        chain.run(0.07)

    for session in range(8, 150):
        next_request(session)
    _, rate = best_of(name, 8)
    before, since = chain.tokens, chain.now
    for session in range(150, 250):
        next_request(session)
    assert (chain.tokens - before) / (chain.now - since) >= 0.85 * rate  # those that leave take time, too


HEAD = table({1: 0.0058, 2: 0.013, 3: 0.0205, 4: 0.0205, 8: 0.030})
"""The last third of that model: with few rows, its head costs more for each than for one alone."""


def test_short_rounds_on_shared_processors() -> None:
    """Eight streams of 48 tokens, again and again, on two cores: soon it is nearly the best."""
    third = table({1: 0.0035, 2: 0.0065, 3: 0.009, 4: 0.012, 8: 0.0205})
    steps = [third, third, HEAD]

    def rounds(groups: DecodeGroups, count: int, first: int) -> float:
        chain = Pipeline(steps, groups, cores=2, noise=0.1)
        chain.run(0.1)
        for number in range(count):
            if number == first:
                tokens, since = chain.tokens, chain.now
            ids = range(8)
            for session in ids:
                chain.join(session)
                chain.run(0.01)
            for session in ids:
                chain.run(48 * 8 / 160 / 8)
                chain.leave(session)
            chain.run(0.2)
        return (chain.tokens - tokens) / (chain.now - since)

    best = max(rounds(DecodeGroups(3, count), 10, 2) for count in range(1, 9))
    assert rounds(DecodeGroups(3, width=2), 10, 2) >= 0.95 * best


def test_one_session_is_one_group_that_waits_for_nobody() -> None:
    chain = chain_of("even", None)
    chain.join(1)
    assert chain.run(5) == pytest.approx(1 / 0.009, rel=0.01)
    assert chain.groups.count == 1
    assert chain.changes == 0


def test_when_most_leave_the_rest_goes_on() -> None:
    chain = chain_of("cpu", None)
    for session in range(8):
        chain.join(session)
    chain.run(5)
    assert chain.groups.count > 1
    for session in range(7):
        chain.leave(session)
    chain.run(1)
    assert chain.groups.count == 1
    assert chain.run(5) == pytest.approx(1 / 0.0105, rel=0.01)
