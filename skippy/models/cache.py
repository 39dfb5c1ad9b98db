"""The slice cache: slices by content of their source, written once, shared by all processes of a user.

Layout below the cache folder::

    hashes/<key of real path, size, mtime, inode>    the source's SHA-256, so that it is hashed once
    slices/<sha256>.r<rules>.<start>-<end>.gguf      a slice; beside it ``.lock``

Entries appear by rename, so they are read without a lock; locks only keep two processes from doing the
same work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import filelock
import platformdirs

from skippy.models.errors import GGUFError
from skippy.models.gguf import GGUFHeader
from skippy.models.info import SliceInfo, is_slice
from skippy.models.parts import read_gguf
from skippy.models.plan import RULES_VERSION, check_range, plan_slice
from skippy.models.reading import FileStamp
from skippy.models.slicer import (
    Progress,
    combined_sha256,
    file_sha256,
    temporary_prefix,
    write_error,
    write_slice,
)

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
) -> SliceInfo:
    """A file with layers ``[layer_start, layer_end)`` of a model, from the cache or newly written.

    The whole range, and a slice asked for exactly its own range, are the file itself: nothing is copied. A
    cached slice that does not read as what it should be is written again. Blocks while another process writes
    the same slice; safe from any thread.

    Raises:
        LayerRangeError: no such range, or another range of a slice.
        UnsupportedArchitectureError: the family cannot be cut.
        GGUFError: the model cannot be read.
        SliceWriteError: the cache cannot be written; nothing half-written is left.
    """
    header = read_gguf(model_path)
    info = SliceInfo.from_header(header)
    if (info.layer_start, info.layer_end) == (layer_start, layer_end):
        return info
    check_range(header, layer_start, layer_end)
    plan = plan_slice(header, layer_start, layer_end)  # refuse before anything is hashed
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    sha256 = model_sha256(header, folder / "hashes", progress)
    path = folder / "slices" / f"{sha256}.r{RULES_VERSION}.{layer_start}-{layer_end}.gguf"
    cached = _valid(path, sha256, layer_start, layer_end)
    if cached is not None:
        return cached
    with _locked(path, plan.disk_bytes, progress):
        cached = _valid(path, sha256, layer_start, layer_end)
        if cached is not None:
            return cached
        _remove_leftovers(path)
        return write_slice(header, path, layer_start, layer_end, progress, source_sha256=sha256)


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
    folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    return model_sha256(read_gguf(info.path), folder / "hashes", progress)


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
    memo = folder / hashlib.sha256(os.fsencode(identity)).hexdigest()
    known = _read_memo(memo)
    if known is not None:
        return known
    with _locked(memo, 64, progress):
        known = _read_memo(memo)
        if known is not None:
            return known
        sha256 = file_sha256(stamp.path, progress)
        os.close(stamp.open())  # raises if what was hashed is no longer what the header belongs to
        _remove_leftovers(memo)
        temporary = memo.with_name(f"{temporary_prefix(memo.name)}{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(sha256, "ascii")
            os.replace(temporary, memo)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(memo, error, 64) from error
        return sha256


def _read_memo(path: Path) -> str | None:
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if _SHA256.fullmatch(text) else None


@contextlib.contextmanager
def _locked(path: Path, needed: int, progress: Progress | None) -> Iterator[None]:
    """Hold the lock beside ``path``; folders are made as needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{path}.lock")
        timeout = 0
        while True:
            try:
                lock.acquire(timeout=timeout)
                break
            except filelock.Timeout:
                timeout = 1  # seconds between two reports, which may end the wait
                if progress is not None:
                    progress("wait", 0, 0)
    except OSError as error:
        raise write_error(path, error, needed) from error
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(path: Path) -> None:
    """Remove what a killed process left unfinished; the lock is held, so nobody is writing it."""
    for leftover in path.parent.glob(f"{temporary_prefix(path.name)}*.tmp"):
        leftover.unlink(missing_ok=True)
