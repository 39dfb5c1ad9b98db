"""The one sender of a link: frames leave in order, and never in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skippy.protocol import Buffer

from .framing import ACCEPT_SECS, send_frame
from .links import Link
from .queues import SendQueue

QUEUED_FRAMES = 8
"""Frames that may wait for a link's writer. How many prefill chunks may be under way is for credit to say."""


class Reservation:
    """The right to send from another thread, ahead of all that is put after it: one frame, or some in turn.

    Attributes:
        on_wanted: called in the event loop's thread when something was put, which waits for ``release``.
    """

    __slots__ = ("_link", "_queue", "_rest", "on_wanted")

    def __init__(self, link: Link, queue: SendQueue[Sequence[Buffer]]) -> None:
        self._link = link
        self._queue = queue
        self._rest: Sequence[Buffer] = ()
        self.on_wanted: Callable[[], object] | None = None

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Hand a frame to the system, from any thread. Raises LinkClosed.

        Returns whether the system took all of it; what it left waits for :meth:`release`, and nothing more
        may be sent before.
        """
        self._rest = self._link.send_nowait(buffers)
        return not self._rest

    def release(self) -> None:
        """Let the writer go on, with what the system did not take first. In the event loop's thread."""
        self._queue.release(self._rest or None)


class LinkWriter:
    """Sends whole frames on a link for one other task, which is never in the middle of a send.

    :meth:`run` is its task; it raises LinkClosed when the link ends. One writer, in order, is also every
    barrier that a lane needs: what is put behind a frame leaves behind it.

    Args:
        capacity: frames that may wait.
    """

    def __init__(self, link: Link, capacity: int = QUEUED_FRAMES) -> None:
        self._link = link
        self._queue: SendQueue[Sequence[Buffer]] = SendQueue(capacity)
        self._reservation: Reservation | None = None
        """The last one."""

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
            if self._reservation is not None and self._reservation.on_wanted is not None:
                self._reservation.on_wanted()

    def reserve(self) -> Reservation | None:
        """The right to send the next frame from another thread; None while the link is busy or cannot.

        Frames put meanwhile wait behind it. The reservation must be released.
        """
        if not (self._queue.idle and self._link.sends_from_any_thread):
            return None
        self._queue.hold()
        self._reservation = Reservation(self._link, self._queue)
        return self._reservation

    async def wait_flushed(self) -> None:
        """Wait until every frame has been handed to the system."""
        await self._queue.wait_flushed()

    async def run(self) -> None:
        """Send what could not be sent at once, until cancelled. Raises LinkClosed, also for a stuck peer."""
        while True:
            buffers = await self._queue.get()
            await send_frame(self._link, buffers, ACCEPT_SECS)
            del buffers  # a large activation must not outlive its sending
