"""Read items and handle them in order, reading ahead meanwhile, without a task switch in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


async def take_turns(
    read: Callable[[], Awaitable[T | None]],
    handle: Callable[[T], Awaitable[None]],
    *,
    first: T,
    ahead: int,
    handle_now: Callable[[T], bool] = lambda _: False,
) -> None:
    """Handle ``first``, then each item that ``read`` gives, one at a time in order, until it gives None.

    The worker that has read an item handles it itself, while another one takes over reading: an item that
    arrives while nothing is handled meets no task switch, and with a slow handler up to ``ahead`` items are
    read in advance. ``read`` is never called by two workers at once, nor is ``handle``.

    ``handle_now`` handles an item if that takes no waiting, and returns whether it did; only where it did
    not, ``handle`` is called, and another worker woken.

    An exception of either cancels the other and is raised, in a group. Cancellation drops what was read.
    """
    turns: _Turns[T] = _Turns(read, handle, handle_now)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.work, first)
        for _ in range(max(1, ahead)):
            nursery.start_soon(turns.work, None)


class _Turns(Generic[T]):
    """Who reads and who handles. A change wakes only the worker that it concerns."""

    def __init__(
        self,
        read: Callable[[], Awaitable[T | None]],
        handle: Callable[[T], Awaitable[None]],
        handle_now: Callable[[T], bool],
    ) -> None:
        self._read = read
        self._handle = handle
        self._handle_now = handle_now
        self._reading = False
        self._ended = False
        self._read_so_far = 1  # the first item is number 0
        self._handled = 0
        self._to_read = trio.lowlevel.ParkingLot()
        self._to_handle = trio.lowlevel.ParkingLot()
        """Workers with an item, in the order of their numbers."""

    async def work(self, item: T | None) -> None:
        number = 0
        while True:
            if item is None:
                while self._reading:
                    await self._to_read.park()
                if self._ended:
                    return
                item = await self._next_to_wait_for()
                if item is None:
                    return
                number = self._read_so_far - 1
            if self._handled != number:
                await self._to_handle.park()
            await self._handle(item)
            item = None  # it may hold an activation
            self._handled += 1
            self._to_handle.unpark()

    async def _next_to_wait_for(self) -> T | None:
        """Read, and handle at once, up to an item that takes waiting; None at the end."""
        self._reading = True
        while (item := await self._read()) is not None:
            self._read_so_far += 1
            if self._handled != self._read_so_far - 1 or not self._handle_now(item):
                break
            self._handled += 1
        self._reading = False
        self._ended = item is None
        if item is None:
            self._to_read.unpark_all()
        else:
            self._to_read.unpark()
        return item
