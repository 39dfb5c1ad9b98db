"""A lock that clients take in turn, however many of them wait, and whoever asks most."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

import trio


class TooManyWait(Exception):
    """No more may wait now; the text says how many do."""


class Turns:
    """Whoever holds it works; of those that wait, each client has one turn, then the next client one.

    Args:
        most: of all clients may wait.
        most_each: of one client may wait; of those without a name, ``most``.
    """

    def __init__(self, most: int, most_each: int) -> None:
        self._most = most
        self._most_each = most_each
        self._held = False
        # The client whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[trio.Event]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """A block that nobody else is in. Cancellation: the turn goes to the next one.

        Raises:
            TooManyWait: at once.
        """
        await self._take(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, client: str) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self._held:
            self._held = True
            return
        queue = self._waiting.get(client, deque())
        waiting = sum(map(len, self._waiting.values()))
        if waiting >= self._most:
            raise TooManyWait(f"{waiting} wait")
        if client and len(queue) >= self._most_each:
            raise TooManyWait(f"{len(queue)} of yours wait")
        mine = trio.Event()
        queue.append(mine)
        self._waiting[client] = queue
        try:
            await mine.wait()
        except trio.Cancelled:
            if mine.is_set():  # in the same moment
                self._pass_on()
                raise
            queue.remove(mine)
            if not queue:
                del self._waiting[client]
            raise

    def _pass_on(self) -> None:
        if not self._waiting:
            self._held = False
            return
        client, queue = self._waiting.popitem(last=False)
        queue.popleft().set()
        if queue:
            self._waiting[client] = queue
