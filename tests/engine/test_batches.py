"""Several sequences in one batch: every row, boundary and logit belongs to the segment it was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from skippy.engine import EngineError, EngineOptions, FloatArray, Segment
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.native import api
from skippy.engine.llama.order import RowOrder, plan_calls
from skippy.models import SliceInfo
from tests.support.tiny_models import write_tiny_mamba

from .chains import Chain, Kind, bits
from .conftest import OpenChain

Rows = tuple[int, list[int]]


def _tokens(sequence: int, start: int, count: int) -> list[int]:
    return [(sequence * 53 + (start + index) * 31) % 250 for index in range(count)]


def _rows(lengths: dict[int, int], *wanted: tuple[int, int]) -> list[Rows]:
    """Segments (sequence, count) that go on where ``lengths`` says, which grows with them."""
    found = []
    for sequence, count in wanted:
        found.append((sequence, _tokens(sequence, lengths.get(sequence, 0), count)))
        lengths[sequence] = lengths.get(sequence, 0) + count
    return found


# (sequence, rows) of each segment, batch after batch: unsorted, with gaps, unequal, single rows beside long
_SCHEDULE: list[list[tuple[int, int]]] = [
    [(3, 7), (0, 4), (1, 4)],
    [(5, 1), (0, 1), (3, 1), (1, 1)],
    [(4, 11), (3, 1), (5, 2), (0, 1)],
    [(0, 1), (2, 19), (1, 6), (3, 1)],
    [(5, 1), (4, 1), (3, 1), (2, 1), (1, 1), (0, 1)],
    [(1, 3), (2, 3), (3, 3), (0, 3)],
]


def _run(chain: Chain, logits: int = 2) -> list[list[FloatArray]]:
    lengths: dict[int, int] = {}
    return [chain.feed(*_rows(lengths, *batch), logits=logits) for batch in _SCHEDULE]


def _run_apart(chain: Chain, logits: int = 2) -> list[list[FloatArray]]:
    lengths: dict[int, int] = {}
    return [
        [row for rows in _rows(lengths, *batch) for row in chain.feed(rows, logits=logits)]
        for batch in _SCHEDULE
    ]


def _assert_near(found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> None:
    """Each row is its own expected row, give or take what the shape of a batch does, and no other one."""
    assert len(found) == len(expected)
    for index, row in enumerate(found):
        distances = [float(np.abs(row - other).mean()) for other in expected]
        others = [d for other, d in enumerate(distances) if other != index]
        assert distances[index] < 0.2 * min(others, default=np.inf), (index, distances)


def test_a_batch_equals_its_segments_alone(kind: Kind, open_chain: OpenChain) -> None:
    together, apart = (
        _run(open_chain(kind, 3, max_sequences=6)),
        _run_apart(open_chain(kind, max_sequences=6)),
    )
    for found, expected in zip(together, apart, strict=True):
        _assert_near(found, expected)
        if kind.name == "toy":
            assert bits(found) == bits(expected)


@pytest.mark.parametrize("n_ubatch", [512, 8, 3, 1])
@pytest.mark.parametrize("kv_unified", [False, True])
def test_a_batch_is_told_apart(
    kv_unified: bool, n_ubatch: int, tiny_kind: Kind, open_chain: OpenChain
) -> None:
    options: dict[str, Any] = {"kv_unified": kv_unified, "n_ubatch": n_ubatch, "max_sequences": 6}
    whole = _run(open_chain(tiny_kind, **options))
    for found, expected in zip(whole, _run_apart(open_chain(tiny_kind, **options)), strict=True):
        _assert_near(found, expected)
    for inner in ((3,), (1, 4)):  # the boundaries too: the same batches give the same bits, split or not
        for found, expected in zip(_run(open_chain(tiny_kind, *inner, **options)), whole, strict=True):
            assert bits(found) == bits(expected)


@pytest.fixture
def native_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each native decode from now on."""
    rows: list[int] = []
    decode = api.llama_decode

    def counting(context: int, batch: Any) -> int:
        rows.append(batch.n_tokens)
        return int(decode(context, batch))

    monkeypatch.setattr(api, "llama_decode", counting)
    return rows


@pytest.mark.parametrize("kv_unified", [False, True])
def test_one_native_decode_for_all(
    kv_unified: bool, tiny_kind: Kind, open_chain: OpenChain, native_rows: list[int]
) -> None:
    chain = open_chain(tiny_kind, 3, kv_unified=kv_unified, max_sequences=6)
    native_rows.clear()
    _run(chain)
    assert native_rows == [total for batch in _SCHEDULE for total in [sum(count for _, count in batch)] * 2]
    assert all(stage.info.can_mix for stage in chain.stages)


def test_long_segments_run_alone_where_rows_cannot_be_told_apart(
    tiny_kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, whole, apart = (open_chain(tiny_kind, *inner, max_sequences=6) for inner in ((3,), (), ()))
    for stage in (*chain.stages, *whole.stages):
        monkeypatch.setattr(stage, "_order", RowOrder.UNKNOWN)
    for found, expected, alone in zip(_run(chain), _run(whole), _run_apart(apart), strict=True):
        assert bits(found) == bits(expected)
        _assert_near(found, alone)


@pytest.mark.parametrize("order", [RowOrder.EQUAL, RowOrder.UNKNOWN])
def test_a_failed_call_undoes_the_calls_before_it(
    order: RowOrder, tiny_kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_chain(tiny_kind, max_sequences=6, n_ubatch=2)
    monkeypatch.setattr(chain.last, "_order", order)
    chain.feed((0, [1, 2, 3]), (2, [4]))
    expected = bits(chain.feed((0, [5]), (2, [6]), (4, [7, 8]), (5, [9, 10])))
    for sequence, length in ((0, 3), (2, 1), (4, 0), (5, 0)):
        chain.last.trim(sequence, length)
    decode, calls = api.llama_decode, itertools.count()

    def failing(context: int, batch: Any) -> int:
        result = int(decode(context, batch))
        return -3 if next(calls) else result

    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", failing)
        with pytest.raises(EngineError, match="code -3"):
            chain.feed((5, [9, 10]), (0, [5]), (2, [6]), (4, [7, 8]))
    assert next(calls) > 1
    assert [chain.last.length(sequence) for sequence in range(6)] == [3, 0, 1, 0, 0, 0]
    assert bits(chain.feed((0, [5]), (2, [6]), (4, [7, 8]), (5, [9, 10]))) == expected


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mamba(tmp_path_factory.mktemp("mamba") / "mamba.gguf")


@pytest.fixture
def open_recurrent(recurrent: Path) -> Iterator[Callable[..., Chain]]:
    opened: list[LlamaEngine] = []

    def make(**options: Any) -> Chain:
        given = EngineOptions(n_threads=1, max_sequences=6, context_length=64, **options)
        opened.append(LlamaEngine.load(SliceInfo.from_file(recurrent), given))
        return Chain([opened[-1]])

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("options", [{}, {"n_ubatch": 2}, {"kv_unified": True}], ids=str)
def test_recurrent_models(
    options: dict[str, Any],
    open_recurrent: Callable[..., Chain],
    native_rows: list[int],
) -> None:
    together, apart = open_recurrent(**options), open_recurrent(**options)
    assert not together.last.info.can_mix
    native_rows.clear()
    found = _run(together)
    if "n_ubatch" not in options:
        # single rows together, and each longer segment alone
        assert native_rows == [4, 4, 7, 4, 2, 11, 2, 2, 6, 19, 6, 3, 3, 3, 3]
    for one, other in zip(found, _run_apart(apart), strict=True):
        _assert_near(one, other)


def test_a_failure_drops_what_cannot_be_trimmed(
    open_recurrent: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_recurrent()
    chain.feed((0, [1, 2]), (1, [3]), (2, [4, 5]))
    with monkeypatch.context() as patch:
        decode = api.llama_decode
        patch.setattr(api, "llama_decode", lambda *given: decode(*given) or -3)
        with pytest.raises(EngineError, match="code -3"):
            chain.feed((0, [6]), (1, [7]))
    assert [chain.last.length(sequence) for sequence in range(3)] == [0, 0, 2]
    chain.feed((0, [1, 2]), (2, [6]))


def test_unaligned_activations_of_several_segments(kind: Kind, open_chain: OpenChain) -> None:
    first, last = open_chain(kind, 3).stages
    width = first.info.output_width * 4
    counts, found = (2, 5, 1), []
    for shift in (0, 1, 3):
        segments = [Segment(s, first.length(s), n, tokens=_tokens(s, 0, n)) for s, n in enumerate(counts)]
        backing = bytearray(sum(counts) * width + 8)
        output = memoryview(backing)[shift : shift + sum(counts) * width]
        first.decode(segments, output)
        parts, start = [], 0
        for sequence, count in enumerate(counts):
            rows = output[start * width : (start + count) * width].toreadonly()
            parts.append(Segment(sequence, 0, count, activation=rows, logits=1))
            start += count
        last.decode(parts)
        found.append([last.logits(index).tobytes() for index in range(3)])
        for sequence in range(3):
            first.drop(sequence)
            last.drop(sequence)
    assert found[0] == found[1] == found[2]


def _split_equal(sequences: list[int], n_ubatch: int) -> list[int]:
    """``llama_batch_allocr::split_equal(n_ubatch, sequential=True)`` row by row: the order of indices."""
    used = [False] * len(sequences)
    order: list[int] = []
    while not all(used):
        members: list[int] = []
        for index, sequence in enumerate(sequences):
            if not used[index] and sequence not in members and (not members or sequence == members[-1] + 1):
                members.append(sequence)
                if len(members) > n_ubatch:
                    break
        rows: dict[int, list[int]] = {sequence: [] for sequence in members}
        while True:
            nexts = {}
            for sequence in members:
                left = [i for i, s in enumerate(sequences) if s == sequence and not used[i]]
                if left:
                    nexts[sequence] = left[0]
            if len(nexts) < len(members):
                break
            for sequence, index in nexts.items():
                rows[sequence].append(index)
                used[index] = True
            if (len(rows[members[0]]) + 1) * len(members) > n_ubatch:
                break
        order += itertools.chain.from_iterable(rows.values())
    return order


@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 7), min_size=1, max_size=6).flatmap(
        lambda found: st.permutations(list(found.items()))
    ),
    st.integers(1, 12),
)
def test_the_order_of_split_caches(batch: list[tuple[int, int]], n_ubatch: int) -> None:
    segments = [Segment(sequence, 0, count) for sequence, count in batch]
    starts = list(itertools.accumulate((segment.count for segment in segments), initial=0))
    covered: list[int] = []
    for call in plan_calls(segments, RowOrder.EQUAL, n_ubatch):
        assert len(call.segments) <= n_ubatch
        given = [(i, starts[i] + row) for i in call.segments for row in range(segments[i].count)]
        computed = _split_equal([segments[i].sequence for i, _ in given], n_ubatch)
        runs = [row for start, count in call.runs for row in range(start, start + count)]
        assert runs == [given[index][1] for index in computed]
        covered += runs
    assert sorted(covered) == list(range(starts[-1]))


def test_rows_of_a_shared_cache_keep_their_order() -> None:
    segments = [Segment(4, 0, 2), Segment(0, 9, 1), Segment(2, 3, 5)]
    (call,) = plan_calls(segments, RowOrder.BATCH, 2)
    assert list(call.segments) == [0, 1, 2]
    assert call.runs == [(0, 8)]


def test_single_rows_share_a_call_where_the_order_is_unknown() -> None:
    segments = [Segment(4, 0, 1), Segment(0, 9, 2), Segment(2, 3, 1), Segment(1, 1, 1)]
    calls = plan_calls(segments, RowOrder.UNKNOWN, 2)
    assert [list(call.segments) for call in calls] == [[3, 2], [0], [1]]
    assert [call.runs for call in calls] == [[(4, 1), (3, 1)], [(0, 1)], [(1, 2)]]
