"""Copies, state and trimming are exact in every kind of memory that llama.cpp makes, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skippy.engine import EngineError, FloatArray
from skippy.engine.llama import LlamaEngine
from tests.support.tiny_models import (
    write_tiny,
    write_tiny_jamba,
    write_tiny_mamba,
    write_tiny_sections,
    write_tiny_windowed,
)

from .chains import Chain, bits
from .conftest import OpenModel

WINDOW = 16
TOKENS = [(index * 37 + 11) % 250 for index in range(50)]
SUFFIX = [9, 200, 31, 7]
LENGTHS = (1, 10, WINDOW, WINDOW + 9, 40, 49)


@attrs.frozen
class Memory:
    """A kind of memory.

    Attributes:
        write: writes a tiny model that has it.
        options: how to load that.
        sliceable: sequences can be shortened, and copied in part.
        sliceable_state: imported state can be shortened, however long.
        exact: a row's bits depend neither on where the cells of a sequence lie nor on the size of a chunk.
            Where they do, values are f32 throughout, so that only the order of sums is left.
    """

    name: str
    write: Callable[[Path], Path]
    options: dict[str, Any]
    sliceable: bool = True
    sliceable_state: bool = True
    exact: bool = True

    def check(self, found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> None:
        """That logits are the expected ones."""
        if self.exact:
            assert bits(found) == bits(expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    def open(self, open_model: OpenModel, folder: Path, **more: Any) -> Chain:
        path = folder / f"{self.write.__name__}.gguf"
        if not path.exists():
            self.write(path)
        return open_model(path, **{"context_length": 100, **self.options, **more})


def _plain(path: Path) -> Path:
    return write_tiny(path, layers=3)


UNIFIED = {"kv_unified": True}
FORGETFUL = {"swa_full": False}
SUMS_IN_F32 = {"flash_attn": "disabled", "cache_type_k": "f32", "cache_type_v": "f32"}
KINDS = [
    Memory("plain", _plain, {}),
    Memory("transposed", _plain, SUMS_IN_F32, exact=False),
    Memory("unified", _plain, UNIFIED),
    Memory("unified transposed", _plain, {**SUMS_IN_F32, **UNIFIED}, exact=False),
    Memory("sections", write_tiny_sections, {}),
    Memory("windowed", write_tiny_windowed, {}, sliceable_state=False),
    Memory("windowed unified", write_tiny_windowed, UNIFIED, sliceable_state=False),
    Memory("forgetful", write_tiny_windowed, FORGETFUL, sliceable=False),
    Memory(
        "forgetful unified",
        write_tiny_windowed,
        {**SUMS_IN_F32, **FORGETFUL, **UNIFIED},
        sliceable=False,
        exact=False,
    ),
    Memory("recurrent", write_tiny_mamba, {}, sliceable=False),
    Memory("recurrent unified", write_tiny_mamba, UNIFIED, sliceable=False),
    Memory("hybrid", write_tiny_jamba, {}, sliceable=False),
    Memory("hybrid unified", write_tiny_jamba, UNIFIED, sliceable=False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(params=KINDS, ids=lambda memory: memory.name)
def memory(request: pytest.FixtureRequest) -> Memory:
    found: Memory = request.param
    return found


@pytest.fixture
def open_kind(memory: Memory, open_model: OpenModel, folder: Path) -> Callable[..., Chain]:
    return lambda **more: memory.open(open_model, folder, **more)


OpenKind = Callable[..., Chain]


def _fill(chain: Chain, sequence: int, tokens: list[int] = TOKENS) -> None:
    """Prefill in two chunks."""
    for chunk in (tokens[:30], tokens[30:]):
        if chunk:
            chain.feed((sequence, chunk))


def _cold(open_kind: OpenKind, length: int) -> list[FloatArray]:
    """What the suffix gives behind the first ``length`` tokens, computed from nothing."""
    chain = open_kind()
    _fill(chain, 0, TOKENS[:length])
    return chain.run([SUFFIX], steps=3)


def test_what_it_can(memory: Memory, open_kind: OpenKind) -> None:
    info = open_kind().last.info
    assert info.can_trim == memory.sliceable
    assert info.can_trim_state == (memory.sliceable and memory.sliceable_state)


def test_a_whole_copy(memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    _fill(chain, 2)
    chain.last.copy(2, 1)
    chain.last.copy(1, 3)
    assert chain.last.difference(1, 2, len(TOKENS)) == chain.last.difference(2, 3, len(TOKENS)) == 0.0
    expected = _cold(open_kind, len(TOKENS))
    for sequence in (2, 3, 1):  # whoever goes on first leaves the others as they are
        memory.check(chain.run([SUFFIX], steps=3, sequence=sequence), expected)
        chain.last.drop(sequence)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_of_the_first_positions(length: int, memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    _fill(chain, 0)
    if not memory.sliceable:
        with pytest.raises(EngineError, match="whole"):
            chain.last.copy(0, 3, length)
        assert chain.last.length(3) == 0
        memory.check(chain.run([SUFFIX], steps=3), _cold(open_kind, len(TOKENS)))
        return
    chain.last.copy(0, 3, length)
    assert chain.last.difference(0, 3, length) == 0.0
    memory.check(chain.run([SUFFIX], steps=3, sequence=3), _cold(open_kind, length))
    memory.check(chain.run([SUFFIX], steps=3, sequence=0), _cold(open_kind, len(TOKENS)))


def test_a_copy_does_not_follow_its_source(memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    _fill(chain, 0)
    chain.feed((2, SUFFIX))
    other = chain.last.export_state(2)
    chain.last.copy(0, 3)
    chain.last.drop(0)
    chain.last.import_state(0, other)
    assert chain.last.difference(0, 2, len(SUFFIX)) == 0.0
    memory.check(chain.run([SUFFIX], steps=3, sequence=3), _cold(open_kind, len(TOKENS)))
    chain.last.drop(3)
    chain.last.copy(2, 3)
    chain.last.drop(3)
    chain.last.copy(0, 3)
    assert chain.last.difference(2, 3, len(SUFFIX)) == 0.0


@pytest.mark.parametrize("memory", [kind for kind in KINDS if kind.sliceable], ids=lambda memory: memory.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_copy_can_be_trimmed(length: int, memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    _fill(chain, 1)
    chain.last.copy(1, 0)
    chain.last.trim(0, length)
    memory.check(chain.run([SUFFIX], steps=3, sequence=0), _cold(open_kind, length))


@pytest.mark.parametrize("more", [{}, {"max_sequences": 7}, {"kv_unified": True}], ids=str)
def test_state(more: dict[str, Any], memory: Memory, open_kind: OpenKind) -> None:
    chain, other = open_kind(), open_kind(**more)
    _fill(chain, 2)
    state = chain.last.export_state(2)
    for target, sequence in ((chain, 0), (other, 3), (other, 0)):
        target.last.import_state(sequence, state)
        assert target.last.length(sequence) == len(TOKENS)
    assert chain.last.difference(0, 2, len(TOKENS)) == other.last.difference(3, 0, len(TOKENS)) == 0.0
    expected = _cold(open_kind, len(TOKENS))
    for target, sequence in ((chain, 0), (other, 0), (other, 3), (chain, 2)):
        memory.check(target.run([SUFFIX], steps=3, sequence=sequence), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_imported_state_is_trimmed_right_or_not(length: int, memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    _fill(chain, 2)
    chain.last.import_state(0, chain.last.export_state(2))
    chain.last.copy(0, 1)
    for sequence in (0, 1):
        if memory.sliceable and memory.sliceable_state:
            chain.last.trim(sequence, length)
            memory.check(chain.run([SUFFIX], steps=3, sequence=sequence), _cold(open_kind, length))
        else:
            with pytest.raises(EngineError, match="trimmed"):
                chain.last.trim(sequence, length)
            memory.check(chain.run([SUFFIX], steps=3, sequence=sequence), _cold(open_kind, len(TOKENS)))
            if memory.sliceable:  # what came later can go again
                chain.last.trim(sequence, len(TOKENS))
                memory.check(chain.run([SUFFIX], steps=3, sequence=sequence), _cold(open_kind, len(TOKENS)))
        chain.last.drop(sequence)
        _fill(chain, sequence)
        if memory.sliceable:
            chain.last.trim(sequence, length)


def test_damaged_state_leaves_the_sequence_empty(memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    engine = chain.last
    assert isinstance(engine, LlamaEngine)
    _fill(chain, 0)
    good = bytes(engine.export_state(0))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    cut = engine._memory._state.seal(memoryview(bytearray(good[:-40])), len(TOKENS))
    short = engine._memory._state.seal(memoryview(bytearray(good)), len(TOKENS) - 1)
    for bad in (b"", good[:70], good[:-1], good + b"\0", bytes(flipped), cut, short):
        with pytest.raises(EngineError):
            engine.import_state(1, bad)
        assert engine.length(1) == 0
    engine.import_state(1, good)
    expected = _cold(open_kind, len(TOKENS))
    for sequence in (1, 0):
        memory.check(chain.run([SUFFIX], steps=3, sequence=sequence), expected)


def test_what_differs_is_seen(memory: Memory, open_kind: OpenKind) -> None:
    chain = open_kind()
    for sequence in (0, 1, 2):
        _fill(chain, sequence, TOKENS if sequence < 2 else [*TOKENS[:-1], 3])
    tolerance = 0.0 if memory.exact else 1e-5
    assert chain.last.difference(0, 1, len(TOKENS)) <= tolerance
    assert 0.1 < chain.last.difference(0, 2, len(TOKENS)) < 100.0
    if memory.sliceable:
        assert chain.last.difference(0, 2, len(TOKENS) - 1) <= tolerance
    else:
        with pytest.raises(ValueError, match="whole"):
            chain.last.difference(0, 2, len(TOKENS) - 1)


def test_a_copy_needs_no_room_for_more(open_kind: OpenKind) -> None:
    """A full sequence can be copied, though no row fits behind it."""
    chain = open_kind(context_length=256)
    full = [(index * 13) % 250 for index in range(256)]
    chain.feed((0, full[:200]))
    chain.feed((0, full[200:]))
    chain.last.copy(0, 1)
    assert chain.last.difference(0, 1, 256) == 0.0
