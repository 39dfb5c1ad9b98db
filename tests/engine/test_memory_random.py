"""Any order of copies, exports, imports, trims and rows leaves every sequence with what it should hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from skippy.engine import ContextFullError, EngineError, EngineOptions, FloatArray
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo
from tests.support.tiny_models import write_tiny, write_tiny_jamba, write_tiny_mamba, write_tiny_windowed

from .chains import Chain

SEQUENCES, CONTEXT, CELLS = 4, 48, 256
KINDS = {
    "plain": (write_tiny, False, True),
    "plain, shared": (write_tiny, True, True),
    "windowed": (write_tiny_windowed, False, True),
    "windowed, shared": (write_tiny_windowed, True, True),
    "forgetful": (write_tiny_windowed, False, False),
    "forgetful, shared": (write_tiny_windowed, True, False),
    "recurrent": (write_tiny_mamba, False, True),
    "hybrid": (write_tiny_jamba, False, True),
    "hybrid, shared": (write_tiny_jamba, True, True),
}


@attrs.define
class Pair:
    """An engine on which everything is tried, and one that computes from nothing what must come out."""

    tried: Chain
    cold: Chain
    known: dict[tuple[int, ...], FloatArray]

    def expected(self, tokens: list[int]) -> FloatArray:
        """Logits behind ``tokens``, row by row."""
        key = tuple(tokens)
        if key not in self.known:
            self.cold.last.drop(0)
            for token in tokens:
                (row,) = self.cold.feed((0, [token]))
            self.known[key] = row
        return self.known[key]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    write, unified, swa_full = KINDS[request.param]
    path: Any = tmp_path_factory.mktemp("random") / "model.gguf"
    info = SliceInfo.from_file(Path(write(path, layers=4)))
    options = EngineOptions(
        n_threads=1,
        max_sequences=SEQUENCES,
        context_length=CONTEXT,
        kv_unified=unified,
        cells=CELLS if unified else None,
        swa_full=swa_full,
        flash_attn="disabled",  # sums in f32: chunks and places of cells change no more than their order
        cache_type_k="f32",
        cache_type_v="f32",
    )
    engines = [LlamaEngine.load(info, each) for each in (options, attrs.evolve(options, max_sequences=1))]
    yield Pair(Chain([engines[0]]), Chain([engines[1]]), {})
    for engine in engines:
        engine.close()


_SEQUENCE = st.integers(0, SEQUENCES - 1)
_STEP = st.one_of(
    st.tuples(st.just("rows"), _SEQUENCE, st.integers(1, 20), st.integers(0, 2)),
    st.tuples(st.just("copy"), _SEQUENCE, _SEQUENCE, st.integers(0, CONTEXT)),
    st.tuples(st.just("trim"), _SEQUENCE, st.integers(0, CONTEXT), st.just(0)),
    st.tuples(st.just("drop"), _SEQUENCE, st.just(0), st.just(0)),
    st.tuples(st.just("export"), _SEQUENCE, st.just(0), st.just(0)),
    st.tuples(st.just("import"), _SEQUENCE, st.integers(0, 5), st.just(0)),
)


@given(st.lists(_STEP, max_size=25))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order(pair: Pair, steps: list[tuple[str, int, int, int]]) -> None:
    chain, engine = pair.tried, pair.tried.last
    for sequence in range(SEQUENCES):
        engine.drop(sequence)
    held: list[list[int]] = [[] for _ in range(SEQUENCES)]
    states: list[tuple[memoryview, list[int]]] = []
    for step, sequence, number, more in steps:
        before = list(held[sequence])
        if step == "rows":
            tokens = [
                (position * 7 + more * 31 + 5) % 250 for position in range(len(before), len(before) + number)
            ]
            try:
                (row,) = chain.feed((sequence, tokens))
            except ContextFullError:
                pass
            else:
                held[sequence] = before + tokens
                np.testing.assert_allclose(row, pair.expected(held[sequence]), rtol=0, atol=2e-4)
        elif step == "copy":
            length = min(more, len(before))
            if number != sequence and not held[number]:
                try:
                    engine.copy(sequence, number, length)
                except EngineError:
                    assert not engine.info.can_trim_state
                else:
                    held[number] = before[:length]
        elif step == "trim" and number <= len(before):
            try:
                engine.trim(sequence, number)
            except EngineError:
                assert not engine.info.can_trim_state
            else:
                held[sequence] = before[:number]
        elif step == "drop":
            engine.drop(sequence)
            held[sequence] = []
        elif step == "export":
            states.append((engine.export_state(sequence), before))
        elif step == "import" and number < len(states) and not before:
            engine.import_state(sequence, states[number][0])
            held[sequence] = list(states[number][1])
        assert [engine.length(each) for each in range(SEQUENCES)] == [len(tokens) for tokens in held]
    for sequence, tokens in enumerate(held):
        if 0 < len(tokens) < CONTEXT:
            (row,) = chain.feed((sequence, [17]))
            np.testing.assert_allclose(row, pair.expected([*tokens, 17]), rtol=0, atol=2e-4)
