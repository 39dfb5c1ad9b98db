"""Bounded forward reading of a file that nobody vouches for."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import NoReturn, Self

import attrs

from skippy.models.errors import GGUFError

_WINDOW = 1 << 18  # bytes read at once
_LENGTH = struct.Struct("<Q")


@attrs.frozen(slots=True)
class FileStamp:
    """Which file was read, and in which state; a later read of a changed file is refused."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> FileStamp:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def open(self) -> int:
        """Open the file for reading and return its descriptor.

        Raises:
            GGUFError: it is gone, unreadable, or not the file it was.
        """
        fd = open_regular(self.path)
        if FileStamp.of(self.path, os.fstat(fd)) != self:
            os.close(fd)
            raise GGUFError(self.path, "the file changed since its header was read")
        return fd


def open_regular(path: Path) -> int:
    """Open a regular file for reading; GGUFError says why that fails."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open: opening a FIFO would block
            raise GGUFError(path, "not a regular file")
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise GGUFError(path, "no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise GGUFError(path, f"cannot be opened: {reason}") from error


class Sources:
    """Files that are read, each opened when the first byte of it is needed. Not safe from two threads.

    Leaving the block raises GGUFError for one that was changed meanwhile: what was read may be of two states.
    """

    def __init__(self) -> None:
        self._open: dict[FileStamp, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        changed = [f for f, fd in self._open.items() if FileStamp.of(f.path, os.fstat(fd)) != f]
        while self._open:
            os.close(self._open.popitem()[1])
        if changed and kind is None:
            raise GGUFError(changed[0].path, "the file changed while it was read")

    def descriptor(self, file: FileStamp) -> int:
        """For reading. Raises GGUFError when the file is gone or not what it was."""
        if file not in self._open:
            self._open[file] = file.open()
        return self._open[file]


class Cursor:
    """Reads forward through one window of the file; memory stays at the window's size."""

    __slots__ = ("_at", "_base", "_fd", "_window", "path", "size")

    def __init__(self, path: Path, fd: int, size: int, offset: int = 0) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._base = offset  # file offset of the window
        self._window = b""
        self._at = 0  # read position inside the window

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def fail(self, message: str) -> NoReturn:
        raise GGUFError(self.path, message)

    def expect(self, count: int, what: str) -> None:
        """Fail unless ``count`` more bytes exist."""
        if count > self.remaining:
            self.fail(
                f"truncated or damaged: {what} at byte {self.position} needs {count} bytes, "
                f"the file has {max(self.remaining, 0)} left"
            )

    def _refill(self, count: int, what: str) -> None:
        position = self.position
        self.expect(count, what)
        try:
            window = os.pread(self._fd, max(count, _WINDOW), position)
        except OSError as error:
            raise GGUFError(self.path, f"cannot be read at byte {position}: {error.strerror}") from error
        if len(window) < count:
            self.fail(f"truncated while being read: {what} at byte {position}")
        self._base, self._window, self._at = position, window, 0

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes; callers have limited ``count``."""
        if self._at + count > len(self._window):
            self._refill(count, what)
        start = self._at
        self._at += count
        return self._window[start : self._at]

    def skip(self, count: int, what: str) -> None:
        self.expect(count, what)
        self._at += count
        if self._at > len(self._window):
            self._base, self._window, self._at = self.position, b"", 0

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int) -> bytes:
        length = self.u64(what)
        if length > limit:
            self.fail(f"damaged: {what} claims a text of {length} bytes, the limit is {limit}")
        return self.take(length, what)

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over length-prefixed strings without keeping them."""
        unpack = _LENGTH.unpack_from
        while count:
            at, window = self._at, self._window
            try:
                while count:
                    at += 8 + unpack(window, at)[0]
                    count -= 1
            except (struct.error, OverflowError):  # the next length lies beyond this window
                pass
            self._at = 0
            self._base, self._window = self._base + at, b""
            if self._base > self.size:
                self.fail(f"truncated or damaged: a text of {what} ends at byte {self._base} of {self.size}")
            if count:
                self._refill(8, what)
