"""A network worse than the real one, over any link: delay, bandwidth, jitter and stalls. A test aid."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence

import attrs
import trio

from skippy.config import Endpoint, WireConditions
from skippy.protocol import Buffer

from .base import Link, LinkClosed, Listener, Transport

_MAX_SECS = 3600.0
"""Cap on each part of a frame's delay; a time too large for a number takes the cap too."""
MAX_HELD_BYTES = 16 * 1024 * 1024
"""What may be on its way on one link; who sends more waits, as with a real network. One frame always fits."""
PIECE_SECS = 1.0
"""A frame that the wire takes longer for arrives bit by bit, as it does on a real one."""


@attrs.define(slots=True)
class FrameTimes:
    """When the frames of one link arrive.

    A frame's way takes a propagation delay from the moment it is handed over, so those of frames behind each
    other overlap; the wire itself takes one frame after the other, for ``bytes / (mbps * 125000)`` seconds
    each, and stalls before it where the dice say so. Frames never overtake each other. The dice depend on
    ``stream`` and the frame's number alone.
    """

    conditions: WireConditions
    stream: int
    _number: int = 0
    _last: float = -math.inf

    def arrival(self, now: float, size: int) -> float:
        """The time at which a frame of ``size`` bytes, handed over ``now``, has arrived."""
        conditions, number = self.conditions, self._number
        self._number += 1
        propagation = _seconds(conditions.delay_ms)
        if conditions.jitter_ms:
            propagation += _seconds(-conditions.jitter_ms * math.log(1.0 - self._draw(number, "jitter")))
        wire = self.wire_secs(size)
        if conditions.stall_probability and self._draw(number, "stall") < conditions.stall_probability:
            wire += _seconds(conditions.stall_ms)
        self._last = max(now + propagation, self._last) + wire
        return self._last

    def wire_secs(self, size: int) -> float:
        """How long the wire itself takes for ``size`` bytes."""
        mbps = self.conditions.mbps
        return 0.0 if mbps is None else min(size / (mbps * 125_000), _MAX_SECS)

    def _draw(self, number: int, what: str) -> float:
        """Uniform in [0, 1)."""
        digest = hashlib.blake2b(f"{self.stream}/{number}/{what}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest) >> 11) / 2.0**53


def _seconds(milliseconds: float) -> float:
    return min(milliseconds / 1000, _MAX_SECS)


class ConditionedLink(Link):
    """What is sent on it arrives later; what is received comes as it is. Each send counts as one frame.

    :meth:`run` is its task. Frames still on their way when the link is closed are lost.
    """

    def __init__(self, inner: Link, conditions: WireConditions, stream: int) -> None:
        self._inner = inner
        self._times = FrameTimes(conditions, stream)
        self._sending = threading.Lock()
        self._clock = trio.lowlevel.current_clock()
        self._token = trio.lowlevel.current_trio_token()
        self._home = threading.get_ident()
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._changed = trio.lowlevel.ParkingLot()
        self._failure: str | None = None

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def handshake(self) -> None:
        await self._inner.handshake()

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await trio.lowlevel.checkpoint()
        while rest := self.send_nowait(buffers):
            await self._changed.park()
            buffers = rest

    @property
    def sends_from_any_thread(self) -> bool:
        return True

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Takes all or, while too much is on its way, nothing."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(view.nbytes for view in views)
        with self._sending:
            if self._failure is not None:
                raise LinkClosed(f"sending to {self.peer} failed: {self._failure}")
            if self._held and self._held + size > MAX_HELD_BYTES:
                return views
            if not size:
                return []
            self._held += size
            due, wire = self._times.arrival(self._clock.current_time(), size), self._times.wire_secs(size)
            data, pieces = b"".join(views), max(1, math.ceil(wire / PIECE_SECS))
            for index in range(pieces):
                piece = data[size * index // pieces : size * (index + 1) // pieces]
                self._pieces.append((due - wire * (pieces - 1 - index) / pieces, piece))
        self._tell()
        return []

    def _tell(self) -> None:
        """Wake who waits for a change; from another thread that takes a while, which the frame has."""
        if threading.get_ident() == self._home:
            self._changed.unpark_all()
        else:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._changed.unpark_all, idempotent=True)

    async def receive_into(self, buffer: memoryview) -> int:
        return await self._inner.receive_into(buffer)

    @property
    def arrived(self) -> int | None:
        return self._inner.arrived

    @property
    def descriptor(self) -> int | None:
        return self._inner.descriptor

    def receive_nowait(self, buffer: memoryview, *, ready: bool = False) -> int | None:
        return self._inner.receive_nowait(buffer, ready=ready)

    async def run(self) -> None:
        """Deliver until the link takes nothing more; what it brings can still be received then."""
        try:
            while self._failure is None:
                if not self._pieces:
                    await self._changed.park()
                    continue
                due, data = self._pieces[0]
                await trio.sleep_until(due)
                await self._inner.send([data])
                with self._sending:
                    if self._failure is None:
                        self._pieces.popleft()
                        self._held -= len(data)
                self._changed.unpark_all()
        except LinkClosed as exc:
            self._end(str(exc))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._end("the link is closed")
        self._inner.close()

    def _end(self, reason: str) -> None:
        with self._sending:
            self._failure = self._failure or reason
            self._pieces.clear()
        self._changed.unpark_all()


class ConditionedTransport(Transport):
    """Links of ``inner``; those that are dialled are conditioned, each with dice of its own.

    Args:
        nursery: for the tasks of the links.
    """

    def __init__(self, inner: Transport, conditions: WireConditions, nursery: trio.Nursery) -> None:
        self._inner = inner
        self._conditions = conditions
        self._nursery = nursery
        self._streams = itertools.count()

    async def listen(self, endpoint: Endpoint) -> Listener:
        return await self._inner.listen(endpoint)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return self.condition(await self._inner.connect(endpoint, source_host=source_host))

    def condition(self, inner: Link) -> Link:
        """A link over ``inner``, whose frames take their time."""
        link = ConditionedLink(inner, self._conditions, next(self._streams))
        self._nursery.start_soon(link.run)
        return link
