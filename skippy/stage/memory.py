"""How much memory received frames may hold, over all connections of a stage."""

from __future__ import annotations

from collections import deque

import attrs
import trio

from .framing import allocate

MAX_RECEIVED_BYTES = 1024 * 1024 * 1024
"""Activation bytes of frames that are not executed yet, over all connections of one stage. Who has announced
more waits: it is not read from. One frame is always let through."""

SMALL_BYTES = 256 * 1024
"""An activation of one token, for any model: not worth counting."""


class FrameBudget:
    """Bytes shared out among connections, in order of arrival."""

    def __init__(self, limit: int = MAX_RECEIVED_BYTES) -> None:
        self._limit = limit
        self._waiting: deque[object] = deque()
        self._changed = trio.lowlevel.ParkingLot()
        self.used = 0

    async def take(self, size: int) -> None:
        """Wait for ``size`` bytes. Cancelled while waiting, nothing was taken."""
        if self.take_now(size):
            return
        self._waiting.append(ticket := object())
        try:
            while not (self._waiting[0] is ticket and self._fits(size)):
                await self._changed.park()
            self.used += size
        finally:
            self._waiting.remove(ticket)
            self._changed.unpark_all()  # whoever is first now

    def take_now(self, size: int) -> bool:
        """Take ``size`` bytes if nobody has to be waited for."""
        if self._waiting or not self._fits(size):
            return False
        self.used += size
        return True

    def _fits(self, size: int) -> bool:
        return self.used == 0 or self.used + size <= self._limit

    def give_back(self, size: int) -> None:
        self.used -= size
        if self._changed:
            self._changed.unpark_all()


@attrs.define(slots=True)
class FrameMemory:
    """One connection's part of the budget.

    The memory of an announced activation exists at once, but none of it is touched, and so none is used,
    before :meth:`wait` has returned and bytes arrive.
    """

    budget: FrameBudget
    waiting: bool = False
    """There is no memory for what was announced, so its sender is not read from."""
    _announced: int = 0
    _held: int = 0

    def allocate(self, size: int) -> memoryview:
        """For the decoder: room for an activation that has been announced."""
        self._announced += size
        return allocate(size)

    def cover(self) -> bool:
        """Do what :meth:`wait` does, if that takes no waiting; False if it does."""
        if self._announced and not self.budget.take_now(self._announced):
            return False
        self._held += self._announced
        self._announced = 0
        return True

    def is_small(self) -> bool:
        """Whether what is announced needs no waiting for room, whatever others hold: a decode step's row."""
        return self._announced <= SMALL_BYTES

    def forget(self) -> None:
        """What was announced is small, and not counted."""
        self._announced = 0

    async def wait(self) -> None:
        """Wait until the budget covers all that was announced. Call before receiving more."""
        if self._announced:
            size = self._announced
            self.waiting = True
            try:
                await self.budget.take(size)
            finally:
                self.waiting = False
            self._held += size
            self._announced -= size

    def release(self, size: int) -> None:
        """A frame with an activation of ``size`` bytes is done with."""
        size = min(size, self._held)
        self._held -= size
        self.budget.give_back(size)

    def close(self) -> None:
        """The connection is over, and all its frames with it."""
        self.release(self._held)
