"""Writing a slice: metadata and tensors copied byte for byte, zeros as holes, the file whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from skippy.models.errors import GGUFError, SliceWriteError
from skippy.models.gguf import GGUFHeader, TensorInfo
from skippy.models.info import SliceInfo
from skippy.models.plan import SlicePlan, plan_slice
from skippy.models.reading import FileStamp, open_regular

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done_bytes, total_bytes)``; stages are "hash", "wait" (for another process,
0 of 0) and "write". An exception it raises ends the work cleanly and comes out of the call;
so a worker thread may check there whether it was cancelled."""

TensorData = Callable[[TensorInfo], Iterator[bytes]]
"""Makes the bytes of a tensor, in pieces."""

_CHUNK = 8 << 20  # bytes between two progress reports
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def write_slice(
    header: GGUFHeader,
    out_path: str | os.PathLike[str],
    layer_start: int,
    layer_end: int,
    progress: Progress | None = None,
    *,
    source_sha256: str | None = None,
    data: TensorData | None = None,
) -> SliceInfo:
    """Write layers ``[layer_start, layer_end)`` of a whole model as a GGUF of its own.

    The file appears under ``out_path`` complete and synced, replacing one that was there, or not at all.
    ``source_sha256`` saves hashing the source when the caller knows it. ``data`` makes what is not in the
    files that the header names.

    Raises:
        LayerRangeError, UnsupportedArchitectureError, GGUFError: as :func:`~skippy.models.plan_slice`; also
            when the source changed or ends early while being copied.
        SliceWriteError: disk full, no permission, or ``out_path`` is the source itself.
    """
    out = Path(out_path)
    plan_slice(header, layer_start, layer_end)  # refuse before the hash takes its time
    if any(_same_file(out, file.path) for file in header.files):
        raise SliceWriteError(f"{out}: is the source model, the slice needs a file of its own")
    if source_sha256 is None:
        source_sha256 = combined_sha256([file_sha256(file.path, progress) for file in header.files])
    write_plan(plan_slice(header, layer_start, layer_end, source_sha256=source_sha256), out, progress, data)
    return SliceInfo.from_file(out)


def write_plan(
    plan: SlicePlan, out: Path, progress: Progress | None = None, data: TensorData | None = None
) -> None:
    """Write what is planned, complete and synced under ``out``, or not at all; ``data``: as for a slice.

    Raises:
        GGUFError: a source file changed or ends early.
        SliceWriteError: disk full, no permission.
    """
    temporary = out.with_name(f"{temporary_prefix(out.name)}{secrets.token_hex(4)}.tmp")
    try:
        with _Sources() as sources:
            _write_file(plan, sources, temporary, progress, data)
        os.replace(temporary, out)
        sync_folder(out.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(out, error, plan.disk_bytes) from error
        raise


def combined_sha256(digests: Sequence[str]) -> str:
    """The digest of a model's file; of one in several files, a digest of theirs, in order."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def temporary_prefix(name: str) -> str:
    """How the names of unfinished files for ``name`` begin."""
    return f".{name}."


def write_error(path: Path, error: OSError, needed: int) -> SliceWriteError:
    """The error for a failed write of ``needed`` bytes."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += f"; {needed / 2**20:.1f} MiB are needed in {path.parent}"
    hint = "SKIPPY_CACHE names another folder for slices"
    return SliceWriteError(f"{path}: cannot be written: {reason}; {hint}")


def file_sha256(path: str | os.PathLike[str], progress: Progress | None = None) -> str:
    """Hex SHA-256 of a file's content, read in chunks.

    Raises:
        GGUFError: the file cannot be read, or changed meanwhile.
    """
    path = Path(path)
    digest, buffer, done = hashlib.sha256(), bytearray(_CHUNK), 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        before = FileStamp.of(path, os.fstat(file.fileno()))
        try:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
                done += count
                if progress is not None:
                    progress("hash", done, before.size)
        except OSError as error:
            raise GGUFError(path, f"cannot be read at byte {done}: {error.strerror}") from error
        if FileStamp.of(path, os.fstat(file.fileno())) != before or done != before.size:
            raise GGUFError(path, "the file changed while it was read")
    return digest.hexdigest()


@attrs.define(slots=True)
class _Meter:
    """Counts written bytes towards the progress callback."""

    total: int
    report: Progress | None
    done: int = 0

    def add(self, count: int) -> None:
        self.done += count
        if self.report is not None:
            self.report("write", self.done, self.total)


class _Sources:
    """The files that a slice is copied from, each opened when the first byte of it is needed."""

    def __init__(self) -> None:
        self._open: dict[FileStamp, int] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def descriptor(self, file: FileStamp) -> int:
        """For reading. Raises GGUFError when the file is gone or not what it was."""
        if file not in self._open:
            self._open[file] = file.open()
        return self._open[file]


def _write_file(
    plan: SlicePlan, sources: _Sources, path: Path, progress: Progress | None, data: TensorData | None
) -> None:
    target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        meter = _Meter(plan.disk_bytes, progress)
        position = _write_all(target, plan.preamble(), 0)
        for entry in plan.metadata:
            if isinstance(entry, bytes):
                position = _write_all(target, entry, position)
            else:
                _copy(sources, plan.header.stamp, target, entry.start, position, entry.end - entry.start)
                position += entry.end - entry.start
        _write_all(target, plan.tensor_infos(), position)
        position = plan.data_offset
        meter.add(position)
        for tensor in plan.tensors:
            source = tensor.source
            if source is not None and data is not None:
                _put(data(source), target, position, tensor.nbytes, meter)
            elif source is not None:
                _copy(sources, source.file, target, source.offset, position, tensor.nbytes, meter)
            position += plan.padded(tensor.nbytes)
        os.ftruncate(target, position)  # padding and holes at the end
        os.fsync(target)
    finally:
        os.close(target)


def _write_all(target: int, data: bytes, position: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(target, view, position)
        view, position = view[count:], position + count
    return position


def _put(pieces: Iterator[bytes], target: int, position: int, count: int, meter: _Meter) -> None:
    """Write ``count`` bytes that come in pieces."""
    end = position + count
    for piece in pieces:
        position = _write_all(target, piece, position)
        meter.add(len(piece))
    assert position == end, "a tensor has as many bytes as its type and shape make"


def _copy(
    sources: _Sources,
    file: FileStamp,
    target: int,
    start: int,
    position: int,
    count: int,
    meter: _Meter | None = None,
) -> None:
    """Copy ``count`` bytes at ``start`` of ``file`` to ``position``: inside the kernel where it can."""
    source = sources.descriptor(file)
    kernel_copy = hasattr(os, "copy_file_range")
    while count:
        step = min(count, _CHUNK)
        if kernel_copy:
            try:
                moved = os.copy_file_range(source, target, step, start, position)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                kernel_copy = False
                continue
        else:
            chunk = os.pread(source, step, start)
            moved = len(chunk)
            _write_all(target, chunk, position)
        if not moved:
            raise GGUFError(file.path, f"ends at byte {start} while being copied")
        start, position, count = start + moved, position + moved, count - moved
        if meter is not None:
            meter.add(moved)


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Make a rename durable; file systems that cannot are left alone."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
