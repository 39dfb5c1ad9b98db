"""Stores exported states beside everything else: digests and files are for no event loop, nor the engine.

Whoever wants a state stored reserves the writer's one place first, before the costly export, and goes without
if it is taken: a stage that exports faster than its disk writes drops records, and never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import trio

from skippy.telemetry import get_logger

T = TypeVar("T")

_log = get_logger("skippy.stage")


@attrs.define(slots=True, eq=False)
class _Job:
    store: Callable[[], object]
    done: Callable[[Any], object]


class WriterPlace:
    """The right to have one state stored: to be filled or given up, once. Event loop only."""

    __slots__ = ("_writer",)

    def __init__(self, writer: KvWriter) -> None:
        self._writer: KvWriter | None = writer

    def fill(self, store: Callable[[], T], done: Callable[[T | None], object]) -> None:
        """Have ``store()`` called in a worker thread, and ``done`` in the event loop's with what it returns.

        ``done(None)`` if it raises, which is logged, and if the writer ends before it was called. What it
        returns after that goes nowhere. Never waits.
        """
        self._take()._fill(_Job(store, done))

    def give_up(self) -> None:
        """There is nothing to store after all."""
        self._take()._give_up()

    def _take(self) -> KvWriter:
        writer, self._writer = self._writer, None
        assert writer is not None, "a place is used once"
        return writer


class KvWriter:
    """One state under way, and at most one waiting for it. Event loop only.

    :meth:`run` is its task.

    Args:
        in_thread: False: in the event loop itself, under a virtual clock.

    Attributes:
        stored: states that ``store`` was called for, and returned.
        dropped: reservations that were refused.
        failed: calls that raised.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self.stored = self.dropped = self.failed = 0
        self._in_thread = in_thread
        self._limiter = trio.CapacityLimiter(2)  # a state may be read while another is written
        self._reserved = False
        self._ended = False
        self._waiting: deque[_Job] = deque()
        self._posted: deque[Callable[[], object]] = deque()
        self._filled = trio.lowlevel.ParkingLot()
        self._calling = False
        self._rested = trio.lowlevel.ParkingLot()

    def reserve(self) -> WriterPlace | None:
        """The place for one state, to be used soon; None if it is taken, which is counted. Never waits."""
        if not self.free:
            self.dropped += 1
            return None
        self._reserved = True
        return WriterPlace(self)

    def post(self, call: Callable[[], object]) -> None:
        """Have a short ``call()`` made where states are stored, after those that wait. Never waits.

        What it returns goes nowhere, an exception to the log. Not called if the writer ends before.
        """
        self._posted.append(call)
        self._filled.unpark()

    @property
    def free(self) -> bool:
        """Whether :meth:`reserve` would give a place."""
        # Of two that wait, an idle writer is about to take the first.
        return not (self._ended or self._reserved or len(self._waiting) > (not self._calling))

    async def wait_free(self) -> None:
        """Wait until :meth:`reserve` gives a place, or the writer has ended."""
        while not (self.free or self._ended):
            await self._rested.park()

    async def wait_idle(self) -> None:
        """Wait until everything that was reserved and posted is done, or the writer has ended."""
        while not self._ended and (self._reserved or self._waiting or self._calling or self._posted):
            await self._rested.park()

    def _fill(self, job: _Job) -> None:
        self._reserved = False
        if self._ended:
            job.done(None)
            return
        self._waiting.append(job)
        self._filled.unpark()

    async def run(self) -> None:
        """Store what comes, until cancelled.

        Cancelled, it does not wait for the call that is under way: that goes on in its thread, and should
        find the store closed. It, and what was waiting, end as not stored.
        """
        job: _Job | None = None
        try:
            while True:
                while not (self._waiting or self._posted):
                    await self._filled.park()
                if not self._waiting:
                    await self._call(self._posted.popleft())
                    continue
                job = self._waiting.popleft()
                stored, result = await self._call(job.store)
                self.stored += stored
                self.failed += not stored
                done, job = job.done, None
                done(result)
                del done, result  # which may hold a state
        finally:
            self._ended = True
            for left in [*([] if job is None else [job]), *self._waiting]:
                left.done(None)
            self._waiting.clear()
            self._rested.unpark_all()

    def _give_up(self) -> None:
        self._reserved = False
        self._rested.unpark_all()

    async def _call(self, call: Callable[[], object]) -> tuple[bool, object]:
        """Whether it returned, and what."""
        self._calling = True
        try:
            return True, await self.run_sync(call)
        except Exception:
            _log.exception("a state could not be stored")
            return False, None
        finally:
            self._calling = False
            self._rested.unpark_all()  # they look when whoever is told of this has been

    async def run_sync(self, call: Callable[[], T]) -> T:
        """Call what may take a disk's time, and wait. Cancelled, the call goes on, and goes nowhere."""
        if self._in_thread:
            return await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)
        await trio.lowlevel.checkpoint()
        return call()
