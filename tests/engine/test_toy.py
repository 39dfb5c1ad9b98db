"""The toy engine's own promises: any chunking is exact, every earlier row matters, failures on demand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from skippy.engine import EngineError, Segment
from skippy.engine.toy import ToyEngine

from .chains import Chain, bits

TOKENS = [5, 250, 5, 99, 256, 0, 77, 5, 5, 12, 130, 44, 3, 2, 1, 9]


def chain(*inner: int) -> Chain:
    bounds = (0, *inner, 6)
    return Chain([ToyEngine(a, b, 6) for a, b in itertools.pairwise(bounds)])


@given(
    st.lists(st.integers(1, 5), max_size=3, unique=True).map(sorted),
    st.lists(st.integers(1, 15), max_size=6, unique=True).map(sorted),
)
def test_any_split_and_any_chunking(inner: list[int], marks: list[int]) -> None:
    expected = bits(chain().feed((0, TOKENS)))
    cut = chain(*inner)
    found = []
    for start, stop in zip([0, *marks], [*marks, len(TOKENS)], strict=True):
        found = cut.feed((0, TOKENS[start:stop]))
    assert bits(found) == expected


def test_every_row_and_its_place_matter() -> None:
    variants = [TOKENS]
    for index in range(len(TOKENS)):
        variants.append([*TOKENS[:index], *TOKENS[index + 1 :]])  # lost
        variants.append([*TOKENS[: index + 1], *TOKENS[index:]])  # repeated
        variants.append([*TOKENS[:index], TOKENS[index] ^ 1, *TOKENS[index + 1 :]])  # changed
    for index in range(len(TOKENS) - 1):
        if TOKENS[index] != TOKENS[index + 1]:
            moved = list(TOKENS)
            moved[index], moved[index + 1] = moved[index + 1], moved[index]
            variants.append(moved)
    unique = {tuple(variant) for variant in variants}
    found = {bits(chain(2).feed((0, variant)))[0] for variant in unique}
    assert len(found) == len(unique)


def test_greedy_output_is_printable() -> None:
    stages = chain(2, 4)
    logits = stages.run([TOKENS], steps=100)
    assert all(32 <= int(row.argmax()) < 127 for row in logits)


def test_end_at() -> None:
    engine = ToyEngine(end_at=6)
    whole = Chain([engine])
    ends = [int(row.argmax()) == 257 for row in whole.run([[1, 2, 3]], steps=0) + whole.run([[4]], steps=4)]
    assert ends == [False, False, False, False, True, True]


def test_failure_on_demand() -> None:
    engine = ToyEngine()
    segment = Segment(sequence=0, position=0, count=2, tokens=[1, 2], logits=1)
    engine.fail_next = EngineError("on demand")
    with pytest.raises(EngineError, match="on demand"):
        engine.decode([segment])
    assert (engine.length(0), engine.decodes) == (0, 0)
    engine.decode([segment])
    assert (engine.length(0), engine.decodes) == (2, 1)


def test_garbage_activations_are_computed_on() -> None:
    engine = ToyEngine(2, 6, 6)
    rows = memoryview(b"\xff\xff\xff\xff" * 8 + b"\x00\x00\x80\x7f" * 8)  # NaN and infinity
    engine.decode([Segment(sequence=0, position=0, count=2, activation=rows, logits=2)])
    assert len(engine.logits(1)) == engine.info.vocab_size


@pytest.mark.parametrize("layers", [(1, 1, 6), (-1, 2, 6), (3, 7, 6)])
def test_bad_layers(layers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="layers"):
        ToyEngine(*layers)
    with pytest.raises(ValueError, match="vocab_size"):
        ToyEngine(vocab_size=259)
