"""A connection between two stages, cut into frames as it passes by. Sans-IO.

Both ways start with the handshake. What comes then depends on the role that was asked for: messages down and
replies up on a lane; one message, then replies, in the dialer's way on a return stream.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    READY_WORD,
    AdmissionAnswer,
    AdmissionRequest,
    AnnexedReplyDecoder,
    ConnectionRole,
    Message,
    MessageDecoder,
    ProtocolError,
    Reply,
    ReplyDecoder,
)
from skippy.protocol.admission import ADMISSION_HEAD_BYTES, admission_length, decode_answer, decode_request
from skippy.protocol.kinds import TRANSPORT_AUTH_MAGIC

from .faults import Direction

_AUTH_WORD = TRANSPORT_AUTH_MAGIC.to_bytes(4, "little", signed=TRANSPORT_AUTH_MAGIC < 0)
_AUTH_HEAD_BYTES = 5

Frame = Message | Reply


@attrs.frozen(slots=True)
class Piece:
    """Bytes that belong together, on their way.

    Attributes:
        frame: what they say; None for a part of the handshake, for frames of an extension that stand alone,
            and for all bytes behind ones that break a rule.
    """

    data: bytes
    frame: Frame | None = None


class ConnectionCutter:
    """Cuts what passes in both ways. Bytes in and out are the same, in the same order.

    Attributes:
        request: what the dialer asked for; None until it has.
        answer: what it was told; None until it was.
    """

    def __init__(self) -> None:
        self.request: AdmissionRequest | None = None
        self.answer: AdmissionAnswer | None = None
        self._ready = False
        self._plain = False
        self._pending = {way: bytearray() for way in Direction}
        self._decoders: dict[Direction, MessageDecoder | ReplyDecoder] = {}

    @property
    def admitted(self) -> bool:
        return self.answer is not None and self.answer.accepted

    @property
    def role(self) -> ConnectionRole | None:
        """What the connection is for; None until that was asked for."""
        return None if self.request is None else self.request.role

    def cut(self, way: Direction, data: bytes) -> Iterator[Piece]:
        """What is whole, now that ``data`` has come."""
        self._pending[way] += data
        while not self._plain and way not in self._decoders and self._pending[way]:
            part = self._handshake_part(way)
            if part is None:
                return
            yield Piece(part)
            data = bytes(self._pending[way])
        if way in self._decoders and data:
            yield from self._frames(way, data)
        elif self._plain and self._pending[way]:
            yield Piece(self._take(way))

    def _take(self, way: Direction, size: int | None = None) -> bytes:
        pending = self._pending[way]
        data = bytes(pending[:size])
        del pending[: len(data)]
        return data

    # -- the handshake ---------------------------------------------------------------------------------

    def _handshake_part(self, way: Direction) -> bytes | None:
        """The next whole part of it; None while it has not all come."""
        pending = self._pending[way]
        try:
            if way is Direction.BACK and not self._ready:
                if len(pending) < len(READY_WORD):
                    return None
                self._ready = True
                return self._take(way, len(READY_WORD))
            if way is Direction.FORWARD and pending[:4] == _AUTH_WORD:
                whole = len(pending) >= _AUTH_HEAD_BYTES and len(pending) >= _AUTH_HEAD_BYTES + pending[4]
                return self._take(way, _AUTH_HEAD_BYTES + pending[4]) if whole else None
            length = admission_length(pending)
            if length is None or len(pending) < ADMISSION_HEAD_BYTES + length:
                return None
            part = self._take(way, ADMISSION_HEAD_BYTES + length)
            self._admission(way, part[ADMISSION_HEAD_BYTES:])
            return part
        except ProtocolError:
            self._plain = True  # nothing that we know: it passes as it is
            return self._take(way)

    def _admission(self, way: Direction, body: bytes) -> None:
        if way is Direction.FORWARD:
            self.request = decode_request(body)
            return
        self.answer = decode_answer(body)
        if self.request is None or not self.answer.accepted:
            self._plain = True
        elif self.request.role is ConnectionRole.LANE:
            width, heartbeats = self.request.activation_width, self._agreed(LIVENESS_EXTENSION)
            self._decoders[Direction.FORWARD] = MessageDecoder(width, heartbeats=heartbeats)
            self._decoders[Direction.BACK] = self._reply_decoder()
        else:
            self._decoders[Direction.FORWARD] = MessageDecoder(0, heartbeats=self._agreed(LIVENESS_EXTENSION))
            self._decoders[Direction.BACK] = self._reply_decoder()  # where only heartbeats come

    def _agreed(self, extension: str) -> bool:
        return self.answer is not None and extension in self.answer.extensions

    def _reply_decoder(self) -> ReplyDecoder:
        decoder = AnnexedReplyDecoder if self._agreed(ANNEX_EXTENSION) else ReplyDecoder
        return decoder(heartbeats=self._agreed(LIVENESS_EXTENSION))

    # -- frames ----------------------------------------------------------------------------------------

    def _frames(self, way: Direction, data: bytes) -> Iterator[Piece]:
        try:
            self._decoders[way].receive_data(data)
            while (frame := self._next(way)) is not None:
                decoder = self._decoders[way]
                yield Piece(self._take(way, len(self._pending[way]) - decoder.unparsed), frame)
                if self.role is ConnectionRole.RETURN and isinstance(decoder, MessageDecoder):
                    replies = self._decoders[way] = self._reply_decoder()
                    replies.receive_data(decoder.take_trailing_data())
            ended = isinstance(decoder := self._decoders[way], ReplyDecoder) and decoder.ended
            if (ended or decoder.at_boundary) and self._pending[way]:
                yield Piece(self._take(way))
        except ProtocolError:
            self._plain = True
            self._decoders.pop(way, None)
            yield Piece(self._take(way))

    def _next(self, way: Direction) -> Frame | None:
        decoder = self._decoders[way]
        return decoder.next_message() if isinstance(decoder, MessageDecoder) else decoder.next_reply()
