"""What can go wrong on a simulated link: values that say what, where and when. Pure: no clock, no tasks."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

import attrs


class Direction(enum.Enum):
    """Which of a link's two byte streams."""

    FORWARD = "forward"
    """From the side that dialled: frames down a lane, or tokens on a prediction return stream."""
    BACK = "back"
    """To the side that dialled: the handshake's answers, acknowledgements."""

    @property
    def other(self) -> Direction:
        return Direction.BACK if self is Direction.FORWARD else Direction.FORWARD


class FaultKind(enum.Enum):
    """What happens to one direction of a link, from a certain byte on."""

    RESET = "reset"
    """The bytes before arrive; then both sides find the link broken, in both directions."""
    CLOSE = "close"
    """The bytes before arrive, then the end of the stream; the other direction ends in good order too."""
    HALF_CLOSE = "half-close"
    """The receiver sees the end of the stream; the sender is not told, and what it sends is lost."""
    STALL = "stall"
    """The link takes bytes as long as there is room for them, and delivers none for ``secs``."""
    TRICKLE = "trickle"
    """One byte arrives every ``secs``."""
    CORRUPT = "corrupt"
    """``length`` bytes arrive changed: each has the bits of ``mask`` flipped."""
    LIE = "lie"
    """The frame that the fault begins in arrives as what ``rewrite`` makes of it."""


@attrs.frozen(slots=True)
class Fault:
    """One fault of one direction of a link.

    A frame is what one ``send`` hands over, so frame 0 is the first message of the handshake; on a lane whose
    peers know admission, FORWARD frames 0 and 1 are the handshake's where there is a link token.

    Attributes:
        kind: what happens.
        frame: it begins in the frame of this number, counted from 0 on each link; None: ``byte`` counts from
            the link's first byte.
        byte: where in the frame; one that is shorter has the fault at its end.
        secs: how long a stall lasts (for ever, unless given), or the time that each byte takes in a trickle.
        length: bytes that are corrupted.
        mask: what is flipped in each of them.
        rewrite: of a lie: the bytes of the frame → what arrives instead. ``byte`` must be 0.
    """

    kind: FaultKind
    frame: int | None = None
    byte: int = 0
    secs: float = math.inf
    length: int = 1
    mask: int = 0xFF
    rewrite: Callable[[bytes], bytes] | None = None

    def __attrs_post_init__(self) -> None:
        if (self.kind is FaultKind.LIE) is not (self.rewrite is not None):
            raise ValueError("rewrite: given for a lie, and only for a lie")
        if self.kind is FaultKind.LIE and (self.byte or self.frame is None):
            raise ValueError("frame: a lie is about a whole frame, so give its number, and no byte in it")
        if self.kind is FaultKind.TRICKLE and not 0 < self.secs < math.inf:
            raise ValueError("secs: a trickle needs the time that each byte takes")

    def __str__(self) -> str:
        place = f"byte {self.byte}" if self.frame is None else f"frame {self.frame} byte {self.byte}"
        lasts = f" {self.secs:g} s" if self.kind in (FaultKind.STALL, FaultKind.TRICKLE) else ""
        return f"{self.kind.value}{lasts} at {place}"


@attrs.frozen(slots=True)
class LinkName:
    """One link of a network: who dialled whom, and the how-manieth link between the two it is, from 0."""

    dialer: str
    listener: str
    number: int

    def __str__(self) -> str:
        return f"{self.dialer}>{self.listener}#{self.number}"


@attrs.frozen(slots=True)
class LinkFault:
    """A fault of the link ``link``, in ``direction``."""

    link: LinkName
    direction: Direction
    fault: Fault

    def __str__(self) -> str:
        return f"{self.link} {self.direction.value}: {self.fault}"


@attrs.frozen(slots=True)
class Conditions:
    """What a link is like without faults. Every direction has dice of its own.

    Attributes:
        latency: seconds that each byte is under way.
        jitter: mean of a further, exponentially distributed time for each piece; nothing is overtaken.
        bandwidth: bytes per second; inf: no limit.
        capacity: bytes that one direction holds, those that have arrived included; a sender waits for more.
        slices: a receiver gets at most a random number of bytes at once, 1 to this many, or to an eighth of
            what is under way where that is more; None: all there are.
        partial: how often ``send_nowait`` takes a part of a frame alone, 0 to 1.
    """

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf
    capacity: int = 256 * 1024
    slices: int | None = None
    partial: float = 0.0


PERFECT = Conditions()
