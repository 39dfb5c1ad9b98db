"""One direction of a simulated link: a byte stream on virtual time, and what its faults do to it."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
import trio

from skippy.protocol import Buffer
from skippy.stage.links import LinkClosed

from .clock import Alarm, SimClock
from .faults import Conditions, Fault, FaultKind

MOST_SLICES: Final = 8
"""What is under way is cut into about so many pieces at least, but not into hundreds."""


@attrs.define(slots=True, eq=False)
class _Chunk:
    """Bytes under way: they have arrived at ``due``."""

    due: float
    data: memoryview


class Pipe:
    """Bytes from one sender to one receiver. It has no task: what is due is worked out when it is asked for.

    Args:
        name: for errors and the trace.
        dice: for jitter, slices and partial sends.
        faults: of this direction.
        clock: what is sent by an engine that computes is sent when it will be done.
        break_link: called for a fault that ends both directions; ``True``: as a reset.
        tell: told what happens, for the trace.
        struck: told of each fault that begins.

    Attributes:
        byte_by_byte: whether the receiver gets one byte at once.
    """

    def __init__(
        self,
        name: str,
        conditions: Conditions,
        dice: random.Random,
        faults: Iterable[Fault],
        *,
        clock: SimClock,
        break_link: Callable[[bool], None],
        tell: Callable[[str], None],
        struck: Callable[[FaultKind], None],
    ) -> None:
        self._name = name
        self._conditions = conditions
        self._slices = conditions.slices
        self.byte_by_byte = False
        self._dice = dice
        self._faults = list(faults)
        self._clock = clock
        self._now = clock.__call__
        self._break_link = break_link
        self._tell = tell
        self._struck = struck
        self._chunks: deque[_Chunk] = deque()
        self._held = 0
        self._last_due = -math.inf
        self._gate = -math.inf
        self._trickle = 0.0
        self._flips: tuple[int, int] = (0, 0)  # how many bytes are still to be changed, and the mask
        self._stalled = False
        self._deaf = False
        """The receiver has seen the end, and the sender does not know: what is sent is lost."""
        self._end: tuple[float, bool] | None = None  # when the end arrives, and whether it is a reset
        self._sender_error: str | None = None
        self._receiver_error: str | None = None
        self._sent_bytes = 0
        self._frame = -1
        self._frame_rest = 0
        self._frame_byte = 0
        self._readable = trio.lowlevel.ParkingLot()
        self._alarm = Alarm(clock, self._wake_receiver)
        self.watcher: Callable[[], object] = lambda: None
        """Called when :attr:`next_due` may have changed."""
        self._writable = trio.lowlevel.ParkingLot()

    # -- the sender's side -----------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """Frames that have begun so far."""
        return self._frame + 1

    @property
    def stalled(self) -> bool:
        """Whether nothing that is sent now will ever arrive."""
        return self._stalled

    @property
    def broken(self) -> bool:
        """Whether nobody takes any more of what is sent."""
        return self._sender_error is not None

    def write(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Take as much as there is room for; returns the rest. What follows a rest is that rest.

        Raises LinkClosed.
        """
        if self._sender_error is not None:
            raise LinkClosed(f"sending on {self._name} failed: {self._sender_error}")
        views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        size = sum(view.nbytes for view in views)
        if not size:
            return []
        room = self._room(size)
        if room <= 0:
            return views
        taken, rest = (b"".join(views), []) if room == size else _cut(views, room)
        if not self._frame_rest:
            self._frame += 1
            self._frame_byte = 0
            self._tell(f"{self._name} frame {self._frame}: {size} bytes")
        self._frame_rest = size - len(taken)
        self._take(memoryview(taken))
        # A fault in these bytes may have been the end: who sends hears of that with the next ones.
        return [] if self.broken else rest

    async def wait_writable(self) -> None:
        """Wait until :meth:`write` takes something or raises."""
        while self._sender_error is None and self._conditions.capacity <= self._held:
            await self._writable.park()

    def _room(self, size: int) -> int:
        if self._faults and self._lies:
            return size
        room = min(size, self._conditions.capacity - self._held)
        if room > 1 and self._conditions.partial and self._dice.random() < self._conditions.partial:
            room = self._dice.randint(1, room)
        return room

    @property
    def _lies(self) -> bool:
        """Whether the frame that begins now is one that arrives as another."""
        following = self._frame + 1
        return not self._frame_rest and any(
            fault.kind is FaultKind.LIE and fault.frame == following for fault in self._faults
        )

    def _take(self, data: memoryview) -> None:
        """Put bytes under way, up to a fault, then what the fault does, and so on."""
        while self._faults:
            fault, distance = self._next_fault(len(data))
            if fault is None:
                break
            self._faults.remove(fault)
            self._pass(data[:distance])
            data = data[distance:]
            data = self._apply(fault, data)
            if self.broken:
                return
        self._pass(data)

    def _next_fault(self, size: int) -> tuple[Fault | None, int]:
        """The first fault in the next ``size`` bytes, and how far away it is."""
        best: tuple[Fault | None, int] = (None, size + 1)
        for fault in self._faults:
            if fault.frame is None:
                distance = fault.byte - self._sent_bytes
                reached = distance < size
            elif fault.frame == self._frame:
                distance = fault.byte - self._frame_byte
                reached = distance < size or not self._frame_rest
                distance = min(distance, size)
            else:
                continue
            if reached and max(0, distance) < best[1]:
                best = fault, max(0, distance)
        return best

    def _apply(self, fault: Fault, data: memoryview) -> memoryview:
        """Do what a fault does, before ``data``; returns what comes instead."""
        self._tell(f"{self._name} {fault}")
        if fault.kind is FaultKind.LIE:
            assert fault.rewrite is not None
            self._struck(fault.kind)
            return memoryview(fault.rewrite(bytes(data)))
        self.strike(fault)
        return data

    def strike(self, fault: Fault) -> None:
        """Let a fault begin now, whatever its frame and byte; a lie needs a frame, and is refused."""
        kind = fault.kind
        if kind is FaultKind.LIE:
            raise ValueError("a lie is about a frame, so it cannot begin at a time")
        self._struck(kind)
        if kind is FaultKind.CORRUPT:
            self._flips = (fault.length, fault.mask)
        elif kind is FaultKind.STALL:
            self._last_due = max(self._last_due, self._now()) + fault.secs
            self._stalled = self._last_due == math.inf
        elif kind is FaultKind.TRICKLE:
            self._trickle = fault.secs
        elif kind is FaultKind.HALF_CLOSE:
            self.end()
            self._deaf = True
        else:
            self._break_link(kind is FaultKind.RESET)

    def _pass(self, data: memoryview) -> None:
        size = len(data)
        self._sent_bytes += size
        self._frame_byte += size
        if not size or self._deaf:
            return
        if self._flips[0]:
            count, mask = self._flips
            self._flips = (max(0, count - size), mask)
            changed = bytearray(data)
            for index in range(min(count, size)):
                changed[index] ^= mask
            data = memoryview(changed)
        self._chunks.append(_Chunk(self._arrival(size), data))
        self._held += size
        self._wake_receiver()

    def _arrival(self, size: int) -> float:
        conditions = self._conditions
        way = conditions.latency
        if conditions.jitter:
            way += self._dice.expovariate(1 / conditions.jitter)
        self._last_due = max(self._now() + way, self._last_due) + size / conditions.bandwidth
        return self._last_due

    def end(self) -> None:
        """The sender is done: what it has sent arrives, then the end of the stream."""
        if self._end is None:
            self._end = (self._arrival(0), False)
            self._wake_receiver()

    def reset(self, reason: str) -> None:
        """Both sides find this direction broken; what has not arrived yet is lost."""
        now = self._now()
        while self._chunks and self._chunks[-1].due > now:
            self._held -= len(self._chunks.pop().data)
        if self._end is None or self._end[0] > now:
            self._end = (now, True)
        self.fail_sender(reason)
        self._wake_receiver()

    def vanish(self) -> None:
        """What has not arrived yet never does, and nothing that is sent from here on."""
        now = self._now()
        for chunk in self._chunks:
            if chunk.due > now:
                chunk.due = math.inf
        if self._end is not None and self._end[0] > now:
            self._end = (math.inf, False)
        self._last_due, self._stalled = math.inf, True

    def heal(self) -> None:
        """What is slow is so no longer, and nothing is changed any more; a link that is dead stays so."""
        self._trickle, self._flips = 0.0, (0, 0)
        self._faults.clear()
        now = self._now()
        if now < self._last_due < math.inf:
            self._last_due = now
            for chunk in self._chunks:
                chunk.due = min(chunk.due, now)
            if self._end is not None:
                self._end = (min(self._end[0], now), self._end[1])
            self._wake_receiver()

    def reset_behind(self, reason: str) -> None:
        """As :meth:`reset`, behind all that has been sent."""
        self._end = (self._arrival(0), True)
        self.fail_sender(reason)
        self._wake_receiver()

    def fail_sender(self, reason: str) -> None:
        """Nobody takes what is sent any more."""
        self._sender_error = self._sender_error or reason
        self._writable.unpark_all()

    # -- the receiver's side ---------------------------------------------------------------------------

    def _wake_receiver(self) -> None:
        """Wake who waits for what is due, or later, when it is."""
        if self._readable:
            due = self.next_due
            if due <= self._clock.time:
                self._readable.unpark_all()
            else:
                self._alarm.set(due)
        self.watcher()

    @property
    def unread(self) -> bool:
        """Whether bytes have arrived that nobody has read."""
        return bool(self._chunks) and self._chunks[0].due <= self._now()

    def read_nowait(self, buffer: memoryview) -> int | None:
        """What has arrived, at most what fits; 0 at the end of the stream, None when nothing has arrived.

        Raises LinkClosed.
        """
        if self._receiver_error is not None:
            raise LinkClosed(f"receiving on {self._name} failed: {self._receiver_error}")
        now, count = self._now(), 0
        limit = buffer.nbytes
        if self.byte_by_byte:
            limit = min(limit, 1)
        elif self._slices is not None and self.unread:
            limit = min(limit, self._dice.randint(1, max(self._slices, self._held // MOST_SLICES)))
        if self._trickle:
            limit = min(limit, 1) if self._gate <= now else 0
        while self._chunks and self._chunks[0].due <= now and count < limit:
            chunk = self._chunks[0]
            size = min(len(chunk.data), limit - count)
            buffer[count : count + size] = chunk.data[:size]
            count += size
            chunk.data = chunk.data[size:]
            if not chunk.data:
                self._chunks.popleft()
        if count:
            self._held -= count
            self._gate = now + self._trickle
            if self._writable:
                self._writable.unpark_all()
            return count
        if self._chunks or self._end is None or self._end[0] > now:
            return None
        if self._end[1]:
            raise LinkClosed(f"receiving on {self._name} failed: the link was reset")
        return 0

    async def read(self, buffer: memoryview) -> int:
        """As :meth:`read_nowait`, once there is something to say."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if (count := self.read_nowait(buffer)) is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return count
        while count is None:
            self._alarm.set(self.next_due)
            await self._readable.park()
            count = self.read_nowait(buffer)
        return count

    @property
    def next_due(self) -> float:
        """When :meth:`read_nowait` will have something to say, as far as is known."""
        if self._receiver_error is not None:
            return -math.inf
        if self._chunks:
            return max(self._chunks[0].due, self._gate if self._trickle else -math.inf)
        return math.inf if self._end is None else self._end[0]

    def close_receiver(self, reason: str) -> None:
        """The receiver reads no more."""
        self._receiver_error = self._receiver_error or reason
        self._chunks.clear()
        self._held = 0
        self._wake_receiver()


def _cut(views: Sequence[memoryview], size: int) -> tuple[bytes, list[memoryview]]:
    """The first ``size`` bytes of all views, and the rest."""
    taken, rest = bytearray(), list[memoryview]()
    for view in views:
        part = min(len(view), size - len(taken))
        taken += view[:part]
        if part < len(view):
            rest.append(view[part:])
    return bytes(taken), rest
