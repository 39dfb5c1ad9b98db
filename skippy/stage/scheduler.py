"""Who may use the engine: sequences are handed out here, and works reach the engine's thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import attrs
import trio

from skippy.engine import EngineError, EngineInfo, StageEngine, Vocabulary
from skippy.telemetry import NULL_TELEMETRY, Telemetry

from .errors import RequestFailed
from .groups import DecodeGroups
from .inbox import Inbox
from .iterations import Iterations
from .runtime import Runtime
from .waves import WaveQueue
from .work import Work

T = TypeVar("T")

SEQUENCE_WAIT_SECS = 30.0
"""How long a new session waits for a native sequence while all are in use."""


class Scheduler:
    """Gives sessions their native sequences, and hands their works and calls to the runtime."""

    def __init__(self, engine: StageEngine, runtime: Runtime, iterations: Iterations) -> None:
        self._engine = engine
        self._iterations = iterations
        self.info: EngineInfo = engine.info
        """What the engine is; the same for its whole life."""
        self.safe = iterations.safe
        """One sequence at a time, in order of arrival; chunks of prompts are to be of one size, too."""
        self._runtime = runtime
        self._free = set(range(engine.info.max_sequences))
        self._broken: set[int] = set()
        """Sequences of sessions that could not be emptied before they got them."""
        self._waiting = trio.lowlevel.ParkingLot()
        self._kept: set[int] = set()
        """Sequences of nobody's session, which hold what the prefix cache remembers."""
        self.evict: Callable[[], bool] = lambda: False
        """Asked to release a kept sequence when none is free; whether it has."""
        self.max_sessions = engine.info.max_sequences
        """Sessions that may have sequences at once, at most as many as there are."""
        self.on_taken: Callable[[], object] = lambda: None
        """Called when a session has got a sequence."""
        self.on_quarantine: Callable[[int], object] = lambda _: None
        """Told each sequence that could not be dropped, which nobody gets any more."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer, which other threads may use; None on a middle stage."""
        return self._engine.vocabulary

    @property
    def free_sequences(self) -> int:
        """Sequences that no session has: empty ones, and those that are kept until a session needs them."""
        return len(self._free) + len(self._kept)

    @property
    def cuts(self) -> int:
        """How often, so far, rows shared a native call with others, or did without some that belong to them.

        A session whose rows have run between two equal counts can be computed again, bit by bit.
        """
        return self._iterations.cuts

    @property
    def full(self) -> bool:
        """Whether as many sessions have sequences as may."""
        return self.info.max_sequences - self.free_sequences >= self.max_sessions

    @property
    def empty_sequences(self) -> int:
        """Sequences that hold nothing."""
        return len(self._free)

    def take_sequence(self, wanted: int | None = None) -> int | None:
        """An empty native sequence id, ``wanted`` if that is empty; else one beside sessions', else one that
        was kept.

        None where sessions have all of them. Never waits.
        """
        if self.full or (not self._free and not self.evict()):
            return None
        taken = wanted if wanted is not None and wanted in self._free else min(self._free, key=self._place)
        self._free.remove(taken)
        self.on_taken()
        return taken

    def _place(self, sequence: int) -> tuple[int, int]:
        """The less, the better: a cache that is split by sequence computes rows of neighbours together."""
        nobodys = self._free | self._kept
        sequences = range(self.info.max_sequences)
        beside = (other for other in (sequence - 1, sequence + 1) if other in sequences)
        return -sum(other not in nobodys for other in beside), sequence

    async def acquire_sequence(self, wanted: int | None = None) -> int:
        """As :meth:`take_sequence`; waits up to SEQUENCE_WAIT_SECS for one, else RequestFailed."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(SEQUENCE_WAIT_SECS):
            while (sequence := self.take_sequence(wanted)) is None:
                await self._waiting.park()
            return sequence
        raise RequestFailed(
            f"no free sequence within {SEQUENCE_WAIT_SECS:.0f} s: all {self.info.max_sequences} are in use; "
            "raise lane_count on this stage, or send fewer requests at once"
        )

    def release_sequence(self, sequence: int) -> None:
        """Forget the sequence's state and make the id free. Never waits.

        The id is free at once: whoever takes it queues its calls behind the drop, and finds out by
        :meth:`is_broken` where that has failed.
        """
        self._kept.discard(sequence)
        if sequence in self._broken:
            self._broken.remove(sequence)
            self.on_quarantine(sequence)
            return
        self._runtime.post(functools.partial(self._forget, sequence))
        self._free.add(sequence)
        self._waiting.unpark()

    def keep_sequence(self, sequence: int) -> None:
        """The sequence's session is over, and what it holds is kept, until :attr:`evict`. Never waits."""
        self.pause(sequence)
        self._kept.add(sequence)
        self._waiting.unpark()

    def evictable(self) -> None:
        """Something that is kept may be evicted now: who waits for a sequence may try again."""
        self._waiting.unpark()

    def use_kept(self, sequence: int) -> None:
        """A session has a kept sequence now, as it is."""
        self._kept.remove(sequence)
        self.on_taken()

    def _forget(self, sequence: int) -> None:
        self._iterations.leave(sequence)
        try:
            self._engine.drop(sequence)
        except EngineError:
            self._runtime.tell(functools.partial(self._quarantine, sequence))
            raise

    def _quarantine(self, sequence: int) -> None:
        """Nobody gets a sequence whose content is not known, once the session that has it is over."""
        if sequence in self._free:
            self._free.remove(sequence)
            self.on_quarantine(sequence)
        else:
            self._broken.add(sequence)

    def is_broken(self, sequence: int) -> bool:
        """Whether a session's sequence could not be emptied for it: its rows fail, and nothing is wrong with
        them."""
        return sequence in self._broken

    def pause(self, sequence: int) -> None:
        """The session of this sequence does not decode on for now: batches must not wait for it."""
        self._runtime.post(functools.partial(self._iterations.leave, sequence))

    def submit(self, work: Work) -> None:
        """Queue a work. Never waits; it runs, or fails, or ends as cancelled."""
        self._runtime.submit(work)

    async def carry_out(self, work: Work) -> None:
        """Queue a work and wait for its end; its exception is raised here. Cancelled, so is the work."""
        await trio.lowlevel.checkpoint()
        self._runtime.submit(work)
        try:
            await work.wait()
        finally:
            if not work.over:
                self.cancel(work)
        if work.error is not None:
            raise work.error

    def cancel(self, work: Work) -> None:
        """Nobody wants the rows any more. Never waits.

        Rows that have not begun never run. A batch that runs is interrupted when nobody wants any of it.
        """
        work.cancelled = True
        self._iterations.interrupt(work)

    async def run(self, call: Callable[[StageEngine], T]) -> T:
        """Run ``call(engine)`` on the runtime. Cancellation: as :meth:`Runtime.run`."""
        engine = self._engine
        return await self._runtime.run(lambda: call(engine))

    @property
    def inbox(self) -> Inbox | None:
        """Where the engine's thread waits for sockets itself, for engine calls to use; None: it cannot."""
        return self._runtime.inbox

    def add(self, work: Work) -> None:
        """:meth:`submit` in the engine's thread."""
        self._iterations.add(work)

    def tell(self, call: Callable[[], object]) -> None:
        """In the engine's thread: have ``call`` called in the event loop's."""
        self._runtime.tell(call)

    def post(self, call: Callable[[StageEngine], object]) -> None:
        """Queue ``call(engine)`` without waiting; it always runs."""
        engine = self._engine
        self._runtime.post(lambda: call(engine))


@attrs.frozen
class ChainShape:
    """The stages that a decode step passes through.

    Attributes:
        stages: at least 1.
        width: how many of them can compute at the same time, as far as is known; None: all.
    """

    stages: int = 1
    width: int | None = None


@contextlib.asynccontextmanager
async def open_scheduler(
    make_engine: Callable[[], StageEngine],
    runtime: Runtime,
    *,
    chain_of: Callable[[EngineInfo], ChainShape] = lambda _: ChainShape(),
    mixed_rows: int | None = None,
    safe: bool = False,
    telemetry: Telemetry = NULL_TELEMETRY,
) -> AsyncIterator[Scheduler]:
    """Load the engine on the runtime and close it there when the block is left.

    Args:
        chain_of: what decode steps that begin here pass through.
        mixed_rows, safe, telemetry: as :class:`Iterations` has them.

    Cancellation: a load that has begun goes on to its end; the engine it makes is closed right behind it.
    """
    loaded: list[tuple[StageEngine, Iterations]] = []

    def load() -> None:
        engine = make_engine()
        chain = chain_of(engine.info)
        grouped = chain.stages > 1 and runtime.waits
        groups = DecodeGroups(chain.stages, width=chain.width) if grouped else None
        waves = WaveQueue(groups, patient=runtime.waits)
        iterations = Iterations(engine, waves, mixed_rows=mixed_rows, safe=safe, telemetry=telemetry)
        loaded.append((engine, iterations))
        runtime.attach(iterations)

    def close() -> None:
        for engine, _ in loaded:
            engine.close()

    try:
        await runtime.run(load)
        engine, iterations = loaded[0]
        yield Scheduler(engine, runtime, iterations)
    finally:
        for engine, _ in loaded:
            engine.abort()
        runtime.post(close)
