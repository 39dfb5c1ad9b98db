"""Decode frames that the engine's thread receives itself, computes, and sends on.

A token crosses every stage once. Where a stage's event loop receives the frame and hands it to the engine,
each crossing takes two wake-ups, of two threads that want the same interpreter; where the engine's thread
waits for the link itself, it takes one. So once a lane decodes, the event loop lends it what that takes, and
gets it back with the first thing that is not the next decode step.
"""

from __future__ import annotations

import abc
import threading
from typing import Final, Generic, TypeVar

import attrs
import trio

from skippy.engine import StageEngine
from skippy.protocol import MessageDecoder, ReplyDecoder

from .express import Express
from .inbox import Inbox
from .links import Link
from .repeat import Repeat
from .scheduler import Scheduler

D = TypeVar("D", bound=MessageDecoder | ReplyDecoder)
T = TypeVar("T")

SILENCE_SECS: Final = 0.5
"""A relay that brings no frame for as long ends. Deadlines are kept by those who read without one."""


@attrs.frozen(slots=True, eq=False)
class Loan(Generic[D]):
    """What a relay takes.

    Attributes:
        link: received from by nobody else, until the relay is over.
        descriptor: the link's.
        decoder: of what comes; it is between two frames.
        express: the decode step that was started last, and has the right to send.
        scheduler, inbox: the engine's thread.
    """

    link: Link
    descriptor: int
    decoder: D
    express: Express
    scheduler: Scheduler
    inbox: Inbox


class Relay(abc.ABC, Generic[D, T]):
    """The receiving side of a link, on loan to the engine's thread.

    Until it is over, that thread alone touches the decoder, the lane's session and its state machine. Every
    other use of these begins with :meth:`revoke`. :mod:`skippy.stage.lending` makes it; :meth:`run` it at
    once.
    """

    def __init__(self, loan: Loan[D]) -> None:
        self._loan = loan
        self._decoder = loan.decoder
        self._express = loan.express
        """What has the right to send."""
        self._repeat: Repeat | None = None
        self._filled = 0
        """Bytes in the repeat's buffer."""
        self._lock = threading.Lock()
        self._is_over = False
        self._over = trio.Event()
        self._frames = 0
        self._frame: T | None = None
        self._error: Exception | None = None

    # -- what kind of frames it takes, in the engine's thread ------------------------------------------

    @abc.abstractmethod
    def _next_frame(self) -> T | None:
        """The decoder's next whole frame."""

    @abc.abstractmethod
    def _take(self, frame: T) -> Express | None:
        """Begin the step that a frame asks for; returns what has the right to send then.

        None for a frame that is not the next step. What the event loop must hear of calls :meth:`revoke`.
        """

    @abc.abstractmethod
    def _repeated(self, frame: T) -> Repeat | None:
        """What takes the steps that follow the one which ``frame`` has begun, where they can be repeated."""

    def _is_stuck(self) -> bool:
        """Whether what has come of a frame is for the event loop to see."""
        return False

    def _end(self) -> None:
        """In the event loop's thread: the relay is over."""

    # -- in the event loop's thread --------------------------------------------------------------------

    async def run(self) -> T | None:
        """Wait until the relay is over. Returns a frame that came and is still to be handled, if any.

        Otherwise read on; what has come of a frame is in the decoder. Cancelled, the relay is over.

        Raises:
            RemoteProtocolError, LinkClosed: as receiving does.
        """
        self._express.lend(self.revoke)
        self._loan.scheduler.post(self._begin)
        try:
            frames = -1
            while not self._is_over and frames != self._frames:
                frames = self._frames
                with trio.move_on_after(SILENCE_SECS):
                    await self._over.wait()
        finally:
            self.revoke()
            self._end_repeat()
            self._end()
        if self._error is not None:
            raise self._error
        return self._frame

    def revoke(self) -> None:
        """End the relay; when this returns, the engine's thread takes no further frame. Never waits long."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._loan.scheduler.post(
                    lambda _: self._loan.inbox.unwatch(self._loan.descriptor, self._ready)
                )
            self._over.set()
            self._express.give_back()

    # -- in the engine's thread ------------------------------------------------------------------------

    def _begin(self, _: StageEngine) -> None:
        with self._lock:
            if not self._is_over:  # after that, the descriptor may be another one's
                self._loan.inbox.watch(self._loan.descriptor, self._ready)

    def _ready(self) -> bool:
        """Something can be received. False once the relay is over."""
        with self._lock:
            if self._is_over:
                return False
            try:
                goes_on = self._receive()
            except Exception as exc:
                self._error = exc
                goes_on = False
            if not goes_on:
                self._is_over = True
                self._loan.scheduler.tell(self._over.set)
            return goes_on

    def _end_repeat(self) -> None:
        """What has come is for the decoder."""
        if self._repeat is not None:
            received, self._repeat = self._repeat.buffer[: self._filled], None
            self._filled = 0
            if received:
                self._decoder.receive_data(received)

    def _receive(self) -> bool:
        """Take what has arrived; begin the step of a whole frame. False where that is not ours to do."""
        if (repeat := self._repeat) is not None:
            count = self._loan.link.receive_nowait(repeat.buffer[self._filled :], ready=True)
            if count is None:
                return True
            if count == 0:
                return False  # the reader meets the end again
            self._filled += count
            if (begun := repeat.take(self._filled)) is None:
                return True
            if begun:
                self._frames += 1
                self._decoder.passed(self._filled)
                self._filled = 0
                return True
            self._end_repeat()
            return self._receive_any(ready=False)
        return self._receive_any(ready=True)

    def _receive_any(self, *, ready: bool) -> bool:
        """:meth:`_receive` by the decoder; ``ready`` as :meth:`Link.receive_nowait` has it."""
        while (frame := self._next_frame()) is None:
            if self._is_stuck():
                return False
            count = self._loan.link.receive_nowait(self._decoder.get_buffer(), ready=ready)
            if count is None:
                return True
            if count == 0:
                return False  # the reader meets the end again
            ready = False
            self._decoder.buffer_updated(count)
        self._frames += 1
        express = self._take(frame)
        if express is None:
            self._frame = frame
            return False
        self._express = express
        if not self._decoder.at_boundary:
            return False
        self._repeat = self._repeated(frame)
        return True
