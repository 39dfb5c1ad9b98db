"""The connection to the next stage: frames go down under credit, acknowledgements come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs
import trio

from skippy.protocol import (
    AnnexedReplyDecoder,
    CreditWindow,
    Message,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    ReplyKind,
    Wave,
    encode_frame,
    estimated_wire_bytes,
    pack_wave,
)
from skippy.telemetry import Level, names

from .clock import microseconds
from .context import StageContext
from .errors import LaneLost
from .framing import receive_reply
from .intake import ONE_TOKEN
from .links import Link, LinkClosed
from .reasons import failure_of
from .writer import LinkWriter, Reservation


class Downstream:
    """One connected downstream lane.

    :meth:`write` and :meth:`read` are its two tasks; both raise when the connection ends, and the owner
    then ends the lane. ``send`` and ``wait_drained`` are for the one task that executes the lane's messages.

    Args:
        window: the lane's credit for frames that an early ACK answers.
        annexed: the reply annex was agreed on this connection.
        waves: decode waves were agreed on this connection.
        restores: and prefixes whose length the stages settle on.
        heartbeats: and heartbeats.
    """

    def __init__(
        self,
        context: StageContext,
        link: Link,
        window: CreditWindow,
        *,
        annexed: bool = False,
        waves: bool = False,
        restores: bool = False,
        heartbeats: bool = False,
    ) -> None:
        self.annexed = annexed
        self.annex: ReplyAnnex | None = None
        """What has come with the acknowledgement that is being told."""
        self.waves = waves
        self.restores = restores
        self._context = context
        self._link = link
        self._width = context.info.output_width
        self._heartbeats = heartbeats
        self._writer = LinkWriter(link)
        self.write = self._writer.run
        self._window = window
        self._acks: deque[tuple[bool, Callable[[Reply], None]]] = deque()
        self._acked = trio.lowlevel.ParkingLot()

    async def send(
        self,
        message: Message,
        *,
        credit: bool = False,
        on_ack: Callable[[Reply], None] | None = None,
        on_queued: Callable[[], None] | None = None,
    ) -> tuple[int, int]:
        """Queue a frame for the writer; waits for credit (where ``credit``) and for room in the queue.

        ``on_ack`` is called with the acknowledgement; None says that the frame has none. ``on_queued`` is
        called as the frame enters the queue. Cancelled while waiting, nothing was queued and nothing is owed.

        Returns what it took, in µs: handing the frame over, room for it included, and waiting for credit.
        """
        started = microseconds()
        if credit:
            while not self._window.available:
                await self._acked.park()
        credited = microseconds()
        await self._writer.wait_room()
        buffers = encode_frame(message, self._width)
        if credit:
            self._window.send()
        if on_ack is not None:
            self._acks.append((credit, on_ack))
        if on_queued is not None:
            on_queued()
        with self._context.telemetry.span(
            names.STAGE_BINARY_DOWNSTREAM_WRITE,
            message_kind=message.kind.name,
            activation_bytes=len(message.activation),
        ) as span:
            if self._context.telemetry.enabled(Level.DEBUG):
                span["message_wire_bytes"] = estimated_wire_bytes(message)
            self._writer.put(buffers)
        if not self._context.options.async_prefill_forward:
            await self._writer.wait_flushed()
        written = microseconds()
        if credit and self._context.reply_credit == 0:
            await self.wait_drained()
        return written - credited, credited - started + microseconds() - written

    def wave_word(self, wave: Wave | None) -> int:
        """The ``seq_id`` of a one-token frame of this wave: 0 where the next stage knows no waves."""
        return pack_wave(wave) if self.waves else 0

    def with_wave(self, frame: Message, wave: Wave | None) -> Message:
        """A data message with the word of its wave; those of other kinds have none and stay as they are."""
        return _with_word(frame, self.wave_word(wave)) if frame.kind in ONE_TOKEN else frame

    def with_sequence(self, settings: Message, sequence: int | None) -> Message:
        """A ConfigureGeneration that says which native sequence this stage computes the request in."""
        return _with_word(settings, sequence + 1 if self.waves and sequence is not None else 0)

    def close(self) -> None:
        """End the connection. Safe to call twice."""
        self._link.close()

    def reserve(self) -> Reservation | None:
        """As :meth:`LinkWriter.reserve`, for a frame that no acknowledgement answers."""
        return self._writer.reserve()

    @property
    def drained(self) -> bool:
        """Whether no acknowledgement is owed."""
        return not self._acks

    async def wait_drained(self) -> None:
        """Wait until every acknowledgement owed so far has come."""
        while self._acks:
            await self._acked.park()

    async def read(self) -> None:
        """The acknowledgement reader: waits on nothing but its link.

        Raises RequestFailed as soon as the stage below has said why it ends the connection, LaneLost when the
        link ends without a reason: none can come any more.
        """
        agreed = self._heartbeats
        decoder = (AnnexedReplyDecoder if self.annexed else ReplyDecoder)(heartbeats=agreed)
        watch = self._context.liveness.watch
        try:
            with watch(self._link, decoder, self._writer, agreed=agreed):
                await self._read_acks(decoder)
        except LinkClosed as exc:
            raise LaneLost(str(exc)) from exc

    async def _read_acks(self, decoder: ReplyDecoder) -> None:
        while (reply := await receive_reply(self._link, decoder)) is not None:
            if reply.kind is not ReplyKind.ACK:
                raise RemoteProtocolError(
                    f"{self._link.peer} sent {reply.kind.name} where an ACK was expected"
                )
            if not self._acks:
                raise RemoteProtocolError(f"{self._link.peer} sent an ACK that nothing was owed for")
            credit, on_ack = self._acks.popleft()
            if credit:
                self._window.ack()
            self.annex = decoder.annex if isinstance(decoder, AnnexedReplyDecoder) else None
            on_ack(reply)
            self._acked.unpark_all()
        if isinstance(decoder, AnnexedReplyDecoder) and decoder.failure is not None:
            raise failure_of(decoder.failure)
        raise LinkClosed(f"{self._link.peer} closed the connection")


def _with_word(message: Message, word: int) -> Message:
    """With this ``seq_id``."""
    if word == message.state.seq_id:
        return message
    return attrs.evolve(message, state=attrs.evolve(message.state, seq_id=word))
