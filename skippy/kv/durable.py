"""States on disk, which survive the process: content-addressed files below a folder of the stage's own.

Layout, all of it private to the user (mode 0700)::

    <directory>/<first 32 hex digits of the stage's identity>/
        owner.lock     held by the one process that uses this folder
        states/        one file per state, named by the digest of its head (skippy.kv.statefile)
        quarantine/    files that are not what their names say; a few are kept for whoever wonders

A file appears by rename once all of it has reached the disk, and is verified in full before its state is
given away, so that neither a crash nor a damaged disk ever shows as anything but a miss. There is no other
index: it is made from the heads of the files, which also say who can read them. Nothing is ever migrated:
folders of other identities are removed when nobody has used them for 30 days (skippy.kv.abandoned).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from skippy.config import ConfigError
from skippy.protocol import Buffer
from skippy.telemetry import RareWarnings, get_logger

from .abandoned import LOCK_NAME, remove_abandoned
from .blocks import digest_of_pieces
from .folders import PrivateFolder
from .statefile import SUFFIX, StateFileError, StateHead, name_of, path_key, read_head, read_state

RESERVE_BYTES: Final = 1024**3
"""Space that is left to others: nothing is written when less would remain on the file system."""
QUARANTINED_FILES: Final = 4
_NAME: Final = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))

_log = get_logger("skippy.kv")


@attrs.frozen(slots=True, eq=False)
class StateFile:
    """A state on disk.

    Attributes:
        name: of its file.
        path_key: digest of the namespace and the tokens; there is one file for each.
        file_bytes: what it takes of the budget.
        size: bytes of the state in it.
    """

    name: str
    path_key: bytes
    file_bytes: int
    size: int


@attrs.frozen(slots=True)
class Written:
    """What became of a state that was to be written.

    Attributes:
        file: None if it was not.
        gone: files that are no longer there: they made room, or were of the same tokens.
    """

    file: StateFile | None
    gone: tuple[StateFile, ...] = ()


@attrs.define(slots=True, kw_only=True)
class DurableStats:
    """What a :class:`DurableStore` holds and has done.

    Attributes:
        files, bytes: on disk and usable.
        hits, misses: reads. Of the misses, ``corrupt`` files were not what they should be, and ``unreadable``
            ones the system did not give; both also count what was found at the start.
        written: files that were added. Not added: ``too_large`` for the whole budget, ``no_space`` beside the
            reserve, and ``failed`` ones the system did not take.
        evicted: files that made room.
    """

    files: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    unreadable: int = 0
    written: int = 0
    too_large: int = 0
    no_space: int = 0
    failed: int = 0
    evicted: int = 0


class DurableStore:
    """The states of one stage on disk, within a budget, the least recently used out first.

    Every method but :meth:`stats` and :meth:`take_found` blocks for as long as the disk takes, so none is for
    the event loop; any thread may call them. Trouble at run time is never an exception: a state that cannot
    be read is a miss, one that cannot be written is not kept; the log says why.

    Args:
        directory: may be shared by all stages and runs of a user; made if it is missing.
        identity: 32 bytes; equal only for stages that can read each other's state.
        max_bytes: of all files of this stage.
        reserve_bytes: what must stay free on the file system.

    Raises:
        ConfigError: the folder cannot be used, is not private, or another process uses it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        identity: bytes,
        max_bytes: int,
        *,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self._identity = identity
        self._reserve = reserve_bytes
        with contextlib.ExitStack() as stack:
            self._root = PrivateFolder.open_below(Path(directory), identity.hex()[:32])
            stack.callback(self._root.close)
            stack.callback(os.close, self._root.lock(LOCK_NAME))
            self._states = PrivateFolder.open(self._root.path / "states", within=self._root)
            stack.callback(self._states.close)
            self._quarantine = PrivateFolder.open(self._root.path / "quarantine", within=self._root)
            stack.callback(self._quarantine.close)
            self._lock = threading.Lock()
            """Of the index and the descriptors; held for no transfer."""
            self._writing = threading.Lock()
            self._files: OrderedDict[str, StateFile] = OrderedDict()
            self._stats = DurableStats()
            self._closed, self._ending = False, threading.Event()
            self._warnings = RareWarnings(_log)
            try:
                self._found = self._reconcile()
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
            self._release = stack.pop_all()
        remove_abandoned(Path(directory))

    @property
    def path(self) -> Path:
        """The folder of this stage."""
        return self._root.path

    def take_found(self) -> list[tuple[StateFile, StateHead]]:
        """What an earlier process left, the least recently used first. Only the first call gets it.

        The states themselves are verified when they are read.
        """
        found, self._found = self._found, []
        return found

    def stats(self) -> DurableStats:
        """The counters now. Never blocks."""
        return attrs.evolve(self._stats)

    def read(self, file: StateFile) -> memoryview | None:
        """The state, verified; None if it is no longer there, or not as it was written.

        A file that is not what it should be goes to quarantine.
        """
        with self._lock:
            if self._closed or file.name not in self._files:
                self._stats.misses += 1
                return None
            fd = self._try_open(file)
        if fd is None:
            return None
        try:
            with open(fd, "rb", buffering=0) as stream:
                state = read_state(stream, file.name, self._identity)
                with contextlib.suppress(OSError):
                    os.utime(stream.fileno())  # the order of use survives, too
        except (OSError, StateFileError) as error:
            with self._lock:
                self._lose(file, error)
            return None
        with self._lock:
            self._stats.hits += 1
            if file.name in self._files:
                self._files.move_to_end(file.name)
        return state

    def write(
        self,
        namespace: str,
        tokens: Sequence[int],
        state: Sequence[Buffer],
        *,
        schedule: Sequence[int] = (),
        alone: bool = False,
    ) -> Written:
        """Keep a state, given in pieces, in the place of an earlier one of the same tokens.

        Raises:
            ValueError: there are no tokens or no state, or the namespace is longer than 256 bytes.
        """
        digest, size = digest_of_pieces(state)
        head = StateHead(
            identity=self._identity,
            namespace=namespace,
            tokens=array("i", tokens),
            schedule=tuple(schedule),
            alone=alone,
            state_digest=digest,
            state_bytes=size,
        )
        start = head.encode()
        file = StateFile(name_of(start), path_key(namespace, head.tokens), len(start) + size, size)
        with self._writing:
            if self._closed:
                return Written(None)
            with self._lock:
                if (same := self._files.get(file.name)) is not None:
                    self._files.move_to_end(file.name)
                    return Written(same)
            if file.file_bytes > self.max_bytes:
                self._stats.too_large += 1
                return Written(None)
            return self._replace(file, [start, *state])

    def remove(self, file: StateFile) -> None:
        """Forget a state, if it is there."""
        with self._writing, self._lock:
            if not self._closed and file.name in self._files:
                self._forget(file)

    def clear(self) -> None:
        """Forget all states, and what is in quarantine."""
        with self._writing, self._lock:
            if not self._closed:
                for file in list(self._files.values()):
                    self._forget(file)
                self._trim_quarantine(0)

    def close(self) -> None:
        """Give the folder to the next process; safe to call twice.

        A write that is under way in another thread is broken off, and waited for as long as that takes.
        """
        self._ending.set()
        with self._writing, self._lock:
            if not self._closed:
                self._closed = True
                self._release.close()

    # The methods below are called with `_lock`, or before anybody else knows this store.

    def _try_open(self, file: StateFile) -> int | None:
        try:
            return self._states.open_file(file.name)
        except OSError as error:
            self._lose(file, error)
            return None

    def _lose(self, file: StateFile, error: OSError | StateFileError) -> None:
        """A file cannot be read, or should not be."""
        self._stats.misses += 1
        if not self._closed:
            self._take_out(file)
            self._condemn(file.name, error)

    def _condemn(self, name: str, error: OSError | StateFileError) -> None:
        """A file is not to be used: it must not take room in ``states/`` that nobody counts, either."""
        if isinstance(error, OSError):
            self._stats.unreadable += 1
            told = "a kept state cannot be read"
        else:
            self._stats.corrupt += 1
            told = "a kept state is damaged and goes to quarantine"
        self._warnings.tell(told, folder=str(self.path), file=name, error=str(error))
        self._put_away(name)

    def _put_away(self, name: str) -> None:
        """Move whatever has this name to quarantine, or at least away."""
        for target in (name, f"{name}.{secrets.token_hex(4)}"):  # a folder does not take the place of a file
            with contextlib.suppress(OSError):
                self._states.move(name, self._quarantine, target)
                self._trim_quarantine(QUARANTINED_FILES)
                return
        with contextlib.suppress(OSError):
            self._states.remove(name)

    def _trim_quarantine(self, count: int) -> None:
        """Keep the ``count`` youngest of what is in quarantine, and what cannot be removed."""
        folder = self._quarantine
        with contextlib.suppress(OSError):
            names = sorted(folder.names(), key=lambda name: folder.stat(name).st_ctime_ns)
            for name in names[: max(0, len(names) - count)]:
                with contextlib.suppress(OSError):
                    folder.remove(name)

    def _put_in(self, file: StateFile) -> None:
        self._files[file.name] = file
        self._stats.files += 1
        self._stats.bytes += file.file_bytes

    def _take_out(self, file: StateFile) -> None:
        if self._files.pop(file.name, None) is not None:
            self._stats.files -= 1
            self._stats.bytes -= file.file_bytes

    def _forget(self, file: StateFile) -> None:
        self._take_out(file)
        try:
            self._states.remove(file.name)
        except FileNotFoundError:
            pass
        except OSError:  # a folder in its place, say
            self._put_away(file.name)

    def _make_room(self, needed: int) -> list[StateFile]:
        """Forget files until ``needed`` bytes fit."""
        gone = []
        while self._files and self._stats.bytes + needed > self.max_bytes:
            gone.append(next(iter(self._files.values())))
            self._forget(gone[-1])
        self._stats.evicted += len(gone)
        return gone

    def _reconcile(self) -> list[tuple[StateFile, StateHead]]:
        """Make the index of what is there."""
        found: list[tuple[int, StateFile, StateHead]] = []
        self._states.remove_unfinished()
        for name in self._states.names():
            if _NAME.fullmatch(name):
                try:
                    found.append(self._look_at(name))
                except (OSError, StateFileError) as error:
                    self._condemn(name, error)
        found.sort(key=lambda item: (item[0], item[1].name))
        for _, file, _ in found:
            self._put_in(file)
        paths = {file.path_key: file for _, file, _ in found}  # the younger of two
        for _, file, _ in found:
            if paths[file.path_key] is not file:
                self._forget(file)
        self._make_room(0)
        self._trim_quarantine(QUARANTINED_FILES)
        return [(file, head) for _, file, head in found if file.name in self._files]

    def _look_at(self, name: str) -> tuple[int, StateFile, StateHead]:
        """(time of last use, file, head) of a file; its state is not read. Raises OSError, StateFileError."""
        with open(self._states.open_file(name), "rb", buffering=0) as stream:
            head, size = read_head(stream, name, self._identity)
            used = os.fstat(stream.fileno()).st_mtime_ns
        return used, StateFile(name, path_key(head.namespace, head.tokens), size, head.state_bytes), head

    # The methods below are called with `_writing`, and take `_lock`.

    def _replace(self, file: StateFile, pieces: Sequence[Buffer]) -> Written:
        """Write a file in the place of the one with the same tokens, and of as many as room takes."""
        with self._lock:
            gone = self._make_room(file.file_bytes)
        if not self._write(file, pieces):
            return Written(None, tuple(gone))
        with self._lock:
            for other in [other for other in self._files.values() if other.path_key == file.path_key]:
                self._forget(other)
                gone.append(other)
            self._put_in(file)
        return Written(file, tuple(gone))

    def _write(self, file: StateFile, pieces: Sequence[Buffer]) -> bool:
        """Whether the file is there now, and on the disk."""
        try:
            if self._states.free_bytes() - file.file_bytes < self._reserve:
                self._stats.no_space += 1
                self._tell(f"less than the reserve of {self._reserve} bytes would be left")
                return False
            self._states.write_file(file.name, pieces, stop=self._ending.is_set)
        except OSError as error:
            if not self._ending.is_set():
                self._stats.failed += 1
                self._tell(str(error))
            return False
        self._stats.written += 1
        return True

    def _tell(self, reason: str) -> None:
        self._warnings.tell("states are not written to disk", folder=str(self.path), reason=reason)
