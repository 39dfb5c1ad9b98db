"""Who is still there: one task of a stage sees that each of its peers is heard of, and hears of this stage.

Waits for a peer have no timers of their own: those would be set for every token. What a connection has
received and sent is counted, and here the counts are looked at a few times a second. A reader that waits for
memory or for room is not reading, and its peer is not late. Time in which nothing here ran does not count
either: who was suspended does not know what its peers did meanwhile.

What is agreed and sent: ``docs/protocol.md``, section "Liveness".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Final

import trio

from skippy.protocol import MessageDecoder, ReplyDecoder, encode_heartbeat

from .framing import FRAME_SECS
from .links import Link, LinkClosed
from .memory import FrameMemory
from .writer import LinkWriter

TICK_SECS: Final = 0.4
"""How often the counts are looked at, at least: by so much later than its timeout may a peer be given up."""
LEAST_TICKS: Final = 8
"""And how often per timeout."""
_SLACK_SECS: Final = 0.001
"""Ticks are sums of floats."""
IDLE_SECS: Final = 600.0
"""How long a live request may bring no frame: longer than any reply of the chain may take. It holds a
sequence, which others wait for; between requests a lane may be silent for as long as it likes."""
LEAST_BYTES: Final = 16 * 1024
"""What a peer must get on by inside a frame within its timeout, if the frame has not ended by then: a decode
step is there in time, and a large activation may come over a slow link for as long as it comes."""


class Pulse:
    """One connection under watch. Made by :meth:`Liveness.watch`.

    Attributes:
        reading: somebody receives, or will as soon as the memory for it is there. Set by who reads.
        live: a request is, so that a frame is due within IDLE_SECS. Set by who reads.
        moved: a frame has come. Set by who reads, if ``live`` ever is.
    """

    __slots__ = (
        "_agreed",
        "_bytes",
        "_decoder",
        "_frames",
        "_heard_at",
        "_inside",
        "_link",
        "_memory",
        "_moved_at",
        "_said_at",
        "_sent",
        "_writer",
        "live",
        "moved",
        "reading",
        "scope",
        "verdict",
    )

    def __init__(
        self,
        link: Link,
        decoder: MessageDecoder | ReplyDecoder,
        writer: LinkWriter,
        memory: FrameMemory | None,
        *,
        agreed: bool,
    ) -> None:
        self._link = link
        self._decoder = decoder
        self._writer = writer
        self._memory = memory
        self._agreed = agreed
        self.reading = True
        self.live = self.moved = False
        self.scope = trio.CancelScope()
        self.verdict = ""
        self._frames = self._bytes = 0
        self._inside = False
        self._sent = writer.sent
        self._heard_at = self._moved_at = trio.current_time()
        self._said_at = float("-inf")

    def forgive(self, secs: float) -> None:
        """So much time passed unseen."""
        self._heard_at += secs
        self._moved_at += secs

    def tick(self, now: float, ours: Liveness) -> None:
        """Give the peer up if it is too late, else see to it that it hears of us."""
        self._listen(now)
        silent, timeout_secs = now - self._heard_at + _SLACK_SECS, ours.timeout_secs
        if self._agreed and silent >= timeout_secs:
            late = "got on with a frame too slowly, or not at all," if self._inside else "sent nothing"
            self._give_up(f"{late} for {timeout_secs:g} s (--peer-timeout-secs)")
        elif not self._agreed and self._inside and silent >= FRAME_SECS:
            self._give_up(f"did not finish a frame within {FRAME_SECS:g} s")
        elif self.live and now - self._moved_at >= IDLE_SECS:
            self._give_up(f"sent nothing for {IDLE_SECS:g} s while a request was live")
        elif self._agreed:
            self._speak(now, ours)

    def _listen(self, now: float) -> None:
        decoder, received = self._decoder, self._link.arrived
        if received is None:
            received = decoder.bytes_received
        reading = self.reading and not (self._memory is not None and self._memory.waiting)
        inside = not decoder.at_boundary
        got_on = self._agreed and received - self._bytes >= LEAST_BYTES
        began = inside and not self._inside
        if not reading or got_on or began or decoder.frames_read != self._frames:
            self._heard_at = now
            self._frames, self._bytes = decoder.frames_read, received
        self._inside = inside
        if self.moved or not self.live or not reading:
            self.moved = False
            self._moved_at = now

    def _speak(self, now: float, ours: Liveness) -> None:
        if self._writer.sent != self._sent:
            self._sent = self._writer.sent
            self._said_at = max(self._said_at, now - ours.tick_secs)  # or up to a tick later
        theirs = self._decoder.peer_timeout_ms
        timeout_secs = ours.timeout_secs if theirs is None else min(ours.timeout_secs, theirs / 1000)
        if now - self._said_at >= timeout_secs / 3 - ours.tick_secs:
            with contextlib.suppress(LinkClosed):  # whoever reads hears of it, too
                if self._writer.beat(ours.heartbeat):
                    self._said_at = now

    def _give_up(self, reason: str) -> None:
        self.verdict = f"{self._link.peer} {reason}"
        self.scope.cancel()


class Liveness:
    """Watches the connections of one stage, in one task: :meth:`run`.

    Args:
        timeout_secs: after how much silence a peer that agreed to heartbeats is given up.

    Attributes:
        tick_secs: how often the counts are looked at.
        heartbeat: what this stage sends.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.timeout_secs = timeout_secs
        self.tick_secs = timeout_secs / max(LEAST_TICKS, math.ceil(timeout_secs / TICK_SECS))
        self.heartbeat = encode_heartbeat(round(timeout_secs * 1000))
        self._pulses: dict[Pulse, None] = {}
        self._wanted = trio.lowlevel.ParkingLot()

    @contextlib.contextmanager
    def watch(
        self,
        link: Link,
        decoder: MessageDecoder | ReplyDecoder,
        writer: LinkWriter,
        memory: FrameMemory | None = None,
        *,
        agreed: bool,
    ) -> Iterator[Pulse]:
        """Watch the connection that is read inside the block.

        Args:
            writer: its sender, which is running.
            memory: what its reader may have to wait for.
            agreed: heartbeats were, on this connection; else only a frame that has begun must end.

        Raises:
            LinkClosed: the peer was too late with something; names the peer, and what it was too late with.
                The block was cancelled then.
        """
        pulse = Pulse(link, decoder, writer, memory, agreed=agreed)
        self._pulses[pulse] = None
        self._wanted.unpark()
        try:
            with pulse.scope:
                yield pulse
        finally:
            del self._pulses[pulse]
        if pulse.scope.cancelled_caught:
            raise LinkClosed(pulse.verdict)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if not self._pulses:
                await self._wanted.park()
            due = trio.current_time() + self.tick_secs
            await trio.sleep_until(due)
            now = trio.current_time()
            for pulse in tuple(self._pulses):
                if now - due > self.tick_secs:
                    pulse.forgive(now - due)
                pulse.tick(now, self)
