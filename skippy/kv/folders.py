"""Folders that belong to one user and one process: private, opened once, no symbolic link followed in them.

Everything goes through the open folder's descriptor, so what others do to the path above it later cannot lead
a read or a write anywhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from skippy.config import ConfigError
from skippy.protocol import Buffer

_UNFINISHED: Final = ".tmp-"
_PART_BYTES: Final = 1024 * 1024
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC


@attrs.frozen(slots=True)
class PrivateFolder:
    """An open folder of mode 0700 that is this user's. Its methods raise OSError.

    Attributes:
        path: for messages.
    """

    path: Path
    _fd: int

    @classmethod
    def open(cls, path: Path, within: PrivateFolder | None = None) -> PrivateFolder:
        """Open ``path``, which is made if it is missing: a folder in ``within``, where that is given.

        Raises:
            ConfigError: it cannot be opened, is a symbolic link, another user's, or open to others.
        """
        name, parent = (path, None) if within is None else (path.name, within._fd)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise ConfigError(f"{path}: is a symbolic link, must be a folder itself")
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=parent)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be used as a folder: {error.strerror}") from error
        found = os.fstat(fd)
        folder = cls(path, fd)
        try:
            if found.st_uid != os.geteuid():
                raise ConfigError(f"{path}: belongs to user {found.st_uid}, not to {os.geteuid()}")
            if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                raise ConfigError(f"{path}: has mode {mode:04o}, must be 0700, open to nobody else")
        except ConfigError:
            folder.close()
            raise
        return folder

    @classmethod
    def open_below(cls, directory: Path, name: str) -> PrivateFolder:
        """The folder ``name`` of a directory that may be others' too; both are made if they are missing.

        Raises:
            ConfigError: as :meth:`open`, and if the directory is a symbolic link itself.
        """
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"{directory}: is not a folder") from error
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from error
        if directory.is_symlink():
            raise ConfigError(f"{directory}: is a symbolic link, must be a folder itself")
        return cls.open(directory / name)

    def lock(self, name: str) -> int:
        """Take the folder for this process, until the returned descriptor is closed or the process ends.

        Raises:
            ConfigError: another process has it, or it cannot be locked.
        """
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise ConfigError(f"{self.path / name}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 20).decode("ascii", "replace")
            os.close(fd)
            raise ConfigError(
                f"{self.path}: is in use by process {holder or '?'}; two processes that run the same stage "
                "cannot share it, so name another directory for one of them"
            ) from None
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{self.path / name}: cannot be locked: {error.strerror}") from error
        with contextlib.suppress(OSError):  # a full disk; the number is for messages alone
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
        return fd

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def open_file(self, name: str) -> int:
        """A descriptor to read ``name`` from; never waits for what is no file."""
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError("not a regular file")
        return fd

    def create_file(self, name: str) -> int:
        """A descriptor to write ``name`` with, which must not be there."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._fd)

    def write_file(self, name: str, pieces: Sequence[Buffer], *, stop: Callable[[], bool]) -> None:
        """Make a file that appears whole and is on the disk, or else does not appear.

        Raises:
            OSError: also if ``stop()`` says so in the middle of it.
        """
        temporary = _UNFINISHED + secrets.token_hex(8)
        try:
            with open(self.create_file(temporary), "wb") as stream:
                for part in _parts(pieces):
                    if stop():
                        raise InterruptedError("told to stop")
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
            self.move(temporary, self, name)
            self.sync()
        except BaseException:
            for left in (temporary, name):
                with contextlib.suppress(OSError):
                    self.remove(left)
            raise

    def remove_unfinished(self) -> None:
        """Remove what a process that was killed in :meth:`write_file` left. Nobody else may be in it."""
        for name in self.names():
            if name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):
                    self.remove(name)

    def move(self, name: str, target: PrivateFolder, target_name: str) -> None:
        os.rename(name, target_name, src_dir_fd=self._fd, dst_dir_fd=target._fd)

    def remove(self, name: str) -> None:
        """Remove a file, a link or an empty folder."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Make what was moved and removed last."""
        os.fsync(self._fd)

    def free_bytes(self) -> int:
        """What this user may still write on the file system."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        os.close(self._fd)


def _parts(pieces: Sequence[Buffer]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), _PART_BYTES):
            yield view[start : start + _PART_BYTES]
