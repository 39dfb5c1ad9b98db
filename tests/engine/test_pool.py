"""The cells of a shared pool, counted: against a model of cells, and against llama.cpp itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from skippy.engine import ContextFullError
from skippy.engine.llama.pool import CellPool
from tests.support.tiny_models import write_tiny, write_tiny_jamba, write_tiny_windowed

from .chains import Chain, bits
from .conftest import OpenModel

SEQUENCES = 5
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "copy", "trim", "drop"]),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(_STEPS)
@settings(max_examples=300)
def test_counts_as_a_model_of_cells_does(steps: list[tuple[str, int, int, int]]) -> None:
    lengths = [0] * SEQUENCES
    pool = CellPool(1000, lengths)
    cells: list[list[int]] = [[] for _ in lengths]  # the model: ids of cells, by position
    made = 0
    for step, sequence, other, number in steps:
        if step == "grow":
            cells[sequence] += range(made, made + number)
            made += number
            lengths[sequence] += number
        elif step == "copy" and sequence != other and not cells[other] and number <= lengths[sequence]:
            pool.copied(sequence, other, number)
            cells[other] = cells[sequence][:number]
            lengths[other] = number
        elif step == "trim" and number < lengths[sequence]:
            del cells[sequence][number:]
            lengths[sequence] = number
            pool.shortened(sequence, number)
        elif step == "drop":
            cells[sequence] = []
            lengths[sequence] = 0
            pool.shortened(sequence, 0)
        assert pool.free == 1000 - len({cell for held in cells for cell in held})


TOKENS = [(index * 37 + 11) % 250 for index in range(600)]


def _open(open_model: OpenModel, path: Path) -> Chain:
    return open_model(path, kv_unified=True, max_sequences=6, context_length=256, cells=256)


def test_free_positions(open_model: OpenModel, tmp_path: Path) -> None:
    chain = _open(open_model, write_tiny(tmp_path / "plain.gguf", layers=2))
    engine = chain.last
    assert engine.free_positions() == 256
    chain.feed((0, TOKENS[:100]))
    engine.copy(0, 1)
    engine.copy(1, 2, 40)
    chain.feed((1, [5] * 10), (2, [6]))
    assert engine.free_positions() == 256 - 111
    engine.drop(0)
    engine.trim(1, 105)
    assert engine.free_positions() == 256 - 106
    engine.import_state(3, engine.export_state(2))
    assert engine.free_positions() == 256 - 147
    state = engine.export_state(1)
    engine.import_state(4, state)
    with pytest.raises(ContextFullError, match="105 more rows, 4 cells are free"):
        engine.import_state(5, state)
    assert (engine.length(4), engine.length(5)) == (105, 0)
    for sequence in range(6):
        engine.drop(sequence)
    assert engine.free_positions() == 256


@pytest.mark.parametrize(
    "write", [write_tiny, write_tiny_windowed, write_tiny_jamba], ids=lambda w: w.__name__
)
def test_a_full_pool_leaves_everything_as_it_was(
    write: object, open_model: OpenModel, tmp_path: Path
) -> None:
    assert callable(write)
    chain, other = (_open(open_model, write(tmp_path / "model.gguf")) for _ in range(2))
    for each in (chain, other):
        each.feed((0, TOKENS[:100]))
        each.last.copy(0, 1)
        each.feed((1, TOKENS[100:150]), (2, TOKENS[:60]))
    assert chain.last.free_positions() == 46
    for rows in ([(3, 47)], [(0, 30), (3, 17)], [(2, 46), (1, 1)], [(4, 150)]):
        with pytest.raises(ContextFullError, match="no room"):
            chain.feed(*((sequence, TOKENS[:count]) for sequence, count in rows))
        assert [chain.last.length(sequence) for sequence in range(6)] == [100, 150, 60, 0, 0, 0]
        assert chain.last.free_positions() == 46
    batch = [(0, TOKENS[:30]), (1, [4]), (2, [9]), (3, TOKENS[:14])]
    assert bits(chain.feed(*batch)) == bits(other.feed(*batch))
    assert chain.last.free_positions() == 0
    with pytest.raises(ContextFullError, match="no room"):
        chain.feed((3, [1]))
    chain.last.drop(2)
    other.last.drop(2)
    assert bits(chain.feed((3, [1]))) == bits(other.feed((3, [1])))


def test_sequences_with_room_of_their_own_share_none(open_model: OpenModel, tmp_path: Path) -> None:
    chain = open_model(write_tiny(tmp_path / "plain.gguf", layers=2))
    assert chain.last.free_positions() is None
