"""From what a configuration names to the file that a stage loads: the load modes."""

from __future__ import annotations

import os
from pathlib import Path

from skippy.models.cache import ensure_slice, weights_sha256
from skippy.models.checkpoint import Recipe, is_checkpoint
from skippy.models.errors import CheckpointError, GGUFError, LayerRangeError, PackageError
from skippy.models.hub import fetch, is_reference
from skippy.models.info import SliceInfo
from skippy.models.manifest import MANIFEST, Manifest, is_package
from skippy.models.store import Progress

RUNTIME_SLICE, ARTIFACT_SLICE, LAYER_PACKAGE = "runtime-slice", "artifact-slice", "layer-package"


def local_path(model: str, layers: tuple[int, int] | None = None, progress: Progress | None = None) -> Path:
    """Where a model is here; one on a hub is fetched, of a package what these layers need.

    Raises:
        HubError: as :func:`~skippy.models.fetch`.
    """
    return fetch(model, layers, progress) if is_reference(model) else Path(model)


def check_source(
    path: Path, sha256: str | None, size: int | None, *, progress: Progress | None = None
) -> None:
    """Whether a file, a slice or a package is, or was made of, the model that is meant.

    Blocks: a whole model is hashed, once for each state of its files; safe from any thread.

    Args:
        sha256: what :func:`~skippy.models.weights_sha256` must be, in hex; None: anything.
        size: bytes of the whole model's files together; None: any.

    Raises:
        GGUFError, PackageError: it is another model, or does not say which.
        CheckpointError: ``path`` is a checkpoint.
        SliceWriteError: the cache cannot be written.
    """
    if sha256 is None and size is None:
        return
    if is_checkpoint(path):
        raise CheckpointError(
            path, "is a checkpoint, and source_model_sha256 and source_model_bytes are a GGUF file's"
        )
    if is_package(path):
        manifest = Manifest.read(path)
        _check_size(path, manifest.source_bytes, size)
        digest = manifest.source_sha256
    else:
        info = SliceInfo.from_file(path)
        _check_size(path, info.file_bytes if info.source_sha256 is None else None, size)
        digest = "" if sha256 is None else weights_sha256(info, progress=progress)
    if sha256 is not None and digest != sha256.lower():
        raise GGUFError(
            path, f"is, or is of, another model: that has SHA-256 {digest}, source_model_sha256 is {sha256}"
        )


def _check_size(path: Path, found: int | None, asked: int | None) -> None:
    if asked is not None and found != asked:
        words = "does not say how large its model is" if found is None else f"is of a model of {found} bytes"
        raise GGUFError(path, f"{words}, source_model_bytes is {asked}")


def load_mode_of(path: str | os.PathLike[str]) -> str:
    """The mode that a model is loaded in when none is asked for."""
    return LAYER_PACKAGE if is_package(path) else RUNTIME_SLICE


def find_part(
    path: Path,
    load_mode: str,
    layer_start: int,
    layer_end: int,
    *,
    manifest_sha256: str | None = None,
    progress: Progress | None = None,
    verify: bool = True,
    recipe: Recipe | None = None,
) -> SliceInfo:
    """The file with layers ``[layer_start, layer_end)`` of a model, as a load mode says.

    ``runtime-slice`` cuts them out of a GGUF model or makes them of a checkpoint, once; ``artifact-slice``
    takes a file that has just these; ``layer-package`` puts them together, once, from the parts of a package
    that have them. Blocks; safe from any thread.

    Args:
        manifest_sha256: what the package's manifest has to be, in hex; None: anything.
        verify: check the SHA-256 of a package's parts, once for each state of them.
        recipe: what a checkpoint becomes; nothing else takes one.

    Raises:
        ModelError: as :func:`~skippy.models.ensure_slice`; or ``path`` is not what the mode loads.
    """
    if load_mode == LAYER_PACKAGE:
        _check_package(path, manifest_sha256)
    elif is_package(path):
        raise PackageError(
            path, f"is a layer package, which load_mode {load_mode} does not load; use layer-package"
        )
    elif is_checkpoint(path) and load_mode == ARTIFACT_SLICE:
        raise CheckpointError(path, f"is a checkpoint, which load_mode {load_mode} does not load")
    elif load_mode == ARTIFACT_SLICE and recipe is None:
        return _artifact(path, layer_start, layer_end)
    return ensure_slice(path, layer_start, layer_end, progress=progress, verify=verify, recipe=recipe)


def _check_package(path: Path, manifest_sha256: str | None) -> None:
    if not is_package(path):
        there = "there is no such folder" if not path.exists() else f"it has no {MANIFEST}"
        raise PackageError(path, f"is no layer package: {there}; `skippy package` makes one of a GGUF model")
    found = Manifest.read(path).sha256
    if manifest_sha256 is not None and found != manifest_sha256.lower():
        raise PackageError(
            path / MANIFEST, f"has SHA-256 {found}, not the one of manifest_sha256, {manifest_sha256}"
        )


def _artifact(path: Path, layer_start: int, layer_end: int) -> SliceInfo:
    info = SliceInfo.from_file(path)
    if (info.layer_start, info.layer_end) != (layer_start, layer_end):
        raise LayerRangeError(
            f"{path}: has layers {info.layer_start}:{info.layer_end}, and load_mode artifact-slice takes "
            f"a file with just layers {layer_start}:{layer_end}; `skippy slice` makes one"
        )
    return info
