"""A TCP network between the stages of a chain that does to one frame of one request what it is told to.

Every hop of the chain goes through it: lanes from stage to stage, and the return streams from the last stage
to stage 0.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable

import trio

from skippy.sim.cutting import Frame, Piece
from skippy.sim.faults import Direction
from skippy.sim.lies import LIES, Failure, lie
from skippy.sim.watching import FrameWatch, Watched

TRICKLE_SECS = 0.05
"""Between two bytes of a trickling connection."""
SLOW_BYTES = 400
"""Of a frame that comes byte by byte; the rest of it comes at once."""
_READ_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)


class FaultyNetwork(FrameWatch):
    """All connections of a chain.

    Args:
        chance: draws what lies say.

    Attributes:
        struck_at: when the strike has come.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.struck_at = 0.0
        self._running: set[Connection] = set()
        self._changed = trio.lowlevel.ParkingLot()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Looks again whenever a connection has been admitted or has ended, or the strike has come."""
        while not holds():
            await self._changed.park()

    def changed(self) -> None:
        self._changed.unpark_all()

    def meets(self, connection: Watched, way: Direction, frame: Frame) -> Failure | None:
        failure = super().meets(connection, way, frame)
        if failure is not None:
            self.struck_at = trio.current_time()
            self.changed()
        return failure

    def reset_all(self) -> None:
        """Reset every connection."""
        for connection in list(self._running):
            connection.abort()

    def join(self, connection: Connection, watched: Watched) -> None:
        self._running.add(connection)
        self.connections.add(watched)

    def leave(self, connection: Connection, watched: Watched) -> None:
        self._running.discard(connection)
        self.connections.discard(watched)
        self.changed()


class Connection:
    """Two streams, and what passes between them. Run :meth:`run`; it ends with the connection."""

    def __init__(
        self, network: FaultyNetwork, hop: int, dialer: trio.SocketStream, listener: trio.SocketStream
    ) -> None:
        self.watched = Watched(hop)
        self._network = network
        self._ends = {Direction.FORWARD: (dialer, listener), Direction.BACK: (listener, dialer)}
        self._dropped: set[Direction] = set()
        self._trickles: set[Direction] = set()

    async def run(self) -> None:
        """Pass on until both ways have ended, or either side has reset its end."""
        self._network.join(self, self.watched)
        try:
            async with trio.open_nursery() as nursery:
                for way in Direction:
                    nursery.start_soon(self._pass_on, way)
        finally:
            self.abort()
            self._network.leave(self, self.watched)

    def abort(self) -> None:
        """Reset both ends. Never waits."""
        for wire, _ in self._ends.values():
            reset(wire)

    async def _pass_on(self, way: Direction) -> None:
        source, sink = self._ends[way]
        try:
            while data := await source.receive_some(_READ_BYTES):
                admitted = self.watched.cutter.admitted
                for piece in self.watched.cutter.cut(way, bytes(data)):
                    await self._deliver(way, piece)
                if self.watched.cutter.admitted and not admitted:
                    self._network.changed()
            if way not in self._dropped:
                await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abort()

    async def _deliver(self, way: Direction, piece: Piece) -> None:
        failure = None if piece.frame is None else self._network.meets(self.watched, way, piece.frame)
        if failure is None:
            await self._send(way, piece.data)
        else:
            await self._suffer(way, piece, failure)

    async def _suffer(self, way: Direction, piece: Piece, kind: Failure) -> None:
        """Let a fault happen to a frame."""
        half = piece.data[: len(piece.data) // 2]
        if kind is Failure.RESET:
            self.abort()
        elif kind is Failure.CUT:
            await self._send(way, half)
            self.abort()
        elif kind is Failure.HALF_CLOSE:
            self._dropped.add(way)
            await self._ends[way][1].send_eof()
        elif kind is Failure.STALL:
            self._dropped.add(way)
        elif kind is Failure.FREEZE:
            await self._send(way, half)
            self._dropped.update(Direction)
        elif kind is Failure.TRICKLE:
            self._trickles.add(way)
            await self._send(way, piece.data)
        elif kind is Failure.SLOW:
            # All of a large activation would take too long, and tell nothing that its beginning does not.
            await self._send_bytes(way, piece.data[:SLOW_BYTES], 0)
            await self._send(way, piece.data[SLOW_BYTES:])
        elif kind in LIES:
            await self._send(way, lie(kind, piece, self._network.chance))
        else:  # whoever is gone, the frame was on its way
            await self._send(way, piece.data)

    async def _send(self, way: Direction, data: bytes) -> None:
        if way in self._dropped:
            return
        if way in self._trickles:
            await self._send_bytes(way, data, TRICKLE_SECS)
        else:
            await self._ends[way][1].send_all(data)

    async def _send_bytes(self, way: Direction, data: bytes, pause: float) -> None:
        for offset in range(len(data)):
            await self._ends[way][1].send_all(data[offset : offset + 1])
            if pause:
                await trio.sleep(pause)


def reset(stream: trio.SocketStream) -> None:
    """End a connection in both ways; the other side sees a reset. Never waits."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stream.socket.close()
