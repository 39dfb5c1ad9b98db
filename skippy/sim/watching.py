"""Frames of one request on all hops of a chain, counted as they pass, and one of them picked to be struck.

Data and control frames count; frames of extensions that stand alone, such as signs of life, do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import attrs

from skippy.protocol import ConnectionRole, Message, MessageKind, ReplyKind

from .cutting import ConnectionCutter, Frame
from .faults import Direction
from .lies import Failure


@attrs.frozen(slots=True)
class Place:
    """A frame of a request.

    Attributes:
        hop: the stage that dials: the last one dials stage 0.
        index: among the request's frames there; the opening of a return stream is none of them, and has -1.
    """

    hop: int
    way: Direction
    index: int


@attrs.frozen(slots=True)
class Strike:
    """What happens to which frame. ``then`` is called as it does."""

    failure: Failure
    place: Place
    then: Callable[[], None] = lambda: None


@attrs.define(slots=True, eq=False)
class Watched:
    """A connection, as far as its frames say whose they are.

    Attributes:
        current: ids of the last message.
        carried: ids of all messages.
    """

    hop: int
    cutter: ConnectionCutter = attrs.field(factory=ConnectionCutter)
    current: tuple[int, int] | None = None
    carried: set[tuple[int, int]] = attrs.field(factory=set)


class FrameWatch:
    """Sees every frame of every connection of a chain.

    Attributes:
        connections: that are open; whoever makes and ends them keeps this.
        trace: kinds of the followed request's frames, by hop and direction.
        struck: whether the strike has come.
    """

    def __init__(self) -> None:
        self.connections: set[Watched] = set()
        self.trace: defaultdict[tuple[int, Direction], list[MessageKind | ReplyKind]] = defaultdict(list)
        self.struck = False
        self._matches: Callable[[Message], bool] | None = None
        self._ids: tuple[int, int] | None = None
        self._strike: Strike | None = None

    def follow(self, matches: Callable[[Message], bool], strike: Strike | None = None) -> None:
        """From now on count the frames of the next request that has a message that ``matches``."""
        self._matches, self._ids, self._strike = matches, None, strike
        self.trace.clear()
        self.struck = False

    def admitted(self, hop: int, role: ConnectionRole = ConnectionRole.LANE) -> int:
        """Connections of a hop that are in use."""
        return sum(c.hop == hop and c.cutter.admitted and c.cutter.role is role for c in self.connections)

    def meets(self, connection: Watched, way: Direction, frame: Frame) -> Failure | None:
        """Count a frame that passes; returns what strikes it."""
        if isinstance(frame, Message):
            connection.current = (frame.request_id, frame.session_id)
            connection.carried.add(connection.current)
            if self._ids is None and self._matches is not None and self._matches(frame):
                self._ids, self._matches = connection.current, None
        if self._ids is None or not self._is_followed(connection):
            return None
        index = -1
        if frame.kind is not MessageKind.PREDICTION_RETURN_OPEN:
            kinds = self.trace[connection.hop, way]
            index = len(kinds)
            kinds.append(frame.kind)
        strike = self._strike
        if strike is None or strike.place != Place(connection.hop, way, index):
            return None
        self._strike, self.struck = None, True
        strike.then()
        return strike.failure

    def _is_followed(self, connection: Watched) -> bool:
        if connection.cutter.role is ConnectionRole.LANE:
            return connection.current == self._ids
        # A return stream bears the ids of the first request of its lane.
        return any(
            lane.current == self._ids and connection.current in lane.carried
            for lane in self.connections
            if lane.hop == 0
        )
