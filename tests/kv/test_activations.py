"""Boundary rows of prefills, against a model that remembers every row by its whole path."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skippy.kv.activations import MAX_SIBLINGS, ActivationCache

WIDTH, PAGE = 2, 4
PAGE_BYTES = PAGE * WIDTH * 4


def row(namespace: str, tokens: Sequence[int]) -> bytes:
    """The only right row at the end of a path: no two paths have the same."""
    dice = random.Random(repr((namespace, list(tokens))))
    return np.array([dice.random() for _ in range(WIDTH)], np.float32).tobytes()


def rows(namespace: str, tokens: Sequence[int], start: int) -> bytes:
    return b"".join(row(namespace, tokens[: i + 1]) for i in range(start, len(tokens)))


def cache(pages: int = 1000) -> ActivationCache:
    return ActivationCache(pages * PAGE_BYTES, WIDTH, page_tokens=PAGE)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(st.sampled_from("xy"), PATHS, st.integers(0, 13)), max_size=12), st.data())
def test_rows_are_found_exactly_where_each_was_recorded(
    records: list[tuple[str, list[int], int]], data: st.DataObject
) -> None:
    kept, known = cache(), set()
    for namespace, tokens, start in records:
        start = min(start, len(tokens) - 1)
        kept.record(namespace, tokens, start, rows(namespace, tokens, start))
        known |= {(namespace, *tokens[: i + 1]) for i in range(start, len(tokens))}
    for namespace, path, _ in [
        *records,
        *data.draw(st.lists(st.tuples(st.sampled_from("xy"), PATHS, st.just(0)))),
    ]:
        tokens = path + data.draw(st.lists(st.integers(0, 1), max_size=2))
        start = data.draw(st.integers(0, len(tokens) - 1))
        count = data.draw(st.integers(1, len(tokens) - start))
        expected = all((namespace, *tokens[: i + 1]) in known for i in range(start, start + count))
        found = kept.find(namespace, tokens, start, count)
        assert (found is not None) == expected
        if found is not None:
            assert b"".join(found) == rows(namespace, tokens[: start + count], start)
            assert all(view.readonly for view in found)


def test_long_prefills_in_chunks_come_back_in_pages() -> None:
    kept = ActivationCache(1 << 20, 8)
    tokens = list(range(1000))
    values = np.arange(1000 * 8, dtype=np.float32).reshape(1000, 8)
    for start in range(0, 1000, 300):
        kept.record("", tokens[: start + 300], start, values[start : start + 300].tobytes())
    found = kept.find("", tokens, 100, 801)
    assert found is not None
    assert [len(view) // 32 for view in found] == [28, 128, 128, 128, 128, 128, 128, 5]
    assert b"".join(found) == values[100:901].tobytes()
    stats = kept.stats()
    assert (stats.pages, stats.bytes, stats.recorded_rows) == (8, 8 * 128 * 32, 1000)


def test_the_least_recently_used_pages_go() -> None:
    kept = cache(pages=3)
    paths = [[n] * PAGE for n in range(4)]
    for tokens in paths[:3]:
        kept.record("", tokens, 0, rows("", tokens, 0))
    assert kept.find("", paths[0], 0, PAGE)
    kept.record("", paths[3], 0, rows("", paths[3], 0))
    assert [kept.find("", tokens, 0, 1) is not None for tokens in paths] == [True, False, True, True]
    stats = kept.stats()
    assert (stats.bytes, stats.evicted_pages, stats.hits, stats.misses) == (3 * PAGE_BYTES, 1, 4, 1)


def test_pages_count_in_full_and_never_exceed_the_budget() -> None:
    kept, dice = cache(pages=7), random.Random(3)
    for _ in range(300):
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 20))]
        start = dice.randrange(len(tokens))
        kept.record("", tokens, start, rows("", tokens, start))
        assert kept.used_bytes <= kept.max_bytes
    assert kept.used_bytes == 7 * PAGE_BYTES


def test_views_outlive_their_page_and_do_not_change() -> None:
    kept = cache(pages=1)
    kept.record("", [1, 2], 0, rows("", [1, 2], 0))
    found = kept.find("", [1, 2], 0, 2)
    assert found is not None
    kept.record("", [1, 2, 3], 0, bytes(3 * WIDTH * 4))  # other rows for the same path: those there stay
    kept.record("", [9], 0, rows("", [9], 0))
    assert kept.find("", [1, 2], 0, 2) is None
    assert b"".join(found) == rows("", [1, 2], 0)


def test_many_ways_on_from_one_prefix_are_bounded() -> None:
    kept = cache()
    for tail in range(MAX_SIBLINGS + 5):
        kept.record("", [0] * PAGE + [tail], PAGE, row("", [0] * PAGE + [tail]))
    assert kept.stats().pages == MAX_SIBLINGS
    assert kept.find("", [0] * PAGE + [4], PAGE, 1) is None
    assert kept.find("", [0] * PAGE + [5], PAGE, 1) is not None


def test_forgetting_a_path_leaves_others() -> None:
    kept = cache()
    one, two, other = [1] * 6, [1] * 4 + [2, 2], [2] * 6
    for tokens in (one, two, other):
        kept.record("", tokens, 0, rows("", tokens, 0))
    kept.record("x", one, 0, rows("x", one, 0))
    kept.forget("", one)
    assert kept.find("", one, 0, 1) is kept.find("", one, 4, 1) is None
    assert kept.find("", two, 4, 2)
    assert kept.find("", other, 0, 6)
    assert kept.find("x", one, 0, 6)
    kept.clear()
    assert kept.used_bytes == 0
    assert kept.find("", other, 0, 6) is None


@pytest.mark.parametrize("max_bytes", [0, PAGE_BYTES - 1])
def test_a_budget_below_one_page_keeps_nothing(max_bytes: int) -> None:
    kept = ActivationCache(max_bytes, WIDTH, page_tokens=PAGE)
    assert not kept.enabled
    kept.record("", [1], 0, bytes(WIDTH * 4))
    assert kept.find("", [1], 0, 1) is None


def test_sizes_that_do_not_fit_are_refused() -> None:
    kept = cache()
    with pytest.raises(ValueError, match="7 bytes are not the rows 1 to 2 of 8 bytes each"):
        kept.record("", [1, 2], 1, bytes(7))
    for start, count in ((0, 3), (-1, 1), (0, 0), (2, 1)):
        with pytest.raises(ValueError, match=f"rows {start} to {start + count} of a path of 2 tokens"):
            kept.find("", [1, 2], start, count)
