"""What one stage remembers of the prompts that it has computed: its prefix cache, and the sequences in it.

A sequence whose request ended in good order is kept with what it holds, until a session needs a sequence and
none is empty. The index (:mod:`skippy.kv.cache`) says what is where; here its words are made true in the
engine. Bookkeeping is done at once, on the event loop, and the native call behind it is posted in the same
step: calls run in that order, and before rows that were submitted later.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

from skippy.engine import EngineError
from skippy.kv.activations import ActivationCache
from skippy.kv.entries import Match, Part
from skippy.kv.schedule import ChunkPlan
from skippy.telemetry import RareWarnings, get_logger

from .restored import Copy, Restored, RestoreFailed
from .scheduler import Scheduler
from .settings import MAX_CHECKPOINTS, drops
from .states import Index as Index, KvEntry as KvEntry, State, StateLost, StateTier

log = get_logger("skippy.stage")


class Holder(Protocol):
    """A session's side of the cache."""

    namespace: str

    def forget(self) -> None:
        """Leave nothing of what was restored or run so far. Never waits."""


class StageCache:
    """One stage's prefix cache. Event loop only.

    Args:
        index: the index; empty.

    Attributes:
        states: what has become of sequences that had to go; None: nothing.
        activations: boundary rows of prefills; None on a last stage, and where none are kept.
        holders: the sessions that there are, so that what they have and the index has not can be forgotten.
        cells: positions of the pool that all sequences share; None: each has room of its own.
        warnings: those that every request may give cause for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        index: Index,
        activations: ActivationCache | None = None,
        *,
        cells: int | None = None,
    ) -> None:
        self.activations = activations
        self._cells = cells
        self.warnings = RareWarnings(log)
        self.states: StateTier | None = None
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.scheduler = scheduler
        self.index = index
        self.settings = index.settings
        scheduler.evict = self._evict
        scheduler.on_taken = self._leave_cells
        if cells is not None:
            scheduler.max_sessions = cells // scheduler.info.context_length
        scheduler.on_quarantine = index.quarantine

    @property
    def cuts(self) -> int:
        """As :attr:`Scheduler.cuts`."""
        return self.scheduler.cuts

    @property
    def sliceable(self) -> bool:
        """Whether any prefix of what is remembered can be restored."""
        return self.index.sliceable

    # -- restoring -------------------------------------------------------------------------------------

    def longest(self, namespace: str, tokens: Sequence[int], chunks: ChunkPlan | None = None) -> int:
        """How many of the first ``tokens`` could be restored now; 0 if that is too few. Touches nothing.

        ``chunks``: as :meth:`PrefixCache.match` has it.
        """
        match = self._match(namespace, tokens, chunks)
        return 0 if match is None else match.length

    def missed(self) -> None:
        """Count a prompt of which :meth:`longest` found nothing, so that no stage is asked."""
        self.index.counters.misses += 1

    async def restore(
        self,
        namespace: str,
        tokens: Sequence[int],
        *,
        whole: bool,
        chunks: ChunkPlan | None = None,
        spare: int | None = None,
    ) -> Restored | None:
        """The longest prefix of ``tokens`` that is remembered, in a sequence for a session; None for a miss.

        The sequence is the caller's, to :meth:`undo`, or to :meth:`complete` and run rows in. ``whole``: all
        of the tokens, or nothing. ``chunks``: as :meth:`PrefixCache.match` has it. ``spare``: an empty
        sequence of the caller's, which stays that after a miss alone. Without one, waits for an empty
        sequence where one is needed and sessions have all.

        Raises:
            RestoreFailed: it was found, and could not be imported.
            RequestFailed: no sequence within the time for it.
        """
        sequence, own = spare, int(spare is not None)
        try:
            while True:
                match = self._match(namespace, tokens, chunks)
                if match is None or (whole and match.length < len(tokens)):
                    self.index.counters.misses += 1
                    sequence = None if own else sequence
                    return None
                if self.index.takes(match, free_sequences=self.scheduler.empty_sequences + own):
                    if sequence is None and self.scheduler.full:
                        sequence = await self.scheduler.acquire_sequence()  # in its place comes the entry's
                        continue
                    return self._take(match)
                with Reference(self, match.entry):
                    sequence = self.scheduler.take_sequence() if sequence is None else sequence
                    if sequence is not None:
                        target, sequence = sequence, None
                        return await self._copy(match, target)
                sequence = await self.scheduler.acquire_sequence()
        finally:
            if sequence is not None:
                self.scheduler.release_sequence(sequence)

    def _match(self, namespace: str, tokens: Sequence[int], chunks: ChunkPlan | None) -> Match[State] | None:
        return self.index.match(namespace, tokens, chunks) if self.settings.lookup else None

    def _take(self, match: Match[State]) -> Restored:
        sequence = match.entry.sequence
        assert sequence is not None
        restored = Restored.of(match, sequence, self.index.take(match.entry))
        self.scheduler.use_kept(sequence)
        self.index.counters.takes += 1
        self._count_hit(match.length)
        return restored

    async def _copy(self, match: Match[State], target: int) -> Restored:
        """Begin to copy the entry's sequence, or import its state, into an empty sequence."""
        entry = match.entry
        restored = Restored.of(match, target)
        if entry.sequence is not None:
            restored.copy = Copy(entry.sequence, target, match.length)
            self.scheduler.post(restored.copy)
            return restored
        try:
            await self.import_state(entry, target)
            if entry.forgotten:  # or the session would leave it there once more
                raise StateLost("it was forgotten while it was imported")
        except BaseException as exc:
            self.scheduler.release_sequence(target)
            if not isinstance(exc, (EngineError, ValueError, StateLost)):
                raise
            raise self._failed(match.length, exc) from exc
        self.index.counters.imports += 1
        self._count_hit(match.length)
        return restored

    async def complete(self, restored: Restored) -> None:
        """Wait until what was restored is there; once for each.

        Raises:
            RestoreFailed: it could not be copied; it is still to be undone.
        """
        copy, restored.copy = restored.copy, None
        if copy is None:
            return
        await self.scheduler.run(lambda _: None)  # calls run in order
        if copy.error is not None:
            raise self._failed(copy.length, copy.error) from copy.error
        self.index.counters.copies += 1
        self._count_hit(copy.length)

    def _failed(self, length: int, exc: BaseException) -> RestoreFailed:
        self.index.counters.errors += 1
        self.warnings.tell("a remembered prefix could not be restored", tokens=length, error=str(exc))
        return RestoreFailed(str(exc))

    async def import_state(self, entry: KvEntry, target: int) -> None:
        """Put an entry's state into an empty sequence. One that cannot be imported once never can: it goes.

        Raises:
            EngineError, StateLost: so it was; the sequence is empty.
        """
        state = entry.state
        assert state is not None
        assert self.states is not None
        try:
            await self.states.load(state, target)
        except (EngineError, StateLost):
            if entry.state is state:
                self.index.drop(entry, Part.STATE)
                self.states.drop(state)
            raise

    def _count_hit(self, length: int) -> None:
        self.index.counters.hits += 1
        self.index.counters.hit_tokens += length

    def undo(self, restored: Restored) -> None:
        """Nobody runs rows behind it. Never waits."""
        if restored.entry is None or restored.entry.removed:
            self.scheduler.release_sequence(restored.sequence)
        else:
            self.keep(restored.sequence, restored.entry)

    # -- recording -------------------------------------------------------------------------------------

    def keep(self, sequence: int, entry: KvEntry) -> None:
        """A session has ended and leaves its sequence, which holds at least the path of its live ``entry``.

        Never waits.
        """
        if self.settings.payload == "full-state":
            if self.states is not None and entry.length >= self.settings.min_tokens:
                space, path, chunks, alone = entry.namespace, entry.tokens, entry.schedule, entry.alone
                self.states.checkpoint(space, path, chunks, sequence, alone=alone)
            self.drop(sequence, entry)
            return
        if not self.index.keep(entry):
            self.scheduler.release_sequence(sequence)
            return
        self.scheduler.keep_sequence(sequence)
        if self.states is not None:
            self.states.kept(entry)
        self.shrink()

    def plan_checkpoints(
        self, namespace: str, tokens: Sequence[int], held: int, chunks: ChunkPlan | None = None
    ) -> tuple[int, ...]:
        """Behind which of ``tokens`` a prefill should stop for :meth:`checkpoint`, beside its end, ascending.

        Only where nothing shorter than the whole of a state can be restored. First where the prompt parts
        from what others had, which a third one may share; then the last multiples of the grid: a template
        may put something else behind the same messages. ``held``, which this stage can restore, is among
        them: others may not have it (any more). With ``chunks``, of which ``held`` ends one, only
        where one of them ends.
        """
        settings = self.settings
        if self.sliceable or self.states is None:
            return ()
        limit = MAX_CHECKPOINTS if settings.record_limit == 0 else settings.record_limit - 1
        parts = self.index.common(namespace, tokens)
        grid: Sequence[int] = range((len(tokens) - 1) // settings.grid * settings.grid, 0, -settings.grid)
        if chunks is not None:
            grid = [*chunks.ends(len(tokens) - 1)][::-1]
            parts = next((end for end in grid if end <= parts), 0)
        least = max(held + 1, settings.min_tokens)
        wanted = (length for length in dict.fromkeys((parts, *grid)) if least <= length < len(tokens))
        lengths = {*itertools.islice(wanted, min(limit, MAX_CHECKPOINTS - 1))}
        return tuple(sorted(lengths | ({held} if held else set())))

    def checkpoint(
        self,
        namespace: str,
        tokens: Sequence[int],
        schedule: tuple[int, ...],
        sequence: int,
        *,
        alone: bool,
    ) -> None:
        """A sequence holds ``tokens``, and nothing behind them: keep its state, unless that is there.

        Only where nothing shorter than the whole of a state can be restored. Never waits.
        """
        length = len(tokens)
        if self.sliceable or self.states is None or length < self.settings.min_tokens:
            return
        match = self.index.match(namespace, tokens)
        if match is None or match.length < length or match.entry.state is None:
            self.states.checkpoint(namespace, tokens, schedule, sequence, alone=alone)

    def shrink(self) -> None:
        """Evict until the index is within its limits. Never waits."""
        while (excess := self.index.excess()) is not None:
            self._lose(*excess)

    def drop(self, sequence: int, entry: KvEntry | None) -> None:
        """A session has ended, and what its sequence holds is not to be used. Never waits."""
        if entry is not None:
            self.index.drop(entry)
        self.scheduler.release_sequence(sequence)

    # -- evicting --------------------------------------------------------------------------------------

    def _evict(self) -> bool:
        """Release a kept sequence; whether there was one."""
        entry = self.index.victim(resident=True)
        if entry is None:
            return False
        self._lose(entry, Part.RESIDENT)
        return True

    def forget(self, entry: KvEntry) -> None:
        """Remember an entry no more: it is wrong, or somebody asked for it. Never waits.

        The session of a live one goes on, but leaves nothing; nor does an export that is under way.
        """
        entry.forgotten = True
        if self.states is not None:
            whole = entry.tokens
            self.states.forget(
                lambda namespace, path: namespace == entry.namespace and path == whole[: len(path)]
            )
        sequence, state = None if entry.live else entry.sequence, entry.state
        if self.activations is not None:
            self.activations.forget(entry.namespace, entry.tokens)
        self.index.drop(entry)
        self._drop_state(state)
        if sequence is not None:
            self.scheduler.release_sequence(sequence)

    def forget_all(self, which: str) -> None:
        """Forget what some namespaces have: see :attr:`GenerationSettings.cache_drop`. Never waits."""
        for entry in self.index.entries():
            if drops(which, entry.namespace):
                self.forget(entry)
        for holder in self.holders:
            if drops(which, holder.namespace):
                holder.forget()
        if self.states is not None:
            self.states.forget(lambda namespace, _: drops(which, namespace))
        if self.activations is not None:
            self.activations.clear()

    def _leave_cells(self) -> None:
        """A session has got a sequence: leave it the cells that it may come to need.

        A session may grow to the length of the context, and finds out in the engine's thread, in a batch. So
        what is kept never takes more than all sessions together leave.
        """
        if self._cells is None:
            return
        info = self.scheduler.info
        sessions = info.max_sequences - self.scheduler.free_sequences
        left = self._cells - sessions * info.context_length
        while self.index.stats().resident_tokens > max(0, left):
            if not self._evict():
                return

    def _lose(self, entry: KvEntry, part: Part) -> None:
        sequence, state = entry.sequence, entry.state
        if part is Part.RESIDENT and self.states is not None:
            self.states.export(entry)
        self.index.evict(entry, part)
        if part is not Part.RESIDENT:
            self._drop_state(state)
        if sequence is not None and part is not Part.STATE:
            self.scheduler.release_sequence(sequence)

    def _drop_state(self, state: State | None) -> None:
        if state is not None and self.states is not None:
            self.states.drop(state)


class Reference:
    """Keeps an entry from being evicted or taken, while something waits."""

    def __init__(self, cache: StageCache, entry: KvEntry) -> None:
        self._cache = cache
        self._entry = entry

    def __enter__(self) -> None:
        self._cache.index.acquire(self._entry)

    def __exit__(self, *_: object) -> None:
        self._cache.index.release(self._entry)
        self._cache.scheduler.evictable()
