"""LoRA adapters: a file of low-rank changes to a model's matrices, cut by layer like the model.

An adapter is a GGUF of type ``adapter`` with two tensors, ``NAME.lora_a`` and ``NAME.lora_b``, for each
matrix it changes (llama.cpp's convert_lora_to_gguf.py). The part for a slice has those of the slice's own
layers, under the slice's numbers, and of the head if it is there. Nothing of the file but what is checked
here reaches llama.cpp, which ends the process on metadata of another type than it expects.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs

from skippy.models.cache import default_cache_dir, file_digest
from skippy.models.errors import GGUFError, show
from skippy.models.gguf import GGUFHeader, TensorInfo, ValueType
from skippy.models.info import SliceInfo, split_layer_name
from skippy.models.layout import FilePlan, copied
from skippy.models.metadata import Entry, entry
from skippy.models.parts import read_gguf
from skippy.models.slicer import write_plan
from skippy.models.store import Progress, kept

CUT_VERSION: Final = 1
"""Raised whenever the same adapter and slice would give another part."""
_TENSOR: Final = re.compile(r"(.+\.weight)\.lora_([ab])")
_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")
"""What the converter writes. llama.cpp ends the process where it cannot multiply with a type."""


@attrs.frozen(slots=True)
class AdapterPart:
    """What of an adapter a slice needs.

    Attributes:
        path: a GGUF adapter for the slice; None: the adapter changes nothing in it.
        sha256: of the whole adapter, in hex.
        scale: what the changes are multiplied with.
    """

    path: Path | None
    sha256: str
    scale: float


def mix_adapters(digest: str, adapters: Iterable[AdapterPart]) -> str:
    """A digest of what ``digest`` names, changed by these adapters in this order; itself without any."""
    for adapter in adapters:
        mixed = f"{digest} lora {adapter.sha256} {adapter.scale!r}"
        digest = hashlib.sha256(mixed.encode()).hexdigest()
    return digest


def cut_adapter(
    path: str | os.PathLike[str],
    scale: float,
    part: SliceInfo,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AdapterPart:
    """The part of an adapter for a slice, from the cache or newly written. Blocks; safe from any thread.

    Raises:
        GGUFError: no LoRA adapter, or one for another model, by name; or one that changes the embedding,
            which is not supported.
        SliceWriteError: the cache cannot be written.
    """
    header = GGUFHeader.read(path)
    chosen = _chosen(header, part)
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    sha256 = file_digest(header.stamp, folder / "hashes", progress)
    if not chosen:
        return AdapterPart(None, sha256, scale)
    place = f"{part.layer_start}-{part.layer_end}.{part.front_layers}"
    out = folder / "adapters" / f"{sha256}.a{CUT_VERSION}.{place}.gguf"
    plan = _plan(header, chosen)

    def read() -> Path | None:
        return out if _is_whole(out, chosen) else None

    def make() -> Path:
        write_plan(plan, out, progress)
        return out

    return AdapterPart(kept(out, read, make, plan.disk_bytes, progress), sha256, scale)


def _chosen(header: GGUFHeader, part: SliceInfo) -> dict[str, TensorInfo]:
    """The tensors for a slice, by their names there."""
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if header.text(key, "") != wanted:
            raise GGUFError(header.path, f"is no LoRA adapter: {key} is not {wanted!r}")
    architecture = header.text("general.architecture")
    if architecture != part.architecture:
        raise GGUFError(
            header.path, f"is for architecture {show(architecture)}, the model's is {show(part.architecture)}"
        )
    if header.value("adapter.alora.invocation_tokens") is not None:
        raise GGUFError(header.path, "adapters that begin at invocation tokens are not supported")
    _alpha(header)
    if not header.tensors:
        raise GGUFError(header.path, "is an adapter without any tensors")
    matrices = read_gguf(part.path).tensors
    out: dict[str, TensorInfo] = {}
    for name, tensor in header.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise GGUFError(header.path, f"tensor {show(name)} is no part of a low-rank pair")
        if tensor.type_name not in _TYPES:
            raise GGUFError(
                header.path,
                f"tensor {show(name)} is of type {tensor.type_name}; {', '.join(_TYPES)} are supported",
            )
        own = _own_name(match[1], header, part)
        pair = [header.tensors.get(f"{match[1]}.lora_{letter}") for letter in "ab"]
        if pair[0] is None or pair[1] is None:
            raise GGUFError(header.path, f"tensor {show(name)} is alone, it needs lora_a and lora_b")
        if own is not None:
            _check_pair(header, match[1], pair[0], pair[1], matrices.get(own))
            out[f"{own}.lora_{match[2]}"] = tensor
    return out


def _own_name(name: str, header: GGUFHeader, part: SliceInfo) -> str | None:
    """The name of a matrix in the slice; None where it is not there."""
    place = split_layer_name(name)
    if place is not None:
        if place[0] >= part.layer_count:
            raise GGUFError(header.path, f"changes {show(name)}, the model has {part.layer_count} layers")
        inside = part.layer_start <= place[0] < part.layer_end
        return f"blk.{place[0] - part.layer_start + part.front_layers}.{place[1]}" if inside else None
    if name != "output.weight" or part.tied:
        raise GGUFError(
            header.path, f"changes {show(name)}; only matrices of layers and an untied head can be"
        )
    return name if part.is_last else None


def _check_pair(
    header: GGUFHeader, name: str, a: TensorInfo, b: TensorInfo, matrix: TensorInfo | None
) -> None:
    if matrix is None:
        raise GGUFError(header.path, f"changes {show(name)}, which the model does not have")
    width, height = matrix.dims[0], matrix.dims[1] if len(matrix.dims) > 1 else 1
    if len(a.dims) != 2 or len(b.dims) != 2 or len(matrix.dims) != 2:
        raise GGUFError(header.path, f"the pair for {show(name)} is not made of matrices")
    if a.dims[0] != width or b.dims[1] != height or a.dims[1] != b.dims[0]:
        raise GGUFError(
            header.path,
            f"the pair for {show(name)} is {list(a.dims)} and {list(b.dims)}, "
            f"expected [{width}, RANK] and [RANK, {height}]",
        )


def _alpha(header: GGUFHeader) -> float:
    alpha = header.value("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise GGUFError(header.path, "adapter.lora.alpha is not a number")
    return float(alpha)


def _is_whole(path: Path, chosen: Mapping[str, TensorInfo]) -> bool:
    try:
        found = GGUFHeader.read(path).tensors
    except GGUFError:
        return False
    return {n: (t.type, t.dims) for n, t in found.items()} == {n: (t.type, t.dims) for n, t in chosen.items()}


def _plan(header: GGUFHeader, chosen: Mapping[str, TensorInfo]) -> FilePlan:
    """A part as a file: of the adapter's metadata nothing but what llama.cpp needs."""
    keys = ("general.architecture", "general.alignment")
    metadata: list[Entry] = [header.metadata[key] for key in keys if key in header.metadata]
    metadata += [
        entry("general.type", "adapter"),
        entry("adapter.type", "lora"),
        entry("adapter.lora.alpha", _alpha(header), ValueType.FLOAT32),
    ]
    return FilePlan(header, tuple(metadata), tuple(copied(tensor, name) for name, tensor in chosen.items()))
