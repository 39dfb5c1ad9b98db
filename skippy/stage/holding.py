"""One session's side of the prefix cache: what was restored into it, and what of it others may copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skippy.kv.entries import cut_schedule

from .errors import SettingsRefused
from .keeping import KvEntry, Restored, StageCache

_ALL: Final = 1 << 31
"""Above every position."""


class Holding:
    """What one session has of the cache. Event loop only, but for ``bound``; nothing waits.

    Attributes:
        namespace: the request's. What it remembers, only requests of the same one restore.
        off: the request has nothing to do with the cache.
        bound: before rows that begin below it, call :meth:`begin_rows`.
        restored: what was restored and can still be undone, because no row has run behind it.
        begun: something was restored, or rows have run.
    """

    def __init__(self, cache: StageCache) -> None:
        self.cache = cache
        self.namespace = ""
        self.off = False
        self.bound = _ALL
        self.restored: Restored | None = None
        self.begun = False
        self._entry: KvEntry | None = None
        self._schedule: tuple[int, ...] = ()
        self._alone = True

    @property
    def entry(self) -> KvEntry | None:
        """The session's entry in the index, which others may copy from; None where there is none."""
        if self._entry is not None and self._entry.removed:
            self._entry = None
        return self._entry

    def belong_to(self, namespace: str, *, bypass: bool) -> None:
        """The request's settings have come: it is of this namespace. ``bypass``: it must not use the cache.

        Raises:
            SettingsRefused: something was restored or run in another namespace before.
        """
        if self.begun and namespace != self.namespace:
            raise SettingsRefused("cache_namespace comes before whatever is restored or run in it")
        self.namespace, self.off = namespace, bypass

    def hold(self, restored: Restored) -> None:
        """A prefix was restored into the session."""
        self.restored, self.bound, self.begun = restored, _ALL, True

    def undo(self) -> None:
        """Give back what was restored, if that still can be; its sequence, too."""
        restored, self.restored = self.restored, None
        if restored is not None:
            self.cache.undo(restored)

    def begin_rows(self, position: int) -> bool:
        """Rows begin at ``position``. True: the sequence may hold more: trim it to there first."""
        self.begun = True
        restored, self.restored = self.restored, None
        if restored is not None:
            self._entry = restored.entry
            self._schedule, self._alone = restored.schedule, restored.alone
        entry, index = self.entry, self.cache.index
        if entry is None:
            self._schedule, whole = cut_schedule(self._schedule, position)
            self._alone = self._alone and whole
        elif self.cache.sliceable:
            index.truncate(entry, position)
        elif position < entry.length:
            index.drop(entry)
        self.bound = position
        return restored is not None

    def grow(self, sequence: int, history: Sequence[int], chunk: int, *, alone: bool = False) -> None:
        """The last ``chunk`` tokens of ``history``, which is all that the session holds, were run at once."""
        if self.cache.sliceable:
            self._grow(sequence, history, chunk, alone)

    def _grow(self, sequence: int, history: Sequence[int], chunk: int, alone: bool) -> None:
        if self.off:
            return
        index, entry = self.cache.index, self.entry
        known = sum(self._schedule) if entry is None else entry.length
        single = len(history) - chunk - known
        chunks = (1,) * single + ((chunk,) if chunk else ())
        if entry is not None:
            index.grow(entry, history[known:], chunks=chunks, alone=alone)
        elif history:
            self._entry = index.add(
                self.namespace,
                history,
                sequence=sequence,
                live=True,
                schedule=self._schedule + chunks,
                alone=self._alone and alone,
            )
        self.bound = len(history)

    def keep(self, sequence: int, history: Sequence[int], *, alone: bool = False) -> None:
        """The session has ended in good order; its sequence, which holds ``history``, is the cache's now."""
        self._grow(sequence, history, 0, alone)
        self.keep_indexed(sequence)

    def keep_indexed(self, sequence: int) -> None:
        """:meth:`keep` no more than what is in the index, which its sequence is certain to hold."""
        if self.entry is None:
            self.drop(sequence)
        else:
            self.cache.keep(sequence, self.entry)

    def give_back(self, sequence: int) -> None:
        """:meth:`keep_indexed`; the session begins anew."""
        self.keep_indexed(sequence)
        self._entry, self._schedule, self._alone, self.bound = None, (), True, _ALL

    def drop(self, sequence: int) -> None:
        """The session has ended, and nobody knows what its sequence holds."""
        self.cache.drop(sequence, self.entry)
