"""One session's side of the prefix cache: what was restored into it, and what of it others may copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skippy.kv.schedule import ChunkPlan, cut_schedule

from .auditing import audit
from .errors import SettingsRefused
from .keeping import KvEntry, StageCache
from .restored import Restored
from .settings import GenerationSettings

_ALL: Final = 1 << 31
"""Above every position."""


class Holding:
    """What one session has of the cache. Event loop only, but for ``bound``; nothing waits.

    Attributes:
        namespace: the request's. What it remembers, only requests of the same one restore.
        audit: so many of the first tokens are compared with what is remembered of them, when it ends; the
            session restores nothing. 0: none.
        off: the request has nothing to do with the cache.
        chunks: restored is only what was computed alone, and in these; None: anything.
        bound: before rows that begin below it, call :meth:`begin_rows`.
        restored: what was restored and can still be undone, because no row has run behind it.
        begun: something was restored, or rows have run.
    """

    def __init__(self, cache: StageCache) -> None:
        self.cache = cache
        self.namespace = ""
        self.audit = 0
        self.off = False
        self.chunks: ChunkPlan | None = None
        self.bound = _ALL
        self.restored: Restored | None = None
        self.begun = False
        self._entry: KvEntry | None = None
        self._schedule: tuple[int, ...] = ()
        """The chunks in which what the session holds was computed; tokens behind them went one by one."""
        self._checkpoints: frozenset[int] = frozenset()
        """Lengths at which the session's state is to be kept, beside the end of its prompt."""
        self._alone = not cache.settings.shared_cells
        self._cuts = cache.cuts
        cache.holders.add(self)

    @property
    def entry(self) -> KvEntry | None:
        """The session's entry in the index, which others may copy from; None where there is none."""
        if self._entry is not None and self._entry.removed:
            self.off = self.off or self._entry.forgotten  # what is wrong, or was to go, must not come back
            self._entry = None
        return self._entry

    @property
    def _unkept(self) -> bool:
        """Whether nothing of the session is to be remembered."""
        return self.off or (self._entry is not None and self._entry.forgotten)

    def configure(self, settings: GenerationSettings, prompt_tokens: int, *, bypass: bool) -> None:
        """The request's settings have come. ``bypass``: it must not use the cache.

        Args:
            prompt_tokens: how many its prompt has; of interest with ``cache_chunks`` alone.

        Raises:
            SettingsRefused: something was restored or run before, under other settings of these.
        """
        chunks = ChunkPlan(settings.cache_chunks, prompt_tokens - 1) if settings.cache_chunks else None
        told = (settings.cache_namespace, settings.cache_audit, chunks)
        if self.begun and told != (self.namespace, self.audit, self.chunks):
            raise SettingsRefused(
                "cache_namespace, cache_audit and cache_chunks come before whatever is restored or run under "
                "them"
            )
        self.namespace, self.audit, self.chunks = told
        self.off = self.off or bypass
        self._checkpoints = frozenset(settings.cache_checkpoints)

    def longest(self, tokens: Sequence[int]) -> int:
        """As :meth:`StageCache.longest`, of what the session may restore."""
        return 0 if self.off else self.cache.longest(self.namespace, tokens, self.chunks)

    async def restore(self, tokens: Sequence[int], *, whole: bool, spare: int | None) -> Restored | None:
        """As :meth:`StageCache.restore`, of what the session may restore."""
        return await self.cache.restore(self.namespace, tokens, whole=whole, chunks=self.chunks, spare=spare)

    def forget(self) -> None:
        """Leave nothing of what was restored or run so far, whether the index knows of it or not."""
        self.off = self.off or self.begun

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
        if not self.begun or self.restored is not None:
            self._cuts = self.cache.cuts
        self.begun = True
        restored, self.restored = self.restored, None
        if restored is not None:
            self._entry, self._schedule = restored.entry, restored.schedule
            self._alone = self._alone and restored.alone
        if position < sum(self._schedule):
            self._schedule, whole = cut_schedule(self._schedule, position)
            self._alone = self._alone and whole
        entry, index = self.entry, self.cache.index
        if entry is not None and self.cache.sliceable:
            index.truncate(entry, position)
        elif entry is not None and position < entry.length:
            index.drop(entry)
        self.bound = position
        return restored is not None

    def held_rows(self, tokens: Sequence[int], start: int) -> bytes | None:
        """The boundary of the chunk of ``tokens`` at ``start``, where its rows need not be computed.

        That is where the sequence holds them, behind what the chain has settled on, and their boundary is
        remembered, which does not say in which chunks it was computed. They are the session's then.
        """
        if self.chunks is not None:
            return None
        restored, activations, end = self.restored, self.cache.activations, start + len(tokens)
        if restored is None or activations is None or start != restored.length or end > len(restored.held):
            return None
        if list(restored.held[start:end]) != list(tokens):
            return None
        rows = activations.find(self.namespace, restored.held[:end], start, len(tokens))
        if rows is None:
            return None
        self.together()  # whoever has computed them
        restored.length = end
        return b"".join(rows)

    def record_rows(self, history: Sequence[int], rows: memoryview, count: int) -> None:
        """``rows`` are the boundary of the last ``count`` tokens of ``history``."""
        if self.cache.activations is not None and not (self._unkept or self.audit):
            self.cache.activations.record(self.namespace, history, len(history) - count, rows)

    def checkpoint(self, sequence: int, history: Sequence[int], total: int) -> None:
        """The session holds ``history`` now, the first of ``total`` tokens of its prompt."""
        asked = len(history) == total or len(history) in self._checkpoints
        if asked and not (self._unkept or self.audit):
            self.cache.checkpoint(self.namespace, history, self._schedule, sequence, alone=self.alone)

    def together(self) -> None:
        """Rows of the request were computed with others', or will be: nobody can do that again bit by bit."""
        self._alone = False

    @property
    def alone(self) -> bool:
        """Whether the rows so far, computed again in the same chunks, would be the same, bit by bit."""
        if self._cuts != self.cache.cuts:
            self._alone = False
        return self._alone

    def grow(self, sequence: int, history: Sequence[int], chunk: int) -> None:
        """The last ``chunk`` tokens of ``history``, which is all that the session holds, were run at once."""
        self._count(history, chunk)
        if self.cache.sliceable:
            self._index(sequence, history)

    def _count(self, history: Sequence[int], chunk: int = 0) -> None:
        single = len(history) - chunk - sum(self._schedule)
        self._schedule += (1,) * single + ((chunk,) if chunk else ())
        self.bound = len(history)

    def _index(self, sequence: int, history: Sequence[int]) -> None:
        if self._unkept or self.audit:
            return
        index, entry, schedule = self.cache.index, self.entry, self._schedule
        if entry is not None:
            new = schedule[len(entry.schedule) :]
            index.grow(entry, history[entry.length :], chunks=new, alone=self.alone)
        elif history:
            self._entry = index.add(
                self.namespace, history, sequence=sequence, live=True, schedule=schedule, alone=self.alone
            )

    def keep(self, sequence: int, history: Sequence[int]) -> None:
        """The session has ended in good order; its sequence, which holds ``history``, is the cache's now."""
        self._count(history)
        self._index(sequence, history)
        self.keep_indexed(sequence)

    async def compare(self, sequence: int, history: Sequence[int]) -> None:
        """Audit what is remembered of the first ``audit`` tokens: it should be what the sequence has now."""
        length, self.audit = self.audit, 0
        self._count(history)
        schedule, whole = cut_schedule(self._schedule, length)
        alone = self.alone and whole
        await audit(self.cache, self.namespace, history[:length], sequence, schedule=schedule, alone=alone)

    def keep_indexed(self, sequence: int) -> None:
        """:meth:`keep` no more than what is in the index, which its sequence is certain to hold."""
        if self.entry is None:
            self.drop(sequence)
        else:
            self.cache.keep(sequence, self.entry)

    def give_back(self, sequence: int) -> None:
        """:meth:`keep_indexed`; the session begins anew."""
        self.keep_indexed(sequence)
        self._entry, self._schedule, self.bound = None, (), _ALL

    def drop(self, sequence: int) -> None:
        """The session has ended, and nobody knows what its sequence holds."""
        self.cache.drop(sequence, self.entry)
