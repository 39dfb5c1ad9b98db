"""The one sender of a link: frames leave in order, and never in part."""

from __future__ import annotations

import threading
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

    __slots__ = ("_ahead", "_link", "_rest", "_writer", "on_wanted")

    def __init__(self, writer: LinkWriter, link: Link) -> None:
        self._writer = writer
        self._link = link
        self._ahead: Sequence[Buffer] = ()
        """What the system did not take of a heartbeat."""
        self._rest: Sequence[Buffer] = ()
        self.on_wanted: Callable[[], object] | None = None

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Hand a frame to the system, from any thread. Raises LinkClosed.

        Returns whether the system took all of it; what it left waits for :meth:`release`, and nothing more
        may be sent before.
        """
        with self._writer.sending:
            self._writer.sent += 1
            if self._ahead:
                buffers, self._ahead = [*self._ahead, *buffers], ()
            self._rest = self._link.send_nowait(buffers)
        return not self._rest

    def beat(self, heartbeat: Buffer) -> bool:
        """As :meth:`LinkWriter.beat`, between two frames."""
        if not self._writer.sending.acquire(blocking=False):
            return False  # one is leaving
        try:
            if self._rest or self._ahead:
                return False
            self._ahead = self._link.send_nowait([heartbeat])
            return True
        finally:
            self._writer.sending.release()

    def release(self) -> None:
        """Let the writer go on, with what the system did not take first. In the event loop's thread."""
        self._writer.release(self._rest or self._ahead or None)


class LinkWriter:
    """Sends whole frames on a link for one other task, which is never in the middle of a send.

    :meth:`run` is its task; it raises LinkClosed when the link ends. One writer, in order, is also every
    barrier that a lane needs: what is put behind a frame leaves behind it.

    Args:
        capacity: frames that may wait.
        accept_secs: how long the peer may take to accept one.

    Attributes:
        sent: frames that were put, or sent past the queue, so far.
        sending: held while something is sent past the queue.
    """

    def __init__(
        self, link: Link, capacity: int = QUEUED_FRAMES, *, accept_secs: float = ACCEPT_SECS
    ) -> None:
        self.sent = 0
        self.accept_secs = accept_secs
        self._link = link
        self._queue: SendQueue[Sequence[Buffer]] = SendQueue(capacity)
        self.sending = threading.Lock()
        self._reservation: Reservation | None = None
        """The last one."""

    async def wait_room(self) -> None:
        """Wait until ``put`` is allowed. Cancellable; nothing happened then."""
        await self._queue.wait_room()

    @property
    def idle(self) -> bool:
        """Everything that was put has left, whole."""
        return self._queue.idle

    def put(self, buffers: Sequence[Buffer]) -> None:
        """Send a frame, in order. Never waits; the buffers must not change until they have left.

        On an idle link the system takes a small frame here and now, which saves a task switch on the path
        of every token; what it does not take is the task's. Raises LinkClosed.
        """
        self.sent += 1
        rest = self._link.send_nowait(buffers) if self._queue.idle else buffers
        if rest:
            self._queue.put(rest)
            if self._reservation is not None and self._reservation.on_wanted is not None:
                self._reservation.on_wanted()

    def beat(self, heartbeat: Buffer) -> bool:
        """Send a heartbeat, if nothing is on its way out. Never waits. Raises LinkClosed."""
        if self._queue.idle:
            if rest := self._link.send_nowait([heartbeat]):
                self._queue.put(rest)
            return True
        # The engine may be at a reserved frame for minutes.
        return self._queue.held and self._reservation is not None and self._reservation.beat(heartbeat)

    def reserve(self) -> Reservation | None:
        """The right to send the next frame from another thread; None while the link is busy or cannot.

        Frames put meanwhile wait behind it. The reservation must be released.
        """
        if not (self._queue.idle and self._link.sends_from_any_thread):
            return None
        self._queue.hold()
        self._reservation = Reservation(self, self._link)
        return self._reservation

    def release(self, rest: Sequence[Buffer] | None) -> None:
        """A reservation is over; what is left of it leaves first."""
        self._queue.release(rest)

    async def wait_flushed(self) -> None:
        """Wait until every frame has been handed to the system."""
        await self._queue.wait_flushed()

    async def run(self) -> None:
        """Send what could not be sent at once, until cancelled. Raises LinkClosed, also for a stuck peer."""
        while True:
            buffers = await self._queue.get()
            await send_frame(self._link, buffers, self.accept_secs)
            del buffers  # a large activation must not outlive its sending
