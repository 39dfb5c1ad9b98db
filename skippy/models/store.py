"""Files that are there complete or not at all, and that one process at a time makes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import filelock

from skippy.models.errors import SliceWriteError

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done_bytes, total_bytes)``; stages are "download", "hash", "wait" (for another
process, 0 of 0), "compare" (a small model, 0 of 0) and "write". An exception it raises ends the work cleanly
and comes out of the call; so a worker thread may check there whether it was cancelled."""


@contextlib.contextmanager
def replacing(out: Path, needed: int) -> Iterator[Path]:
    """A name to write a file under; when the block ends, it is ``out``, synced.

    It replaces one that was there. After an exception nothing is left of it.

    Args:
        needed: how many bytes it takes, for the error text; 0: not known.

    Raises:
        SliceWriteError: for an OSError in the block or at its end.
    """
    temporary = temporary_name(out)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, out)
        sync_folder(out.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(out, error, needed) from error
        raise


def kept(
    path: Path, read: Callable[[], T | None], make: Callable[[], T], needed: int, progress: Progress | None
) -> T:
    """What ``read`` finds under ``path``; where it finds nothing, what ``make`` puts there.

    Two processes never make it at the same time. Blocks while another one does; safe from any thread.

    Raises:
        SliceWriteError: the folder cannot be written.
    """
    found = read()
    if found is not None:
        return found
    try:
        with _locked(path, needed, progress):
            found = read()
            if found is not None:
                return found
            # What a killed process left unfinished; the lock is held, so nobody is writing it.
            for leftover in path.parent.glob(f"{_prefix(path.name)}*.tmp"):
                leftover.unlink(missing_ok=True)
            return make()
    except SliceWriteError as error:
        raise SliceWriteError(f"{error}; SKIPPY_CACHE names another folder for slices") from error


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


def temporary_name(out: Path) -> Path:
    """A new name for what is to become ``out``."""
    return out.with_name(f"{_prefix(out.name)}{secrets.token_hex(4)}.tmp")


def _prefix(name: str) -> str:
    """How the names of unfinished files for ``name`` begin."""
    return f".{name}."


def write_error(path: Path, error: OSError, needed: int) -> SliceWriteError:
    """The error for a failed write of ``needed`` bytes (0: not known)."""
    reason = error.strerror or str(error)
    if needed and error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += f"; {needed / 2**20:.1f} MiB are needed in {path.parent}"
    return SliceWriteError(f"{path}: cannot be written: {reason}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make a rename durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        _sync(folder)
