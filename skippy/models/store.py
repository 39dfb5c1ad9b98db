"""Files that are there complete or not at all, and that one process at a time makes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import filelock

from skippy.models.errors import SliceWriteError

T = TypeVar("T")
_RANDOM = 8  # digits that make a name a new one

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done_bytes, total_bytes)``; stages are "download", "hash", "wait" (for another
process, 0 of 0), "compare" (a small model, 0 of 0) and "write". An exception it raises ends the work cleanly
and comes out of the call; so a worker thread may check there whether it was cancelled."""


@contextlib.contextmanager
def replacing(out: Path, needed: int) -> Iterator[Path]:
    """An empty file to write; when the block ends, it is ``out``, synced.

    It replaces one that was there. After an exception nothing is left of it.

    Args:
        needed: how many bytes it takes, for the error text; 0: not known.

    Raises:
        SliceWriteError: for an OSError in the block or at its end.
    """
    try:
        with unfinished(out.parent, f".{out.name}.", ".tmp", mode=0o666) as temporary:
            yield temporary
            _sync(temporary)
            os.replace(temporary, out)
            sync_folder(out.parent)
    except OSError as error:
        raise write_error(out, error, needed) from error


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


@contextlib.contextmanager
def unfinished(
    parent: Path, prefix: str, suffix: str = "", *, folder: bool = False, mode: int = 0o777
) -> Iterator[Path]:
    """A new, empty file or folder that is gone when the block ends, unless it was renamed.

    It is locked for so long, and others with such a name that nobody has locked are removed: they are what
    killed processes have left, which may be as large as a model.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left(parent, prefix, suffix, folder)
    path, lock = _new(parent, prefix, suffix, folder, mode)
    try:
        yield path
    finally:
        _remove(path, folder)
        os.close(lock)


def _new(parent: Path, prefix: str, suffix: str, folder: bool, mode: int) -> tuple[Path, int]:
    while True:
        path = parent / f"{prefix}{secrets.token_hex(_RANDOM // 2)}{suffix}"
        if folder:
            path.mkdir(mode=mode)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover: once more
            lock = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks; nothing is removed there
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_still(path, lock):
                return path, lock
            os.close(lock)


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_left(parent: Path, prefix: str, suffix: str, folder: bool) -> None:
    form = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{{_RANDOM}}}{re.escape(suffix)}")
    with contextlib.suppress(OSError):
        for name in filter(form.fullmatch, os.listdir(parent)):
            with contextlib.suppress(OSError):
                _remove_if_free(parent / name, folder)


def _remove_if_free(path: Path, folder: bool) -> None:
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    if not kind(os.lstat(path).st_mode):
        return
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path, folder)
    finally:
        os.close(lock)


def _remove(path: Path, folder: bool) -> None:
    if folder:
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


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
