"""Exported states of one stage: what of its prefix cache outlives its native sequence.

They are files where a directory is configured, with the system's page cache in front of them, else blocks in
memory. An entry's state is exported when its sequence is about to be given to somebody else, and with a
directory also when it is kept, so that it outlives the process. The engine's thread only makes the copy; the
rest is the writer's (:mod:`skippy.stage.kv_writer`), and what comes while that is busy is not stored.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence

import attrs

from skippy.engine import EngineError, StageEngine
from skippy.kv.blocks import BlockStore, StateRef
from skippy.kv.cache import PrefixCache
from skippy.kv.durable import DurableStore, StateFile, Written
from skippy.kv.entries import Entry, Part
from skippy.telemetry import RareWarnings, get_logger

from .kv_writer import KvWriter, WriterPlace
from .scheduler import Scheduler

State = StateRef | StateFile
KvEntry = Entry[State]
Index = PrefixCache[State]

log = get_logger("skippy.stage")


class StateLost(Exception):
    """A state that was to be imported is no longer there, or not as it was stored."""


@attrs.define(slots=True, eq=False)
class _Path:
    """What is exported. ``entry`` was that when the export began; it may be gone by the time that ends.

    Nothing comes of it if it is ``forgotten`` by then.
    """

    entry: KvEntry | None
    namespace: str
    tokens: array[int]
    schedule: tuple[int, ...]
    alone: bool
    forgotten: bool = False


class StateTier:
    """Event loop only; nothing here waits but :meth:`load`.

    Args:
        durable: where states are kept; None: in memory.
        shrink: told when the index has got an entry more, which may be one too many.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        index: Index,
        writer: KvWriter,
        durable: DurableStore | None = None,
        *,
        shrink: Callable[[], object] = lambda: None,
    ) -> None:
        self.durable = durable
        self.blocks = BlockStore(index.settings.max_bytes)
        self.writer = writer
        self._scheduler = scheduler
        self._index = index
        self._shrink = shrink
        self._warnings = RareWarnings(log)
        self._under_way: list[_Path] = []
        """Exports that have begun, and have not come to anything."""

    def adopt(self) -> None:
        """Take what an earlier process left on disk into the index."""
        assert self.durable is not None
        for file, head in self.durable.take_found():
            if len(head.tokens) <= self._scheduler.info.context_length:
                self._add(head.namespace, head.tokens, file, head.schedule, head.alone)
            else:
                self.drop(file)

    # -- storing ---------------------------------------------------------------------------------------

    def kept(self, entry: KvEntry) -> None:
        """An entry's sequence is kept from now on: store it, too, if it is to outlive the process."""
        if self.durable is not None:
            self.export(entry)

    def export(self, entry: KvEntry) -> None:
        """Begin to store what an idle entry's sequence holds, if it can be and has not been.

        Whatever is posted to the engine behind this, a drop of the sequence say, finds it exported.
        """
        if entry.sequence is None or entry.state is not None:
            return
        if self._index.cost(entry) < self._index.settings.min_tokens:
            return  # others have nearly all of it
        path = _Path(entry, entry.namespace, entry.tokens[:], entry.schedule, entry.alone)
        self._export(path, entry.sequence)

    def checkpoint(
        self,
        namespace: str,
        tokens: Sequence[int],
        schedule: tuple[int, ...],
        sequence: int,
        *,
        alone: bool,
    ) -> None:
        """Begin to store what a session's sequence holds now: ``tokens``, and nothing behind them."""
        self._export(_Path(None, namespace, array("i", tokens), schedule, alone), sequence)

    def _export(self, path: _Path, sequence: int) -> None:
        info, limit = self._scheduler.info, self._limit()
        if not info.can_export:
            return
        if self._index.sliceable and not info.can_trim_state:
            return  # windowed layers: the index would take it for any prefix of it
        if limit is not None and len(path.tokens) * info.position_bytes > limit:
            return
        place = self.writer.reserve()
        if place is not None:
            self._under_way.append(path)
            self._scheduler.post(functools.partial(self._run, sequence=sequence, path=path, place=place))

    def _limit(self) -> int | None:
        return self.durable.max_bytes if self.durable is not None else self.blocks.max_bytes or None

    def _run(self, engine: StageEngine, sequence: int, path: _Path, place: WriterPlace) -> None:
        """In the engine's thread. The sequence may hold more than the path, which not all can leave out."""
        state = None
        try:
            if self._index.sliceable or engine.length(sequence) == len(path.tokens):
                state = engine.export_state(sequence, len(path.tokens))
        except EngineError as error:
            self._warnings.tell("a remembered prefix could not be exported", error=str(error))
        self._scheduler.tell(functools.partial(self._store, path, place, state))

    def _store(self, path: _Path, place: WriterPlace, state: memoryview | None) -> None:
        namespace, durable = path.namespace, self.durable
        if state is None or path.forgotten:
            self._under_way.remove(path)
            place.give_up()
        elif durable is not None:
            write = functools.partial(
                durable.write, namespace, path.tokens, [state], schedule=path.schedule, alone=path.alone
            )
            place.fill(write, functools.partial(self._written, path))
        elif self._make_room(len(state)):
            place.fill(functools.partial(self.blocks.put, state), functools.partial(self._stored, path))
        else:
            self._under_way.remove(path)
            place.give_up()

    async def write_out(self) -> None:
        """Store what is kept and is not on disk yet, the last used first, and what is under way.

        Nothing without a directory. Cancelled, what has not reached the disk does not appear there.
        """
        if self.durable is None:
            return
        for entry in reversed(self._index.entries()):
            await self.writer.wait_free()
            if not (entry.removed or entry.live):
                self.export(entry)
        await self.writer.wait_idle()

    def forget(self, unwanted: Callable[[str, array[int]], bool]) -> None:
        """Let nothing come of exports under way whose namespace and tokens are ``unwanted``. Never waits."""
        for path in self._under_way:
            path.forgotten = path.forgotten or unwanted(path.namespace, path.tokens)

    def _make_room(self, size: int) -> bool:
        """Evict states until one of ``size`` bytes fits into memory; False where it never will."""
        blocks = self.blocks
        if not blocks.max_bytes:
            return True
        if size > blocks.max_bytes:
            return False
        while blocks.used_bytes + size > blocks.max_bytes:
            victim = self._index.victim(resident=False)
            if victim is None or victim.state is None:
                return False
            state = victim.state
            self._index.evict(victim, Part.STATE)
            self.drop(state)
        return True

    def _written(self, path: _Path, written: Written | None) -> None:
        gone = set() if written is None else {file.name for file in written.gone}
        for entry in self._index.entries() if gone else ():
            if isinstance(entry.state, StateFile) and entry.state.name in gone:
                self._index.drop(entry, Part.STATE)
        self._stored(path, None if written is None else written.file)

    def _stored(self, path: _Path, state: State | None) -> None:
        self._under_way.remove(path)
        if state is None:
            return
        entry = path.entry
        if path.forgotten:
            self._drop_unused(path.namespace, state)
        elif (
            entry is not None
            and not (entry.removed or entry.live)
            and entry.state is None
            and entry.tokens == path.tokens
        ):
            self._index.set_state(entry, state)
        else:
            self._add(path.namespace, path.tokens, state, path.schedule, path.alone)

    def _add(
        self, namespace: str, tokens: array[int], state: State, schedule: tuple[int, ...], alone: bool
    ) -> None:
        added = self._index.add(namespace, tokens, state=state, schedule=schedule, alone=alone)
        if added is not None:
            self._shrink()
        else:
            self._drop_unused(namespace, state)

    def _drop_unused(self, namespace: str, state: State) -> None:
        if not any(entry.state is state for entry in self._index.entries(namespace)):
            self.drop(state)

    # -- using -----------------------------------------------------------------------------------------

    async def load(self, state: State, sequence: int) -> None:
        """Import a state into an empty sequence.

        Raises:
            StateLost: there is none (any more).
            EngineError: the engine does not take it; the sequence is empty.
        """
        if isinstance(state, StateFile):
            assert self.durable is not None
            data = await self.writer.run_sync(functools.partial(self.durable.read, state))
            if data is None:
                raise StateLost(f"the file of a state of {state.size} bytes is gone or damaged")
            pieces: list[bytes | memoryview] = [data]
        else:
            pieces = [*self.blocks.get(state)]
        await self._scheduler.run(lambda engine: engine.import_state(sequence, pieces))

    def drop(self, state: State) -> None:
        """A state is wanted no more: it is in no entry."""
        if isinstance(state, StateRef):
            self.blocks.drop(state)
        elif self.durable is not None:
            self.writer.post(functools.partial(self.durable.remove, state))
