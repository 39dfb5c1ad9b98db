"""Writing a slice: metadata and tensors copied byte for byte, zeros as holes, the file whole or not there."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from skippy.models.errors import GGUFError, SliceWriteError
from skippy.models.gguf import GGUFHeader, TensorInfo
from skippy.models.info import SliceInfo
from skippy.models.layout import FilePlan
from skippy.models.plan import plan_slice
from skippy.models.reading import FileStamp, Sources, open_regular
from skippy.models.store import Progress, replacing

TensorData = Callable[[TensorInfo], Iterator[bytes]]
"""Makes the bytes of a tensor, in pieces."""

_CHUNK = 8 << 20  # bytes between two progress reports; the disk begins with one while the next is copied
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
    plan = plan_slice(header, layer_start, layer_end, source_sha256=source_sha256)
    write_plan(plan, out, progress, data)
    return plan.info(out)


def write_plan(
    plan: FilePlan, out: Path, progress: Progress | None = None, data: TensorData | None = None
) -> None:
    """Write what is planned, complete and synced under ``out``, or not at all; ``data``: as for a slice.

    Raises:
        GGUFError: a source file changed or ends early.
        SliceWriteError: disk full, no permission.
    """
    with replacing(out, plan.disk_bytes) as temporary, Sources() as sources:
        _write_file(plan, sources, temporary, progress, data)


def combined_sha256(digests: Sequence[str]) -> str:
    """The digest of a model's file; of one in several files, a digest of theirs, in order."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


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


def _write_file(
    plan: FilePlan, sources: Sources, path: Path, progress: Progress | None, data: TensorData | None
) -> None:
    target = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
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
    finally:
        os.close(target)


def _write_all(target: int, data: bytes, position: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(target, view, position)
        view, position = view[count:], position + count
    return position


def _start_writing(target: int, start: int, end: int) -> None:
    """Let the disk begin with these bytes, so that the sync at the end finds little left to wait for.

    Linux does that when told they are not needed; what it is still writing stays in memory all the same.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(target, start, end - start, os.POSIX_FADV_DONTNEED)


def _put(pieces: Iterator[bytes], target: int, position: int, count: int, meter: _Meter) -> None:
    """Write ``count`` bytes that come in pieces."""
    end = position + count
    for piece in pieces:
        before, position = position, _write_all(target, piece, position)
        _start_writing(target, before, position)
        meter.add(len(piece))
    assert position == end, "a tensor has as many bytes as its type and shape make"


def _copy(
    sources: Sources,
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
        _start_writing(target, position, position + moved)
        start, position, count = start + moved, position + moved, count - moved
        if meter is not None:
            meter.add(moved)


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False
