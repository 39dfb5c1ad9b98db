"""Writing a layer package."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from skippy.models.errors import GGUFError, PackageError, SliceWriteError, printable
from skippy.models.gguf import MAX_DIMENSIONS, GGUFHeader, TensorInfo, ValueType
from skippy.models.info import hidden_size, is_slice, layer_count
from skippy.models.layout import FilePlan, copied
from skippy.models.manifest import ABI, MANIFEST, SCHEMA_VERSION, Manifest, wrong_model_id
from skippy.models.metadata import Entry, text_bytes
from skippy.models.package import INVENTORY, part_of
from skippy.models.parts import read_gguf
from skippy.models.slicer import file_sha256, write_plan
from skippy.models.store import Progress, sync_folder, unfinished, write_error

_SHARED = ("metadata", "embeddings", "output")


def write_package(
    model_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model_id: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write a whole model, in one GGUF file or several, as a layer package in the new folder ``out``.

    The folder appears complete and synced, or not at all. Blocks; safe from any thread.

    Args:
        model_id: what the model is called; default: the file's name without its ending.

    Raises:
        PackageError: nothing may be called so.
        GGUFError: the model cannot be read, is a slice, or its layers are incomplete.
        SliceWriteError: ``out`` exists already, disk full, no permission.
    """
    out = Path(os.path.abspath(out))
    header = read_gguf(model_path)
    if is_slice(header):
        raise GGUFError(header.path, "is a slice; a package is made of the whole model")
    name = printable(_text(header.path.stem)) if model_id is None else model_id
    problem = wrong_model_id(name)
    if problem:  # what a manifest may not have is found before an hour of writing
        raise PackageError(out, f"model_id {problem}")
    parts = _share_out(header)
    if os.path.lexists(out):
        raise SliceWriteError(f"{out}: exists already; remove it, or name another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(out.parent, f".{out.name}.", ".tmp", folder=True) as temporary:
            for folder in ("shared", "layers"):
                (temporary / folder).mkdir()
            manifest = _describe(header, name, progress)
            manifest |= _write_parts(header, parts, temporary, progress)
            _write_manifest(temporary / MANIFEST, manifest)
            for written in (temporary / "shared", temporary / "layers", temporary):
                sync_folder(written)
            os.rename(temporary, out)  # onto nothing: a folder that has come to be meanwhile makes it fail
            sync_folder(out.parent)
    except (OSError, SliceWriteError) as error:
        cause = error.__cause__ if isinstance(error, SliceWriteError) else error
        if isinstance(cause, OSError):  # the folder's, not a part's that nobody will find
            raise write_error(out, cause, header.file_size) from cause
        raise
    return Manifest.read(out)


def _share_out(header: GGUFHeader) -> dict[int | str, list[TensorInfo]]:
    """The tensors of every part: shared ones first, then layers ascending."""
    layers = layer_count(header)
    parts: dict[int | str, list[TensorInfo]] = {name: [] for name in _SHARED}
    parts |= {index: [] for index in range(layers)}
    for tensor in header.tensors.values():
        parts[part_of(tensor.name, layers)].append(tensor)
    empty = next((index for index in range(layers) if not parts[index]), None)
    if empty is not None:
        raise GGUFError(header.path, f"damaged: there are no tensors of layer {empty}")
    return parts


def _describe(header: GGUFHeader, model_id: str, progress: Progress | None) -> dict[str, Any]:
    """All of the manifest but its parts; hashes the source."""
    files = [
        {
            "path": _text(file.path.name),
            "size_bytes": file.size,
            "sha256": file_sha256(file.path, _summed(progress, "hash", header.file_size, done)),
        }
        for file, done in zip(header.files, _sums(file.size for file in header.files), strict=True)
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "format": "layer-package",
        "skippy_abi_version": ".".join(map(str, ABI)),
        "model_id": model_id,
        "layer_count": layer_count(header),
        "activation_width": hidden_size(header),
        "source_model": {
            "path": _text(header.path.name),
            "sha256": files[0]["sha256"],
            "primary_file": _text(header.path.name),
            "files": files,
        },
        "projectors": [],
    }


def _text(name: str) -> str:
    """A file's name for the manifest, which is UTF-8, as names of files need not be."""
    return name.encode(errors="replace").decode()


def _write_parts(
    header: GGUFHeader, parts: dict[int | str, list[TensorInfo]], folder: Path, progress: Progress | None
) -> dict[str, Any]:
    plans = {place: _plan(header, place, tensors) for place, tensors in parts.items()}
    sizes = [plan.disk_bytes for plan in plans.values()]
    shared: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    for (place, plan), done in zip(plans.items(), _sums(sizes), strict=True):
        name = f"layers/layer-{place:05}.gguf" if isinstance(place, int) else f"shared/{place}.gguf"
        write_plan(plan, folder / name, _summed(progress, "write", sum(sizes), done))
        artifact = {
            "path": name,
            "tensor_count": len(plan.tensors),
            "tensor_bytes": sum(tensor.nbytes for tensor in plan.tensors),
            "artifact_bytes": plan.file_bytes,
            "sha256": file_sha256(folder / name),
        }
        if isinstance(place, int):
            layers.append({"layer_index": place, **artifact})
        else:
            shared[place] = artifact
    return {"shared": shared, "layers": layers}


def _plan(header: GGUFHeader, place: int | str, tensors: list[TensorInfo]) -> FilePlan:
    """A part as a file: all of the model's metadata in one of them, in others what reading them takes."""
    keys = ("general.architecture", "general.alignment")
    metadata: list[Entry] = [header.metadata[key] for key in keys if key in header.metadata]
    if place == "metadata":
        metadata = [*header.metadata.values(), *_inventory(header)]
    return FilePlan(header, tuple(metadata), tuple(copied(tensor, tensor.name) for tensor in tensors))


def _inventory(header: GGUFHeader) -> Iterator[bytes]:
    """The entries that list all tensors."""
    tensors = list(header.tensors.values())
    sizes = [size for t in tensors for size in (*t.dims, *[0] * (MAX_DIMENSIONS - len(t.dims)))]
    types = [tensor.type for tensor in tensors]
    names = b"".join(text_bytes(tensor.name) for tensor in tensors)
    for key, kind, count, data in (
        ("tensor_names", ValueType.STRING, len(tensors), names),
        ("tensor_types", ValueType.UINT32, len(types), struct.pack(f"<{len(types)}I", *types)),
        ("tensor_dims", ValueType.UINT64, len(sizes), struct.pack(f"<{len(sizes)}Q", *sizes)),
    ):
        yield text_bytes(INVENTORY + key) + struct.pack("<IIQ", ValueType.ARRAY, kind, count) + data


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sums(sizes: Iterable[int]) -> list[int]:
    """What comes before each."""
    out, done = [], 0
    for size in sizes:
        out.append(done)
        done += size
    return out


def _summed(progress: Progress | None, stage: str, total: int, before: int) -> Progress | None:
    """Progress of one file as part of all."""
    if progress is None:
        return None

    def report(_stage: str, done: int, _total: int) -> None:
        progress(stage, min(before + done, total), total)

    return report
