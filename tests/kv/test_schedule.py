"""The chunks that tokens were computed in, and those in which a request would compute them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from skippy.kv.schedule import ChunkPlan, cut_schedule

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def test_the_last_size_again_and_again_and_then_one_by_one() -> None:
    assert list(itertools.islice(ChunkPlan((3, 4), 13), 8)) == [3, 4, 4, 2, 1, 1, 1, 1]
    assert list(ChunkPlan((3, 4), 13).ends(14)) == [3, 7, 11, 13, 14]
    assert list(ChunkPlan((3,), 0).ends(2)) == list(ChunkPlan((3,), -1).ends(2)) == [1, 2]


@pytest.mark.parametrize(
    ("schedule", "limit", "expected"),
    [
        ((4, 4, 2, 1, 1), 12, 12),  # an equal prompt, and its answer
        ((4, 4, 2, 1, 1), 11, 11),
        ((4, 4, 2, 1, 1), 9, 8),
        ((4, 4, 2, 1, 1), 3, 0),
        ((4, 4, 4), 12, 8),  # a longer prompt
        ((4, 3, 1, 1, 1, 1), 11, 4),  # a shorter one, whose answer goes on as this prompt does
        ((3, 1, 4, 2), 10, 0),
        ((), 5, 0),
    ],
)
def test_what_a_prompt_of_ten_in_chunks_of_four_shares(
    schedule: tuple[int, ...], limit: int, expected: int
) -> None:
    assert ChunkPlan((4,), 10).shared(schedule, limit) == expected


@given(
    mine=sizes, theirs=sizes, prefill=st.integers(0, 20), other=st.integers(0, 20), limit=st.integers(0, 25)
)
def test_what_is_shared_is_cut_alike(
    mine: tuple[int, ...], theirs: tuple[int, ...], prefill: int, other: int, limit: int
) -> None:
    plan, schedule = ChunkPlan(mine, prefill), tuple(itertools.islice(ChunkPlan(theirs, other), 12))
    length = plan.shared(schedule, limit)
    alike, whole = cut_schedule(schedule, length)
    assert whole
    assert length <= limit
    assert alike == tuple(itertools.islice(plan, len(alike)))
    following = len(alike)
    ends_there = following == len(schedule) or length + schedule[following] > limit
    assert ends_there or schedule[following] != next(itertools.islice(plan, following, None))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, ((), True)),
        (3, ((3,), True)),
        (4, ((3, 1), False)),
        (5, ((3, 2), True)),
        (6, ((3, 2, 1), True)),
        (9, ((3, 2, 1), False)),
    ],
)
def test_cutting_a_schedule(length: int, expected: tuple[tuple[int, ...], bool]) -> None:
    assert cut_schedule((3, 2, 1), length) == expected
