"""What is particular to the llama engine: loading, taps, failures inside a batch, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from gguf import GGUFValueType

from skippy.engine import ContextFullError, EngineError, EngineOptions, ModelLoadError, Segment
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.devices import Device, chosen_devices
from skippy.engine.llama.native import api
from skippy.engine.llama.state import HEADER_BYTES
from skippy.models import BoundaryPart, SliceInfo, ensure_slice
from tests.support.splitting import split_model
from tests.support.tiny_models import write_tiny

from .chains import Chain, Kind, bits
from .conftest import OpenChain

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
CHUNKS = [PROMPT, [5, 6, 7]]


@pytest.mark.parametrize("name", ["tiny_kind", pytest.param("bundled_kind", marks=pytest.mark.model)])
def test_both_taps_give_the_same(name: str, request: pytest.FixtureRequest, open_chain: OpenChain) -> None:
    kind: Kind = request.getfixturevalue(name)
    chains = [open_chain(kind, 2, 4, tap=tap) for tap in ("c", "python")]
    assert [chain.stages[1].info.tap for chain in chains] == ["c", "python"]
    assert chains[0].last.info.tap is None
    first, second = (bits(chain.run(CHUNKS, steps=8)) for chain in chains)
    assert first == second


@pytest.mark.parametrize(
    "options",
    [
        {"n_batch": 2, "max_sequences": 4},
        {"n_ubatch": 1, "max_sequences": 3},
        {"n_batch": 16, "n_ubatch": 512},
        {"cache_type_k": "f32", "cache_type_v": "bf16"},
        {"flash_attn": "disabled"},
        {"mmap": False, "repack": False},
        {"direct_io": True},
        {"kv_unified": True},
        {"max_sequences": 1, "context_length": 1000},
        {"n_threads": 2, "n_threads_batch": 1, "check_tensors": True},
    ],
    ids=str,
)
def test_options_keep_the_chain_exact(
    options: dict[str, Any], tiny_kind: Kind, open_chain: OpenChain
) -> None:
    chunks = [PROMPT[i : i + 2] for i in range(0, len(PROMPT), 2)]
    expected = bits(open_chain(tiny_kind, **options).run(chunks, steps=4))
    chain = open_chain(tiny_kind, 1, 5, **options)
    assert bits(chain.run(chunks, steps=4)) == expected
    states = [stage.export_state(0) for stage in chain.stages]
    chain.each(lambda stage: stage.drop(0))
    for stage, state in zip(chain.stages, states, strict=True):
        stage.import_state(0, state)
    assert chain.last.length(0) == len(PROMPT) + 4


@pytest.mark.model
def test_quantised_cache(bundled_kind: Kind, tiny_kind: Kind, open_chain: OpenChain) -> None:
    options = {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    expected = bits(open_chain(bundled_kind, **options).run(CHUNKS, steps=4))
    chain = open_chain(bundled_kind, 10, **options)
    assert bits(chain.run(CHUNKS, steps=4)) == expected
    plain = open_chain(bundled_kind, 10)
    assert chain.last.info.kv_bytes < plain.last.info.kv_bytes / 2
    with pytest.raises(EngineError, match="of another slice, or of a stage with other cache settings"):
        plain.last.import_state(0, chain.last.export_state(0))
    with pytest.raises(ModelLoadError, match="q8_0 with block size 32"):  # its heads are 16 wide
        open_chain(tiny_kind, **options)


def test_ubatches_are_tapped_one_after_another(tiny_kind: Kind, open_chain: OpenChain) -> None:
    whole, chain = (open_chain(tiny_kind, *inner, n_ubatch=5) for inner in ((), (3,)))
    assert bits(chain.feed((0, PROMPT))) == bits(whole.feed((0, PROMPT)))


def test_unified_cache_copies_and_fills_up(tiny_kind: Kind, open_chain: OpenChain) -> None:
    chain = open_chain(tiny_kind, 3, kv_unified=True, max_sequences=2, context_length=128)
    chain.feed((0, PROMPT))
    chain.each(lambda stage: stage.copy(0, 1, 5))
    assert [stage.length(1) for stage in chain.stages] == [5, 5]
    chain.feed((1, PROMPT[5:]))
    assert chain.last.length(1) == len(PROMPT)


def _failing(monkeypatch: pytest.MonkeyPatch, code: int, at: int) -> None:
    """From call ``at`` on, ``llama_decode`` runs and then says ``code``."""
    calls = 0
    decode = api.llama_decode

    def failing(context: int, batch: Any) -> int:
        nonlocal calls
        calls += 1
        result = int(decode(context, batch))
        return code if calls >= at else result

    monkeypatch.setattr(api, "llama_decode", failing)


@pytest.mark.parametrize(("code", "error"), [(-3, EngineError), (2, EngineError), (1, ContextFullError)])
def test_a_failed_decode_undoes_the_whole_batch(
    code: int, error: type[Exception], tiny_kind: Kind, open_chain: OpenChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = open_chain(tiny_kind, 3)
    chain.feed((0, PROMPT), (1, PROMPT[:4]))
    expected = bits(chain.feed((0, [1, 2]), (1, [3])))
    chain.each(lambda stage: stage.trim(0, len(PROMPT)))
    chain.each(lambda stage: stage.trim(1, 4))
    with monkeypatch.context() as patch:
        _failing(patch, code, at=1)
        with pytest.raises(error):
            chain.feed((0, [9, 9]), (1, [9]), (2, [9]))
    assert [chain.stages[0].length(sequence) for sequence in range(3)] == [len(PROMPT), 4, 0]
    assert bits(chain.feed((0, [1, 2]), (1, [3]))) == expected


def test_a_wrong_boundary_node_is_found_when_loading(tiny_model: Path, slice_cache: Path) -> None:
    info = ensure_slice(tiny_model, 0, 3, cache_dir=slice_cache)
    for node, message in (("l_out-77", "gave 0 bytes"), ("ffn_gate-1", "whole rows|more rows")):
        with pytest.raises(ModelLoadError, match=f"cannot run a row: .*({message})"):
            LlamaEngine.load(
                attrs.evolve(info, outputs=(BoundaryPart(node, 64),)), EngineOptions(n_threads=1)
            )


def test_without_a_spare_layer_every_row_is_kept(tiny_model: Path, slice_cache: Path) -> None:
    # a whole model used as a stage that ends at its last layer: llama.cpp would drop rows that are no outputs
    whole = SliceInfo.from_file(tiny_model)
    options = EngineOptions(n_threads=1)
    padded = LlamaEngine.load(ensure_slice(tiny_model, 0, 5, cache_dir=slice_cache), options)
    bare = attrs.evolve(whole, layer_end=6, layer_count=7, outputs=(BoundaryPart("l_out-4", 64),))
    engine = LlamaEngine.load(bare, options)
    size = len(PROMPT) * whole.hidden_size * 4
    outputs = [bytearray(size), bytearray(size)]
    for stage, output in zip((padded, engine), outputs, strict=True):
        segment = Segment(sequence=0, position=0, count=len(PROMPT), tokens=PROMPT)
        stage.decode([segment], memoryview(output))
        stage.close()
    assert outputs[0] == outputs[1]
    last = LlamaEngine.load(attrs.evolve(bare, outputs=(BoundaryPart("l_out-5", 64),)), options)
    last.decode([Segment(sequence=0, position=0, count=len(PROMPT), tokens=PROMPT)], memoryview(outputs[0]))
    assert np.isfinite(np.frombuffer(outputs[0], np.float32)).all()
    last.close()


def test_load_errors(tiny_model: Path, tmp_path: Path) -> None:
    whole = SliceInfo.from_file(tiny_model)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model.read_bytes()[: whole.file_bytes // 2])
    heads = {"llama.attention.head_count": (GGUFValueType.UINT32, 3)}
    misshapen = write_tiny(tmp_path / "misshapen.gguf", layers=2, extra=heads)
    for info, message in (
        (attrs.evolve(whole, path=tmp_path / "none.gguf"), "no model file"),
        (attrs.evolve(whole, path=damaged), "damaged.gguf: truncated"),
        (SliceInfo.from_file(misshapen), "could not be loaded: .*wrong shape"),  # llama.cpp's own words
        (attrs.evolve(whole, layer_end=5), "has 6 layers, expected 5"),
        (attrs.evolve(whole, hidden_size=32), "rows of 64 values, expected 32"),
        (attrs.evolve(whole, layer_count=7), "boundary node"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            LlamaEngine.load(info, EngineOptions(n_threads=1))


def test_a_closed_engine_says_so(tiny_kind: Kind) -> None:
    stage = tiny_kind.load(0, 6)
    state = stage.export_state(0)
    stage.close()
    for call in (
        lambda: stage.decode([Segment(sequence=0, position=0, count=1, tokens=[1])]),
        lambda: stage.trim(0, 0),
        lambda: stage.copy(0, 1),
        lambda: stage.export_state(0),
        lambda: stage.import_state(0, state),
        lambda: stage.new_sampler(None),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    stage.drop(0)
    assert stage.length(0) == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"context_length": 0}, "context_length"),
        ({"context_length": 2**24, "max_sequences": 256}, "context_length"),
        ({"max_sequences": 257}, "max_sequences"),
        ({"cells": 1024}, "kv_unified"),
        ({"cells": 100, "kv_unified": True}, "at least context_length"),
        ({"n_batch": True}, "n_batch"),
        ({"n_ubatch": 0}, "n_ubatch"),
        ({"n_threads": 0}, "n_threads"),
        ({"cache_type_k": "q3_k"}, "cache_type_k"),
        ({"cache_type_v": "F16"}, "cache_type_v"),
        ({"flash_attn": "on"}, "flash_attn"),
        ({"flash_attn": "disabled", "cache_type_v": "q8_0"}, "cache_type_v"),
        ({"split_mode": "rows"}, "split_mode"),
        ({"tap": "rust"}, "tap"),
        ({"direct_io": True, "mmap": True}, "direct_io"),
        ({"direct_io": True, "mlock": True}, "direct_io"),
    ],
)
def test_options_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        EngineOptions(**fields)


_MEASURE = """
import json, sys
from pathlib import Path
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo
import psutil

options = EngineOptions(n_threads=1, context_length=1024)
engine = LlamaEngine.load(SliceInfo.from_file(Path(sys.argv[1])), options)
width = engine.info.input_width * 4
for position, count in ((0, 256), (256, 256), (512, 1), (513, 1)):
    output = memoryview(bytearray(count * width))
    segment = Segment(sequence=0, position=position, count=count, activation=memoryview(bytes(count * width)))
    engine.decode([segment], output)
print(json.dumps({"resident": psutil.Process().memory_info().rss, "kv": engine.info.kv_bytes}))
"""


@pytest.mark.model
def test_resident_memory_of_a_middle_stage(bundled_model: Path, slice_cache: Path) -> None:
    info = ensure_slice(bundled_model, 10, 20, cache_dir=slice_cache)
    found = subprocess.run(
        [sys.executable, "-c", _MEASURE, info.path], capture_output=True, text=True, check=True
    )
    measured = json.loads(found.stdout.splitlines()[-1])
    on_disk = info.path.stat().st_blocks * 512
    assert on_disk < 23e6
    assert measured["resident"] < on_disk + measured["kv"] + 150e6


@pytest.mark.parametrize("options", [{}, {"kv_unified": True}], ids=str)
def test_state_with_forged_cells_is_refused(
    options: dict[str, Any], tiny_kind: Kind, open_chain: OpenChain
) -> None:
    chain = open_chain(tiny_kind, **options)
    expected = bits(chain.feed((0, PROMPT)))
    engine = chain.last
    assert isinstance(engine, LlamaEngine)
    good = bytes(engine.export_state(0))
    first_cell = HEADER_BYTES + 16
    forged: list[tuple[bytes, int]] = [(good, len(PROMPT) - 1), (good[: first_cell + 40], len(PROMPT))]
    for offset, word in ((0, -1), (0, 2**31 - 1), (12, 0), (4, 0), (4, 2), (-4, 5), (-8, 0)):
        state = bytearray(good)
        state[first_cell + offset : first_cell + offset + 4] = word.to_bytes(4, "little", signed=word < 0)
        forged.append((bytes(state), len(PROMPT)))
    for body, length in forged:
        with pytest.raises(EngineError):
            engine.import_state(1, engine._memory._state.seal(memoryview(bytearray(body)), length))
        assert engine.length(1) == 0
    engine.import_state(1, good)
    chain.each(lambda stage: stage.drop(0))
    assert bits(chain.feed((0, PROMPT))) == expected


@pytest.mark.parametrize("flash_attn", ["disabled", "auto"])
@pytest.mark.parametrize("unified", [False, True])
def test_what_is_not_finite_stays_out_of_the_cache(unified: bool, flash_attn: str, tiny_kind: Kind) -> None:
    """Without flash attention a NaN would reach whoever has its cells next; in a shared cache, everybody."""
    engine = tiny_kind.load(3, 6, max_sequences=2, kv_unified=unified, flash_attn=flash_attn)
    rows = np.random.default_rng(1).normal(0, 1, (8, engine.info.input_width)).astype(np.float32)

    def run(sequence: int, values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
        data = values.data.cast("B")
        engine.decode([Segment(sequence, 0, len(values), activation=data, logits=1)])
        return engine.logits(0).tobytes()

    expected = run(0, rows[:2])
    engine.drop(0)
    for value in (np.nan, np.inf, -np.inf):
        spoiled = rows.copy()
        spoiled[6, 1] = value
        with pytest.raises(ValueError, match="sequence 1: the activation holds NaN or infinity"):
            run(1, spoiled)
        assert engine.length(1) == 0
        for sequence in (0, 1):
            assert run(sequence, rows[:2]) == expected
            engine.drop(sequence)
    for value in (3e38, -3e38, 1e19):  # strange, but nothing that lasts
        spoiled[6:] = value
        run(1, spoiled)
        engine.drop(1)
        assert run(1, rows[:2]) == expected
        engine.drop(1)
    engine.close()


def test_devices(tiny_kind: Kind, open_chain: OpenChain) -> None:
    expected = bits(open_chain(tiny_kind).feed((0, PROMPT)))
    assert bits(open_chain(tiny_kind, device="CPU").feed((0, PROMPT))) == expected
    with pytest.raises(ModelLoadError, match="device: there is no 'CUDA7' here; ggml reports CPU"):
        open_chain(tiny_kind, device="CUDA7")


CPU, CUDA0, CUDA1, BLAS = (
    Device(1, "CPU", 0),
    Device(2, "CUDA0", 1),
    Device(3, "CUDA1", 1),
    Device(4, "BLAS", 3),
)


@pytest.mark.parametrize(
    ("fields", "handles"),
    [
        ({}, None),
        ({"n_gpu_layers": -1, "main_gpu": 1, "split_mode": "row"}, None),
        ({"device": "CPU"}, []),
        ({"device": "CUDA1", "n_gpu_layers": 3, "split_mode": "none"}, [3]),
    ],
)
def test_chosen_devices(fields: dict[str, Any], handles: list[int] | None) -> None:
    assert chosen_devices(EngineOptions(**fields), [CPU, CUDA0, CUDA1, BLAS], True) == handles


@pytest.mark.parametrize(
    ("fields", "gpu_offload", "name"),
    [
        ({"n_gpu_layers": 1}, False, "n_gpu_layers: is 1, but llama.cpp finds no GPU on this machine"),
        ({"n_gpu_layers": -1}, False, "n_gpu_layers"),
        ({"split_mode": "row"}, False, "split_mode"),
        ({"main_gpu": 1}, False, "main_gpu: is 1, but this machine has 0 GPUs"),
        ({"main_gpu": 2}, True, "main_gpu: is 2, but this machine has 2 GPUs"),
        ({"device": "CPU", "n_gpu_layers": 4}, True, "n_gpu_layers: is 4, but .* on device CPU"),
        ({"device": "CUDA0", "main_gpu": 1}, True, "main_gpu: is 1, but device CUDA0 has 1 GPU"),
        ({"device": "BLAS"}, True, "device: there is no 'BLAS' here; ggml reports CPU, CUDA0, CUDA1"),
        ({"device": "CUDA0"}, False, "device: there is no 'CUDA0' here; ggml reports CPU"),
    ],
)
def test_devices_that_are_not_there(fields: dict[str, Any], gpu_offload: bool, name: str) -> None:
    with pytest.raises(ModelLoadError, match=name):
        chosen_devices(EngineOptions(**fields), [CPU, CUDA0, CUDA1, BLAS], gpu_offload)


def test_load_progress(tiny_model: Path) -> None:
    info = SliceInfo.from_file(tiny_model)
    parts: list[float] = []
    LlamaEngine.load(info, EngineOptions(n_threads=1), parts.append).close()
    assert parts == sorted(parts)
    assert parts[-1] == 1.0

    def stop(part: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaEngine.load(info, EngineOptions(n_threads=1), stop)


def test_a_path_that_is_not_ascii(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mödel 模型.gguf"
    path.write_bytes(tiny_model.read_bytes())
    LlamaEngine.load(SliceInfo.from_file(path), EngineOptions(n_threads=1)).close()


def test_a_model_in_several_files_runs_whole(
    tiny_model: Path, tmp_path: Path, open_model: Callable[..., Chain]
) -> None:
    parts = split_model(tiny_model, tmp_path)
    expected = bits(open_model(tiny_model).feed((0, PROMPT)))
    assert bits(open_model(parts[1]).feed((0, PROMPT))) == expected
