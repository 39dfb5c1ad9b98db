"""What every engine must do with what its sequences hold: compare, copy, export and import it exactly."""

from __future__ import annotations

import itertools

import pytest

from skippy.engine import EngineError, Segment, StageEngine

from .chains import Kind, bits
from .conftest import OpenChain

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 40, 41, 97, 98, 99, 100, 101, 102]
OTHER = [201, 5, 17, 99, 120, 34, 8]


def test_difference(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    for sequence, tokens in enumerate((PROMPT, PROMPT, [*PROMPT[:-1], 9])):
        chain.feed((sequence, tokens[:13]))
        chain.feed((sequence, tokens[13:]))
    for stage in chain.stages:
        assert stage.difference(0, 1, len(PROMPT)) == 0.0
        assert stage.difference(0, 2, len(PROMPT) - 1) == stage.difference(2, 1, 13) == 0.0
        assert stage.difference(0, 2, len(PROMPT)) == stage.difference(2, 0, len(PROMPT)) > 0.0
        assert stage.difference(2, 2, len(PROMPT)) == stage.difference(0, 3, 0) == 0.0
    chain.feed((1, OTHER))
    assert chain.last.difference(1, 0, len(PROMPT)) == 0.0


def test_difference_refuses(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind)
    chain.feed((0, PROMPT), (1, OTHER))
    for first, second, length in ((0, 1, 8), (1, 0, 8), (0, 2, 1), (0, 0, -1), (0, 4, 0), (-1, 0, 0)):
        with pytest.raises(ValueError, match="sequence"):
            chain.last.difference(first, second, length)


def test_copies_and_imports_are_equal(kind: Kind, open_chain: OpenChain) -> None:
    chain, fresh = open_chain(kind, 3), open_chain(kind, 3, max_sequences=3)
    chain.feed((1, PROMPT))
    chain.feed((1, OTHER))
    chain.each(lambda stage: stage.copy(1, 2, 13))
    chain.each(lambda stage: stage.import_state(3, stage.export_state(1)))
    for stage, other in zip(chain.stages, fresh.stages, strict=True):
        assert stage.difference(1, 2, 13) == 0.0
        assert stage.difference(3, 1, stage.length(1)) == 0.0
        other.import_state(0, stage.export_state(1))
        other.import_state(2, stage.export_state(3))
        assert other.difference(0, 2, stage.length(1)) == 0.0


def test_equal_sequences_export_equal_bytes(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    for sequence in (0, 3):
        chain.feed((sequence, PROMPT))
    for stage in chain.stages:
        assert stage.export_state(0) == stage.export_state(3)
        assert stage.export_state(1) == stage.export_state(2)


def test_exported_state_is_independent_of_its_sequence(kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(kind, 3)
    chain.feed((0, PROMPT))
    states = [stage.export_state(0) for stage in chain.stages]
    assert all(state.readonly for state in states)
    kept = [bytes(state) for state in states]
    expected = bits(chain.run([OTHER], steps=2))
    chain.each(lambda stage: stage.drop(0))
    chain.feed((0, OTHER))
    for stage, state, bytes_ in zip(chain.stages, states, kept, strict=True):
        assert bytes(state) == bytes_
        stage.import_state(2, state)
    assert bits(chain.run([OTHER], steps=2, sequence=2)) == expected


@pytest.mark.parametrize("length", [0, 1, 13, 21, None])
def test_state_of_the_first_positions(length: int | None, kind: Kind, open_chain: OpenChain) -> None:
    chain, other = open_chain(kind, 3), open_chain(kind, 3, max_sequences=2)
    chain.feed((2, PROMPT))
    held = len(PROMPT) if length is None else length
    for stage, target in zip(chain.stages, other.stages, strict=True):
        state = stage.export_state(2, length)
        target.import_state(1, state)
        assert target.length(1) == held
        stage.copy(2, 1, held)
        assert stage.export_state(1) == state
        assert stage.export_state(2, held) == state
    assert bits(other.run([OTHER], steps=2, sequence=1)) == bits(chain.run([OTHER], steps=2, sequence=1))
    for bad in (-1, len(PROMPT) + 1):
        with pytest.raises(ValueError, match="holds 22 positions"):
            chain.last.export_state(2, bad)


def test_state_in_pieces(kind: Kind, open_chain: OpenChain) -> None:
    stage = open_chain(kind).last
    stage.decode([Segment(0, 0, len(PROMPT), tokens=PROMPT)])
    state = bytes(stage.export_state(0))
    for cuts in ((), (1,), (8, 9, 700), range(0, len(state), 1000)):
        bounds = [0, *cuts, len(state)]
        pieces = [state[a:b] if a % 2 else memoryview(state)[a:b] for a, b in itertools.pairwise(bounds)]
        stage.import_state(1, pieces)
        assert stage.difference(0, 1, len(PROMPT)) == 0.0
        assert stage.export_state(1) == state
        stage.drop(1)
        with pytest.raises(EngineError):
            stage.import_state(1, [*pieces, b"x"])
        with pytest.raises(EngineError):
            stage.import_state(1, [])
        assert stage.length(1) == 0


@pytest.mark.parametrize("sequence", [0, 4])
@pytest.mark.parametrize(
    "options",
    [{"max_sequences": 2}, {"max_sequences": 9}, {"max_sequences": 1, "context_length": 700}],
    ids=str,
)
def test_state_moves_between_engines_of_other_sizes(
    options: dict[str, int], sequence: int, kind: Kind, open_chain: OpenChain
) -> None:
    chain, other = open_chain(kind, 3, max_sequences=5), open_chain(kind, 3, **options)
    chain.feed((sequence, PROMPT))
    last = options["max_sequences"] - 1
    for stage, target in zip(chain.stages, other.stages, strict=True):
        target.import_state(last, stage.export_state(sequence))
    found = bits(other.run([OTHER], steps=2, sequence=last))
    assert found == bits(chain.run([OTHER], steps=2, sequence=sequence))


def test_sizes(kind: Kind, open_chain: OpenChain) -> None:
    (stage,) = open_chain(kind).stages
    grown = {count: _state_bytes(stage, count) for count in (1, 21)}
    per_position = (grown[21] - grown[1]) / 20
    assert 0 <= per_position - stage.info.position_bytes <= 12  # a position's number beside its values
    assert stage.info.sequence_bytes == 0
    cells = stage.info.kv_bytes / stage.info.position_bytes
    assert cells == stage.info.max_sequences * stage.info.context_length


def _state_bytes(stage: StageEngine, count: int) -> int:
    stage.drop(0)
    stage.decode([Segment(0, 0, count, tokens=[5] * count)])
    return len(stage.export_state(0))
