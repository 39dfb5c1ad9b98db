"""Slices of a checkpoint quantised apart are what llama.cpp makes of the whole model at once."""

from __future__ import annotations

import ctypes
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from skippy.config import ConfigError
from skippy.config.quantization import NEEDS_IMATRIX, QUANTIZATIONS
from skippy.engine.llama.native import ggml_functions
from skippy.engine.llama.quantise import LlamaQuantiser
from skippy.models import (
    CheckpointError,
    GGUFHeader,
    ModelError,
    Recipe,
    SliceInfo,
    UnsupportedArchitectureError,
    ensure_slice,
    family_of,
    header_path,
)
from skippy.models.checkpoint.folder import Reader
from skippy.models.checkpoint.imatrix import ImportanceMatrix
from skippy.models.info import split_layer_name
from tests.support.checkpoints import FAMILIES, write_checkpoint, write_imatrix, write_listed_imatrix

QUANTISER = LlamaQuantiser()
TABLES = ((19,), (16, 17, 22))  # ggml's types IQ1_S, and IQ2_XXS, IQ2_XS, IQ2_S
Importance = Mapping[str, npt.NDArray[np.float32]]


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, dimensions and bytes of every tensor."""
    data = path.read_bytes()
    found = GGUFHeader.read(path).tensors.values()
    return {t.name: (t.type_name, t.dims, data[t.offset : t.offset + t.nbytes]) for t in found}


def held(info: SliceInfo) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a slice that are no holes, under the whole model's names."""
    out = {}
    for name, value in tensors(info.path).items():
        place = split_layer_name(name)
        layer = -1 if place is None else place[0] - info.front_layers
        if place is not None and 0 <= layer < info.own_layers:
            out[f"blk.{layer + info.layer_start}.{place[1]}"] = value
        elif place is None and (name != "token_embd.weight" or info.is_first or (info.is_last and info.tied)):
            out[name] = value
    return out


def cuts(header: GGUFHeader, *inner: int) -> list[tuple[int, int]]:
    """Ranges between these boundaries; the whole where the family cannot be cut."""
    count = header.count(f"{header.text('general.architecture')}.block_count")
    try:
        family_of(header)
    except UnsupportedArchitectureError:
        inner = ()
    edges = (0, *inner, count)
    return list(itertools.pairwise(edges))


@pytest.fixture(scope="session")
def tables() -> None:
    """ggml's search tables, which take it half a minute, made on two cores instead of one behind a lock."""
    make = ctypes.CFUNCTYPE(None, ctypes.c_int)(ggml_functions(("iq2xs_init_impl",))["iq2xs_init_impl"])
    threads = [threading.Thread(target=lambda kinds=kinds: [make(k) for k in kinds]) for kinds in TABLES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Compares slices with the whole of a checkpoint, and returns the types of its tensors."""

    def run(
        folder: Path, quantization: str, imatrix: Path | None = None, boundaries: Iterable[int] = (1,)
    ) -> dict[str, str]:
        cache = tmp_path / "cache"
        whole = tensors_of_whole(folder, quantization, imatrix, tmp_path)
        recipe = Recipe(quantization, imatrix, None, QUANTISER)
        header = GGUFHeader.read(header_path(folder, cache_dir=cache, recipe=recipe))
        seen: set[str] = set()
        for start, end in cuts(header, *boundaries):
            part = held(ensure_slice(folder, start, end, cache_dir=cache, recipe=recipe))
            for name, value in part.items():
                assert value[:2] == whole[name][:2], f"{quantization} {name}"
                assert value[2] == whole[name][2], f"{quantization} {name}: other bytes"
            seen |= part.keys()
        assert seen == whole.keys()
        return {name: value[0] for name, value in whole.items()}

    return run


def tensors_of_whole(
    folder: Path, quantization: str, imatrix: Path | None, tmp_path: Path
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The checkpoint converted as it is, and quantised by llama.cpp in one go."""
    layers = GGUFHeader.read(header_path(folder, cache_dir=tmp_path / "whole"))
    count = layers.count(f"{layers.text('general.architecture')}.block_count")
    source = ensure_slice(folder, 0, count, cache_dir=tmp_path / "whole").path
    if quantization == "preserve":
        return tensors(source)
    importance: dict[str, npt.NDArray[np.float32]] = {}
    if imatrix is not None:
        matrix = ImportanceMatrix.open(imatrix)
        for name in matrix.entries:
            values = matrix.values(name)
            assert values is not None
            importance[name] = values
    target = tmp_path / "quantised.gguf"
    QUANTISER.quantise_file(source, target, quantization, importance)
    return tensors(target)


def random_importance(folder: Path, tmp_path: Path, seed: int = 0) -> Importance:
    generator = np.random.default_rng(seed)
    found = GGUFHeader.read(header_path(folder, cache_dir=tmp_path / "whole")).tensors.values()
    return {
        t.name: generator.uniform(0.1, 4.0, t.dims[0] * (t.dims[2] if len(t.dims) > 2 else 1)).astype("<f4")
        for t in found
        if len(t.dims) > 1 and t.name != "token_embd.weight" and "gate_inp" not in t.name
    }


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_quantisation(family: str, tmp_path: Path, compare: Callable[..., dict[str, str]]) -> None:
    folder = write_checkpoint(tmp_path / family, family, layers=2, sparse=64, shards=2)
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", random_importance(folder, tmp_path))
    few = ("preserve", "Q4_K_M", "IQ2_S", "MXFP4_MOE")  # mistral's are llama's in all but name
    for quantization in few if family == "mistral" else QUANTIZATIONS:
        types = compare(folder, quantization, imatrix if quantization in NEEDS_IMATRIX else None)
        assert types["output_norm.weight"] == "F32"
        if quantization in ("F32", "F16", "BF16"):
            assert set(types.values()) == {"F32", quantization}
    assert ("MXFP4" in types.values()) == (family in ("mixtral", "qwen3moe"))  # MXFP4_MOE is the last


@pytest.mark.usefixtures("tables")
def test_types_follow_the_place_in_the_whole_model(
    tmp_path: Path, compare: Callable[..., dict[str, str]]
) -> None:
    folder = write_checkpoint(tmp_path / "deep", layers=16, sparse=64, kv_heads=4, tied=False)
    imatrix = write_listed_imatrix(tmp_path / "imatrix.dat", random_importance(folder, tmp_path))

    def found(quantization: str, part: str, kind: str, imatrix: Path | None = None) -> list[int]:
        types = compare(folder, quantization, imatrix, (5, 6, 11))
        return [index for index in range(16) if types[f"blk.{index}.{part}.weight"] == kind]

    more = [0, 1, 4, 7, 10, 13, 14, 15]  # use_more_bits: first and last eighth, and each third between
    assert found("Q4_K_M", "attn_v", "Q6_K") == more
    assert found("Q5_K_M", "ffn_down", "Q6_K") == more
    assert found("Q3_K_M", "attn_v", "Q5_K") == [0, 1]
    assert found("Q4_K_S", "ffn_down", "Q5_K") == [0, 1]
    assert found("Q4_0", "ffn_down", "Q4_1") == []
    assert found("Q4_0", "ffn_down", "Q4_1", imatrix) == [0, 1]
    assert found("Q2_K_S", "ffn_down", "Q4_K", imatrix) == [0, 1]
    assert found("IQ3_XS", "ffn_up", "IQ3_XXS", imatrix) == list(range(2, 14))
    assert found("IQ2_XXS", "ffn_down", "Q2_K", imatrix) == [0, 1]


def test_rows_that_are_not_whole_blocks(tmp_path: Path, compare: Callable[..., dict[str, str]]) -> None:
    folder = write_checkpoint(tmp_path / "odd", "qwen2", width=96, feed_forward=80, heads=2, dtype="F16")
    types = compare(folder, "Q4_K_M")
    assert types["blk.1.ffn_up.weight"] == "Q5_0"  # rows of 96
    assert types["blk.1.ffn_down.weight"] == "F16"  # rows of 80
    assert compare(folder, "Q8_0")["blk.1.ffn_down.weight"] == "F16"
    assert compare(folder, "MXFP4_MOE")["blk.1.ffn_up.weight"] == "Q8_0"


def test_the_three_stored_types_are_exact(tmp_path: Path, compare: Callable[..., dict[str, str]]) -> None:
    for dtype in ("F32", "F16", "BF16"):
        folder = write_checkpoint(tmp_path / dtype, "gemma", width=64, feed_forward=64, dtype=dtype)
        assert compare(folder, "preserve")["blk.0.ffn_up.weight"] == dtype
        for quantization in ("F32", "F16", "BF16", "Q4_0"):
            compare(folder, quantization)


@pytest.mark.parametrize("quantization", sorted(NEEDS_IMATRIX))
def test_without_an_importance_matrix(quantization: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=2, sparse=64)
    with pytest.raises(ConfigError, match=f"checkpoint_imatrix: is missing; .* {quantization} needs"):
        ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c", recipe=Recipe(quantization, quantiser=QUANTISER))
    source = ensure_slice(folder, 0, 2, cache_dir=tmp_path / "c").path
    with pytest.raises(ModelError, match="requires an importance matrix"):  # so says llama.cpp, too
        QUANTISER.quantise_file(source, tmp_path / "out.gguf", quantization, {})


def test_an_importance_matrix_that_does_not_fit(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=2, sparse=64)
    good = dict(random_importance(folder, tmp_path))

    def slice_with(importance: Importance) -> None:
        imatrix = write_imatrix(tmp_path / "i.gguf", importance)
        recipe = Recipe("IQ2_XS", imatrix, None, QUANTISER)
        ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c", recipe=recipe)

    lacking = {name: values for name, values in good.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(ModelError, match=r"Missing importance matrix for tensor blk\.1\.ffn_up\.weight"):
        slice_with(lacking)
    with pytest.raises(
        CheckpointError, match=r"has 3 values for 'blk\.0\.attn_q\.weight', .* has 256 inputs"
    ):
        slice_with(good | {"blk.0.attn_q.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="not finite"):
        slice_with(good | {"blk.0.attn_q.weight": np.full(256, np.nan, np.float32)})
    slice_with(good)


def test_a_weight_that_is_not_a_number(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=2, scale=float("nan"), width=64, feed_forward=64)
    recipe = Recipe("Q8_0", quantiser=QUANTISER)
    with pytest.raises(ModelError, match="not a finite number"):
        ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c", recipe=recipe)
    assert not list((tmp_path / "c" / "slices").glob("*.gguf"))


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=4, shards=3, width=64, feed_forward=128)
    recipe = Recipe("Q4_0", quantiser=QUANTISER)
    header_path(folder, cache_dir=tmp_path / "c", recipe=recipe)
    whole: set[str] = set()
    read = Reader.read

    def spy(self: Reader, tensor: object, start: int, count: int) -> bytes:
        name, nbytes = tensor.name, tensor.nbytes  # type: ignore[attr-defined]
        if count == nbytes > 64 << 10:
            whole.add(name)
        return read(self, tensor, start, count)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "read", spy)
    ensure_slice(folder, 1, 3, cache_dir=tmp_path / "c", recipe=recipe)
    assert {name.split(".")[2] for name in whole} <= {"1", "2"}


def test_memory_is_a_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "m", layers=2, width=256, feed_forward=4096, sparse=64)
    assert (folder / "model.safetensors").stat().st_size > 12 << 20
    monkeypatch.setattr("skippy.models.checkpoint.tensors._PIECE", 1 << 16)
    monkeypatch.setattr("skippy.models.checkpoint.conversion._HASH_PIECE", 1 << 16)
    recipe = Recipe("Q8_0", quantiser=QUANTISER)
    header_path(folder, cache_dir=tmp_path / "c", recipe=recipe)
    tracemalloc.start()
    ensure_slice(folder, 0, 1, cache_dir=tmp_path / "c", recipe=recipe)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
