"""Frames of decode steps that follow each other: told apart, and made, by the few bytes that change.

Sans-IO. Layout: ``docs/protocol.md``, sections "Message frame" and "Reply frame". What this module calls the
next step is exactly what :class:`MessageDecoder` and :func:`encode_reply` say of the same bytes.
"""

from __future__ import annotations

import struct
from typing import Final

from .codec_messages import encode_message
from .codec_replies import encode_reply
from .kinds import STAGE_WIRE_FIXED_HEADER_BYTES
from .messages import Buffer, Message, Reply
from .rules import POSITIONED_KINDS

_I32: Final = struct.Struct("<i")
_POSITION: Final = 4
_SEQ_ID: Final = 24
_STEP: Final = 44
_TOKEN: Final = 48
_SIDEBAND: Final = STAGE_WIRE_FIXED_HEADER_BYTES
_LARGEST: Final = (1 << 31) - 1

STEP_HEADER_BYTES: Final = STAGE_WIRE_FIXED_HEADER_BYTES + 4
"""The header and the one token of a step without settings; the activation follows."""


class StepHeader:
    """The encoded header of a decode step, which becomes that of the next one in place.

    The next step is the same frame one position and one decode step on, with any token and any ``seq_id``.

    Args:
        header: of a frame of one token, encoded; it is changed in place. See :meth:`fits`.
    """

    __slots__ = ("_header",)

    def __init__(self, header: bytearray) -> None:
        self._header = header

    @classmethod
    def of(cls, message: Message) -> StepHeader | None:
        """That of a message; None where its steps cannot be told apart by their headers alone."""
        if (
            message.kind not in POSITIONED_KINDS
            or message.token_count != 1
            or len(message.tokens) != 1
            or message.tokens[0] != message.state.current_token
            or message.pos_start < 0
            or message.state.decode_step < 0
        ):
            return None
        header = bytearray(encode_message(message)[0])
        return cls(header) if cls.fits(header) else None

    @staticmethod
    def fits(header: Buffer) -> bool:
        """Whether an encoded header has nothing but the fixed words and one token."""
        return len(header) == STEP_HEADER_BYTES

    @property
    def token(self) -> int:
        """The token that the step executes."""
        token: int = _I32.unpack_from(self._header, _TOKEN)[0]
        return token

    @property
    def seq_id(self) -> int:
        """The step's ``state.seq_id``."""
        word: int = _I32.unpack_from(self._header, _SEQ_ID)[0]
        return word

    def move_on(self, token: int) -> None:
        """Become the next step, which executes ``token``. Positions end at the largest i32."""
        header = self._header
        (position,), (step,) = _I32.unpack_from(header, _POSITION), _I32.unpack_from(header, _STEP)
        _I32.pack_into(header, _POSITION, min(position + 1, _LARGEST))
        _I32.pack_into(header, _STEP, min(step + 1, _LARGEST))
        _I32.pack_into(header, _TOKEN, token)
        _I32.pack_into(header, _SIDEBAND, token)

    def takes(self, received: memoryview) -> bool:
        """Whether these bytes are this header but for its token and ``seq_id``; then it takes those over.

        ``received`` has STEP_HEADER_BYTES.
        """
        header, token = self._header, received[_TOKEN : _TOKEN + 4]
        header[_SEQ_ID : _SEQ_ID + 4] = received[_SEQ_ID : _SEQ_ID + 4]
        header[_TOKEN : _TOKEN + 4] = token
        header[_SIDEBAND:] = token
        return received == header


_PREDICTION: Final = encode_reply(Reply.predicted_token(0))
_PREDICTED_AT: Final = (4, 12)

PREDICTION_BYTES: Final = len(_PREDICTION)
"""Size of a PredictedToken without statistics."""


def encode_prediction(token: int) -> bytearray:
    """``encode_reply(Reply.predicted_token(token))``, for a token that is an i32."""
    data = bytearray(_PREDICTION)
    for offset in _PREDICTED_AT:
        _I32.pack_into(data, offset, token)
    return data


def predicted_token(received: Buffer) -> int | None:
    """The token of a PredictedToken that brings nothing else; None for any other PREDICTION_BYTES bytes."""
    (token,) = _I32.unpack_from(received, _PREDICTED_AT[0])
    return token if encode_prediction(token) == received else None
