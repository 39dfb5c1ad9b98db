"""The one sender of a link: frames leave in order, and never in part."""

from __future__ import annotations

from collections.abc import Sequence

from skippy.protocol import Buffer

from .links import Link
from .queues import SendQueue


class LinkWriter:
    """Sends whole frames on a link for one other task, which is never in the middle of a send.

    :meth:`run` is its task; it raises LinkClosed when the link ends.

    Args:
        capacity: frames that may wait.
    """

    def __init__(self, link: Link, capacity: int) -> None:
        self._link = link
        self._queue: SendQueue[Sequence[Buffer]] = SendQueue(capacity)

    async def wait_room(self) -> None:
        """Wait until ``put`` is allowed. Cancellable; nothing happened then."""
        await self._queue.wait_room()

    def put(self, buffers: Sequence[Buffer]) -> None:
        """Send a frame, in order. Never waits; the buffers must not change until they have left.

        On an idle link the system takes a small frame here and now, which saves a task switch on the path
        of every token; what it does not take is the task's. Raises LinkClosed.
        """
        rest = self._link.send_nowait(buffers) if self._queue.idle else buffers
        if rest:
            self._queue.put(rest)

    async def wait_flushed(self) -> None:
        """Wait until every frame has been handed to the system."""
        await self._queue.wait_flushed()

    async def run(self) -> None:
        """Send what could not be sent at once, until cancelled."""
        while True:
            buffers = await self._queue.get()
            await self._link.send(buffers)
            del buffers  # a large activation must not outlive its sending
