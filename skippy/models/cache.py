"""The slice cache: slices by content of their source, written once, shared by all processes of a user.

Layout below the cache folder::

    hashes/<key of real path, size, mtime, inode>    the source's SHA-256, so that it is hashed once
    slices/<sha256>.r<rules>.<start>-<end>.gguf      a slice; beside it ``.lock``
    checkpoints/<digest>.gguf                        a converted checkpoint's header, without its data
    adapters/<sha256>.a<version>.<range>.gguf        the part of a LoRA adapter for a slice

Entries appear by rename, so they are read without a lock; locks only keep two processes from doing the
same work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import attrs
import platformdirs

from skippy.models.checkpoint import Conversion, Recipe, is_checkpoint
from skippy.models.errors import CheckpointError, GGUFError
from skippy.models.gguf import GGUFHeader
from skippy.models.info import SliceInfo, is_slice
from skippy.models.manifest import is_package
from skippy.models.package import Package
from skippy.models.parts import read_gguf
from skippy.models.plan import RULES_VERSION, SlicePlan, check_range, plan_slice
from skippy.models.reading import FileStamp
from skippy.models.slicer import TensorData, combined_sha256, file_sha256, write_slice
from skippy.models.store import Progress, kept, replacing

_SHA256 = re.compile(r"[0-9a-f]{64}")


def default_cache_dir() -> Path:
    """``$SKIPPY_CACHE``, else the user's cache folder for ``skippy``."""
    configured = os.environ.get("SKIPPY_CACHE")
    return Path(configured) if configured else platformdirs.user_cache_path("skippy", appauthor=False)


def ensure_slice(
    model_path: str | os.PathLike[str],
    layer_start: int,
    layer_end: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    verify: bool = True,
    recipe: Recipe | None = None,
) -> SliceInfo:
    """A file with layers ``[layer_start, layer_end)`` of a model, from the cache or newly written.

    The whole range, and a slice asked for exactly its own range, are the file itself: nothing is copied. Of a
    layer package every range is written, from the parts that have it; no other part is opened. A
    cached slice that does not read as what it should be is written again. Blocks while another process writes
    the same slice; safe from any thread.

    ``model_path`` may be a checkpoint's folder, which is converted as ``recipe`` says, also for all
    layers. Only the range's own tensors are read, and samples of the others.

    Raises:
        LayerRangeError: no such range, or another range of a slice.
        CheckpointError: the checkpoint or its importance matrix is not right, or ``recipe`` is for one and
            ``model_path`` is not.
        UnsupportedArchitectureError: the family cannot be cut.
        GGUFError: the model cannot be read.
        PackageError: a part of a package that is needed is not what the manifest says.
        SliceWriteError: the cache cannot be written; nothing half-written is left.
    """
    conversion = _conversion(model_path, recipe)
    if is_package(model_path):
        return _from_package(model_path, layer_start, layer_end, _folder(cache_dir), progress, verify)
    if conversion is not None:
        return _ensure_converted(conversion, layer_start, layer_end, _folder(cache_dir), progress)
    header = read_gguf(model_path)
    info = SliceInfo.from_header(header)
    if (info.layer_start, info.layer_end) == (layer_start, layer_end):
        return info
    check_range(header, layer_start, layer_end)
    plan = plan_slice(header, layer_start, layer_end)  # refuse before anything is hashed
    folder = _folder(cache_dir)
    sha256 = model_sha256(header, folder / "hashes", progress)
    return _ensure(folder, sha256, sha256, plan, progress, None)


def _from_package(
    model_path: str | os.PathLike[str],
    layer_start: int,
    layer_end: int,
    folder: Path,
    progress: Progress | None,
    verify: bool,
) -> SliceInfo:
    """A slice of a layer package, whose key says which bytes are in it and whether that was checked."""

    def digest(stamp: FileStamp) -> str:
        return file_digest(stamp, folder / "hashes", progress)

    check = digest if verify else None
    package = Package.open(model_path, check)
    check_range(package.header, layer_start, layer_end)
    plan = plan_slice(package.header, layer_start, layer_end)
    sources = [tensor.source for tensor in plan.tensors if tensor.source is not None]
    header = package.locate(sources, check)
    key = package.manifest.content_sha256
    if not verify:  # nobody knows what these parts hold, so they share nothing with parts that are known
        states = {(t.file.path.name, t.file.size, t.file.mtime_ns) for t in header.tensors.values()}
        key = hashlib.sha256(f"{key} {sorted(states)}".encode()).hexdigest()
    plan = plan_slice(header, layer_start, layer_end)
    info = _ensure(folder, key, package.manifest.source_sha256, plan, progress, None)
    return attrs.evolve(info, content_sha256=key)


def write_slice_of(
    model_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    layer_start: int,
    layer_end: int,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
) -> SliceInfo:
    """As :func:`~skippy.models.write_slice`, of a GGUF model or a checkpoint's folder.

    Raises:
        ModelError: as that, and as :func:`ensure_slice`.
    """
    conversion = _conversion(model_path, recipe)
    if conversion is None:
        return write_slice(read_gguf(model_path), out_path, layer_start, layer_end, progress)
    header = _outline(conversion, _folder(cache_dir), progress)
    return write_slice(
        header,
        out_path,
        layer_start,
        layer_end,
        progress,
        source_sha256=conversion.digest,
        data=conversion.data,
    )


def header_path(
    model_path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """What describes the whole model: ``model_path`` itself, or the header of what a checkpoint would be.

    The latter is a GGUF without data. Blocks; safe from any thread.

    Raises:
        CheckpointError, SliceWriteError: as :func:`ensure_slice`.
    """
    conversion = _conversion(model_path, recipe)
    if conversion is None:
        return Path(model_path)
    return _outline(conversion, _folder(cache_dir), progress).path


def _conversion(model_path: str | os.PathLike[str], recipe: Recipe | None) -> Conversion | None:
    """None for a GGUF file, which cannot be given another quantisation."""
    if is_checkpoint(model_path):
        return Conversion.prepare(model_path, recipe or Recipe())
    if recipe is not None and recipe != Recipe():
        raise CheckpointError(
            model_path,
            "checkpoint_quantization and checkpoint_imatrix are for SafeTensors checkpoints, and this is no "
            "folder with config.json and model.safetensors or its index",
        )
    return None


def _outline(conversion: Conversion, folder: Path, progress: Progress | None) -> GGUFHeader:
    path = folder / "checkpoints" / f"{conversion.digest}.gguf"

    def read() -> GGUFHeader | None:
        try:
            return GGUFHeader.read(path)
        except GGUFError:
            return None

    def make() -> GGUFHeader:
        with replacing(path, 0) as temporary:
            conversion.write_outline(temporary)
        return GGUFHeader.read(path)

    return kept(path, read, make, 0, progress)


def _ensure_converted(
    conversion: Conversion,
    layer_start: int,
    layer_end: int,
    folder: Path,
    progress: Progress | None,
) -> SliceInfo:
    header = _outline(conversion, folder, progress)
    check_range(header, layer_start, layer_end)
    plan = plan_slice(header, layer_start, layer_end)
    names = [tensor.source.name for tensor in plan.tensors if tensor.source is not None]
    own = _remembered(
        folder / "hashes",
        json.dumps(conversion.files(names)),
        progress,
        lambda: conversion.content_sha256(names, progress),
    )
    key = f"{conversion.digest}.{own[:16]}"
    info = _ensure(folder, key, conversion.digest, plan, progress, conversion.data)
    # The digest is the same on all stages and knows samples only; kept states belong to these very bytes.
    content = hashlib.sha256(f"{conversion.digest} {own}".encode()).hexdigest()
    return attrs.evolve(info, content_sha256=content)


def _ensure(
    folder: Path,
    key: str,
    sha256: str,
    plan: SlicePlan,
    progress: Progress | None,
    data: TensorData | None,
) -> SliceInfo:
    """The slice that ``plan`` describes, from the cache or newly written."""
    start, end = plan.layer_start, plan.layer_end
    path = folder / "slices" / f"{key}.r{RULES_VERSION}.{start}-{end}.gguf"
    return kept(
        path,
        lambda: _valid(path, sha256, start, end),
        lambda: write_slice(plan.header, path, start, end, progress, source_sha256=sha256, data=data),
        plan.disk_bytes,
        progress,
    )


def _folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    return Path(cache_dir) if cache_dir is not None else default_cache_dir()


def weights_sha256(
    info: SliceInfo, *, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> str:
    """SHA-256, in hex, of the whole model's file that ``info`` is or was cut from.

    Of a model in several files: of their digests, one after the other, 32 bytes each.

    A slice says it; a whole model is hashed once, and that is remembered. Blocks; safe from any thread.

    Raises:
        GGUFError: the model cannot be read.
        SliceWriteError: the cache cannot be written.
    """
    if info.source_sha256 is not None:
        return info.source_sha256
    return model_sha256(read_gguf(info.path), _folder(cache_dir) / "hashes", progress)


def _valid(path: Path, sha256: str, layer_start: int, layer_end: int) -> SliceInfo | None:
    """The slice in the cache, or None when it is missing or damaged."""
    try:
        header = GGUFHeader.read(path)
        info = SliceInfo.from_header(header)
    except GGUFError:
        return None
    right = is_slice(header) and info.source_sha256 == sha256
    return info if right and (info.layer_start, info.layer_end) == (layer_start, layer_end) else None


def model_sha256(header: GGUFHeader, folder: Path, progress: Progress | None) -> str:
    """As :func:`weights_sha256`, for a model's header; ``folder`` remembers digests of files."""
    digests = [file_digest(file, folder, progress) for file in header.files]
    return combined_sha256(digests)


def file_digest(stamp: FileStamp, folder: Path, progress: Progress | None) -> str:
    """A file's SHA-256, remembered for as long as path, size, modification time and inode stay."""
    real = os.path.realpath(stamp.path)
    identity = f"{real}\0{stamp.size}\0{stamp.mtime_ns}\0{stamp.inode}"

    def compute() -> str:
        sha256 = file_sha256(stamp.path, progress)
        os.close(stamp.open())  # raises if what was hashed is no longer what the header belongs to
        return sha256

    return _remembered(folder, identity, progress, compute)


def _remembered(folder: Path, identity: str, progress: Progress | None, compute: Callable[[], str]) -> str:
    """The digest of what ``identity`` names, computed once."""
    memo = folder / hashlib.sha256(os.fsencode(identity)).hexdigest()

    def make() -> str:
        sha256 = compute()
        with replacing(memo, 0) as temporary:
            temporary.write_text(sha256, "ascii")
        return sha256

    return kept(memo, lambda: _read_memo(memo), make, 0, progress)


def _read_memo(path: Path) -> str | None:
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if _SHA256.fullmatch(text) else None
