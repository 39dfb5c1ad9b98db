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
) -> None:
    """Handle ``first``, then each item that ``read`` gives, one at a time in order, until it gives None.

    The worker that has read an item handles it itself, while another one takes over reading: an item that
    arrives while nothing is handled meets no task switch, and with a slow handler up to ``ahead`` items are
    read in advance. ``read`` is never called by two workers at once, nor is ``handle``.

    An exception of either cancels the other and is raised, in a group. Cancellation drops what was read.
    """
    turns: _Turns[T] = _Turns(read, handle)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.work, first)
        for _ in range(max(1, ahead)):
            nursery.start_soon(turns.work, None)


class _Turns(Generic[T]):
    def __init__(
        self, read: Callable[[], Awaitable[T | None]], handle: Callable[[T], Awaitable[None]]
    ) -> None:
        self._read = read
        self._handle = handle
        self._reading = False
        self._ended = False
        self._numbered = 1  # the first item is number 0
        self._handled = 0
        self._changed = trio.lowlevel.ParkingLot()

    async def work(self, item: T | None) -> None:
        number = 0
        while True:
            if item is None:
                while self._reading:
                    await self._changed.park()
                if self._ended:
                    return
                self._reading = True
                item = await self._read()
                self._reading = False
                self._ended = item is None
                number = self._numbered
                self._numbered += 1
                self._changed.unpark_all()
                if item is None:
                    return
            while self._handled != number:
                await self._changed.park()
            await self._handle(item)
            item = None  # it may hold an activation
            self._handled += 1
            self._changed.unpark_all()
