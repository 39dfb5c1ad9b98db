"""A simulated network that counts the frames of one request and lets one of them be struck."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio

from skippy.config import Endpoint
from skippy.protocol import Buffer

from .clock import SimClock
from .cutting import Piece
from .faults import Conditions, Direction, Fault, FaultKind, LinkName
from .lies import LIES, Failure, lie
from .network import SimLink, SimNetwork, Wire
from .pipes import Pipe
from .watching import FrameWatch, Watched

TRICKLE_SECS = 0.25
"""Between two bytes of a trickling connection: no frame is whole in time."""
_ROOMY = Conditions(capacity=1 << 40)


class TappedNetwork(SimNetwork):
    """Every link is watched, between stages that are called ``stage-0`` and so on.

    Args:
        watch: sees the frames.
        chance: draws what lies say.
    """

    def __init__(
        self,
        watch: FrameWatch,
        chance: random.Random,
        *,
        clock: SimClock,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(conditions=_ROOMY, clock=clock, tell=tell)
        self.watch = watch
        self.chance = chance

    def make_wire(self, name: LinkName, endpoint: Endpoint, conditions: Conditions) -> Wire:
        return _TappedWire(self, name, endpoint, conditions)


class _TappedWire(Wire):
    """A link that cuts what is sent on it into frames."""

    def __init__(
        self, network: TappedNetwork, name: LinkName, endpoint: Endpoint, conditions: Conditions
    ) -> None:
        super().__init__(network, name, endpoint, conditions)
        self._tapped = network
        self._watched = Watched(int(name.dialer.removeprefix("stage-")))
        network.watch.connections.add(self._watched)

    def make_link(self, peer: str, out: Pipe, into: Pipe) -> SimLink:
        return _TappedLink(self, peer, out, into)

    def closed(self) -> None:
        super().closed()
        if not self.open_ends:
            self._tapped.watch.connections.discard(self._watched)

    def send(self, link: SimLink, data: bytes) -> None:
        """Send on what is whole by now. Raises LinkClosed."""
        way = Direction.FORWARD if link is self.near else Direction.BACK
        pipe = self.pipes[way]
        for piece in self._watched.cutter.cut(way, data):
            failure = None
            if piece.frame is not None:
                failure = self._tapped.watch.meets(self._watched, way, piece.frame)
            if failure is None:
                pipe.write([piece.data])
            else:
                self._suffer(pipe, way, piece, failure)

    def _suffer(self, pipe: Pipe, way: Direction, piece: Piece, failure: Failure) -> None:
        """Let a failure happen to a frame. Who sends hears of it with the next one."""
        data, half = piece.data, piece.data[: len(piece.data) // 2]
        if failure is Failure.RESET:
            pipe.strike(Fault(FaultKind.RESET))
        elif failure is Failure.CUT:
            pipe.write([half])
            pipe.strike(Fault(FaultKind.RESET))
        elif failure is Failure.HALF_CLOSE:
            pipe.strike(Fault(FaultKind.HALF_CLOSE))
        elif failure is Failure.STALL:
            pipe.strike(Fault(FaultKind.STALL))
        elif failure is Failure.FREEZE:
            pipe.write([half])
            for each in Direction:
                self.pipes[each].strike(Fault(FaultKind.STALL))
        elif failure is Failure.TRICKLE:
            pipe.strike(Fault(FaultKind.TRICKLE, secs=TRICKLE_SECS))
            pipe.write([data])
        elif failure is Failure.SLOW:
            pipe.byte_by_byte = True
            pipe.write([data])
        elif failure in LIES:
            pipe.write([lie(failure, piece, self._tapped.chance)])
        # Where somebody was killed, the frame was on its way to nobody.


class _TappedLink(SimLink):
    """One end; what it sends goes through its wire, where there is always room."""

    _wire: _TappedWire

    async def send(self, buffers: Sequence[Buffer]) -> None:
        await trio.lowlevel.checkpoint()
        self.send_nowait(buffers)

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        self._wire.send(self, b"".join(buffers))
        return []
