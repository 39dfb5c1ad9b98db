from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skippy.engine import EngineOptions, StageEngine
from skippy.engine.llama import LlamaEngine
from skippy.engine.toy import ToyEngine
from skippy.models import SliceInfo, ensure_slice
from tests.support.tiny_models import write_tiny

from .chains import Chain, Kind

OpenChain = Callable[..., Chain]
OpenModel = Callable[..., Chain]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=6, weights="Q8_0")


@pytest.fixture(scope="session")
def slice_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slices")


def _llama(name: str, model: Path, cache: Path, layers: int, cuts: tuple[tuple[int, ...], ...]) -> Kind:
    def load(start: int, end: int, **options: Any) -> StageEngine:
        options.setdefault("n_threads", 1)
        info = ensure_slice(model, start, end, cache_dir=cache)
        return LlamaEngine.load(info, EngineOptions(**options))

    return Kind(name, layers, load, cuts)


@pytest.fixture(scope="session")
def tiny_kind(tiny_model: Path, slice_cache: Path) -> Kind:
    return _llama("llama", tiny_model, slice_cache, 6, ((3,), (1, 5), (2, 4), (1, 2, 3, 4, 5)))


@pytest.fixture(scope="session")
def bundled_kind(bundled_model: Path, slice_cache: Path) -> Kind:
    return _llama("bundled", bundled_model, slice_cache, 30, ((15,), (1,), (29,), (10, 20), (7, 23)))


@pytest.fixture(scope="session")
def toy_kind() -> Kind:
    def load(start: int, end: int, **options: Any) -> StageEngine:
        return ToyEngine(start, end, 6, **options)

    return Kind("toy", 6, load, ((3,), (1, 5), (2, 4), (1, 2, 3, 4, 5)))


@pytest.fixture(scope="session")
def unified_kind(tiny_kind: Kind) -> Kind:
    """All sequences in one pool of cells."""

    def load(start: int, end: int, **options: Any) -> StageEngine:
        return tiny_kind.load(start, end, kv_unified=True, **options)

    return Kind("unified", tiny_kind.layers, load, tiny_kind.cuts)


@pytest.fixture(params=["toy", "llama", "unified", pytest.param("bundled", marks=pytest.mark.model)])
def kind(request: pytest.FixtureRequest) -> Kind:
    name = {"toy": "toy_kind", "llama": "tiny_kind", "unified": "unified_kind", "bundled": "bundled_kind"}[
        request.param
    ]
    found: Kind = request.getfixturevalue(name)
    return found


@pytest.fixture
def open_chain() -> Iterator[OpenChain]:
    """``open_chain(kind, *inner_boundaries, **options)``; closed after the test."""
    opened: list[StageEngine] = []

    def make(kind: Kind, *inner: int, **options: Any) -> Chain:
        bounds = (0, *inner, kind.layers)
        stages = [kind.load(a, b, **options) for a, b in itertools.pairwise(bounds)]
        opened.extend(stages)
        return Chain(stages)

    yield make
    for stage in opened:
        stage.close()


@pytest.fixture
def open_model() -> Iterator[OpenModel]:
    """``open_model(path, **options)``: a whole model as a chain of one; closed after the test."""
    opened: list[LlamaEngine] = []

    def make(path: Path, **options: Any) -> Chain:
        given = EngineOptions(**{"n_threads": 1, "max_sequences": 4, "context_length": 64, **options})
        opened.append(LlamaEngine.load(SliceInfo.from_file(path), given))
        return Chain([opened[-1]])

    yield make
    for engine in opened:
        engine.close()
