"""Neighbours come to the same description of each other on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from skippy.config import StageConfig, StageTopology
from skippy.engine.toy import ToyEngine
from skippy.models import GGUFHeader, SliceInfo, ensure_slice, plan_slice
from skippy.models.tiny import tiny_layers, write_tiny_model
from skippy.protocol import admit, check_answer, descriptor_fault
from skippy.stage.admission import (
    StageAdmission,
    dialled_ranges,
    identify_engine,
    identify_model,
    make_admission,
    resident_tensors,
)
from tests.support.cluster import toy_config, toy_topology
from tests.support.tiny_models import write_tiny

LAYERS = 6
RANGES = [(0, 2), (2, 4), (4, 6)]
ENDPOINTS = [f"127.0.0.1:{20_000 + index}" for index in range(3)]


@pytest.fixture(scope="module", params=[("llama", True), ("qwen2", False), ("internlm2", False)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, tied = request.param
    path = tmp_path_factory.mktemp(architecture) / "model.gguf"
    write_tiny(path, architecture, layers=LAYERS, tied=tied)
    return path


def admission_of(
    index: int, source: Path, part: SliceInfo, topology: StageTopology | None, **keys: Any
) -> StageAdmission:
    """The admission of a stage with the layers of ``part``, run by an engine of the same shape."""
    config = toy_config(index, RANGES, ENDPOINTS)
    info = ToyEngine(*RANGES[index], LAYERS).info
    config = attrs.evolve(config, **keys)
    identity = identify_model(part, source, dialled_ranges(config, topology))
    return make_admission(config, topology, info, identity)


def check_pair(dialer: StageAdmission, listener: StageAdmission, *, returns: bool = False) -> None:
    request = dialer.stage_zero if returns else dialer.downstream
    assert request is not None
    answer = admit(request, listener.loaded)
    assert answer.refusal is None, str(answer.refusal)
    check_answer(request, answer)


@pytest.mark.parametrize("layers", [(0, 6), (0, 2), (2, 4), (4, 6), (1, 6)])
def test_a_slice_says_of_itself_what_the_plan_says_of_it(
    model: Path, tmp_path: Path, layers: tuple[int, int]
) -> None:
    part = ensure_slice(model, *layers, cache_dir=tmp_path)
    plan = plan_slice(GGUFHeader.read(model), *layers)
    planned = sorted(tensor.source.name for tensor in plan.tensors if tensor.source is not None)
    assert list(resident_tensors(GGUFHeader.read(part.path), part)) == planned
    assert f"blk.{layers[0]}.attn_norm.weight" in planned
    if layers[0] > 0 and layers[1] < LAYERS:  # what is only a hole in the file is not there
        assert not {"token_embd.weight", "output.weight"} & set(planned)


@pytest.mark.parametrize("name", ["gpt2", "llama4", "minimax-01", "qwen4exp", "talkie"])
def test_so_does_a_slice_with_layers_and_tables_that_are_not_its_own(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", name)
    layers = tiny_layers(name)
    for start, end in ((0, 3), (3, 5), (5, layers)):
        part = ensure_slice(model, start, end, cache_dir=tmp_path)
        plan = plan_slice(GGUFHeader.read(model), start, end)
        planned = sorted(tensor.source.name for tensor in plan.tensors if tensor.source is not None)
        assert list(resident_tensors(GGUFHeader.read(part.path), part)) == planned
        held = {name.split(".")[1] for name in planned if name.startswith("blk.")}
        assert held == {str(layer) for layer in range(start, end)}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("with_topology", [True, False])
def test_neighbours_fit(model: Path, tmp_path: Path, whole: bool, with_topology: bool) -> None:
    """Whether each has the whole model or its own slice only, and with a topology or without."""
    topology = toy_topology(RANGES, ENDPOINTS) if with_topology else None
    parts = [ensure_slice(model, *layers, cache_dir=tmp_path) for layers in RANGES]
    first, middle, last = (
        admission_of(index, model if whole else part.path, part, topology) for index, part in enumerate(parts)
    )
    check_pair(first, middle)
    check_pair(middle, last)
    check_pair(last, first, returns=True)
    assert first.stage_zero is None
    assert middle.stage_zero is None
    assert last.downstream is None
    for stage in (first, middle, last):
        assert descriptor_fault(stage.loaded.descriptor) is None
    assert middle.downstream is not None
    assert (middle.downstream.descriptor is not None) == (whole and with_topology)
    assert middle.downstream.package_id == f"sha256:{parts[0].source_sha256}"
    # One with the whole model also fits one with a slice.
    mixed = admission_of(1, parts[1].path, parts[1], None)
    check_pair(first, mixed)
    check_pair(mixed, last)


def test_another_model_is_refused(tmp_path: Path) -> None:
    pieces = []
    for name in ("one", "two"):
        write_tiny(tmp_path / name, "llama", layers=LAYERS, tied=True, seed=len(pieces) + 5)
        pieces.append(ensure_slice(tmp_path / name, *RANGES[len(pieces)], cache_dir=tmp_path / "cache"))
    first = admission_of(0, tmp_path / "one", pieces[0], None)
    middle = admission_of(1, tmp_path / "two", pieces[1], None)
    assert first.downstream is not None
    refusal = admit(first.downstream, middle.loaded).refusal
    assert refusal is not None
    assert refusal.field == "package_id"


def toy_admission(index: int, topology: StageTopology | None = None, **keys: Any) -> StageAdmission:
    config: StageConfig = attrs.evolve(toy_config(index, RANGES, ENDPOINTS), **keys)
    info = ToyEngine(config.layer_start, config.layer_end, LAYERS, context_length=config.ctx_size).info
    return make_admission(config, topology, info, identify_engine(config, info))


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"run_id": "else"}, "run_id"),
        ({"topology_id": "else"}, "topology_id"),
        ({"model_id": "else"}, "model_id"),
        ({"stage_id": "else"}, "target_id"),
        ({"layer_start": 1}, "layer_start"),
        ({"layer_start": 3}, "layer_start"),
        ({"cache_type_k": "q8_0"}, "cache_type_k"),
        ({"cache_type_v": "q8_0"}, "cache_type_v"),
        ({"ctx_size": 1024}, "context_length"),
    ],
)
def test_settings_that_neighbours_share(keys: dict[str, Any], field: str) -> None:
    first = toy_admission(0)
    assert first.downstream is not None
    assert admit(first.downstream, toy_admission(1).loaded).accepted
    refusal = admit(first.downstream, toy_admission(1, **keys).loaded).refusal
    assert refusal is not None
    assert refusal.field == field


def test_with_a_topology_the_whole_range_counts() -> None:
    first = toy_admission(0, toy_topology(RANGES, ENDPOINTS))
    assert first.downstream is not None
    refusal = admit(first.downstream, toy_admission(1, layer_end=5).loaded).refusal
    assert refusal is not None
    assert (refusal.field, refusal.expected, refusal.found) == ("layer_end", "5", "4")


def test_descriptions_differ_where_models_do() -> None:
    base = toy_admission(1).loaded.descriptor
    assert toy_admission(1, stage_id="x", run_id="y").loaded.descriptor == base
    for keys in ({"layer_end": 5}, {"ctx_size": 1024}, {"cache_type_k": "q8_0"}, {"model_id": "else"}):
        other = toy_admission(1, **keys).loaded.descriptor  # type: ignore[arg-type]
        assert other.plan_id != base.plan_id
        assert other.digest != base.digest
