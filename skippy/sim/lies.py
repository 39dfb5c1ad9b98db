"""Faults that a frame can suffer, and what a peer that lies makes of it."""

from __future__ import annotations

import enum
import random

import attrs

from skippy.protocol import (
    Message,
    MessageKind,
    Reply,
    ReplyKind,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
)

from .cutting import Piece

UNKNOWN_KIND = 99
_ID_BITS = 0xFFFF


class Failure(enum.Enum):
    """What becomes of one frame, and of its connection."""

    RESET = "reset"
    """The connection is reset for both sides."""
    CUT = "cut"
    """As ``RESET``, in the middle of the frame."""
    HALF_CLOSE = "half-close"
    """The receiver sees the end of the stream; the other way stays open."""
    STALL = "stall"
    """From here on all is taken and nothing passed on, in this way."""
    FREEZE = "freeze"
    """``STALL`` in both ways, in the middle of the frame."""
    SLOW = "slow"
    """The frame comes byte by byte, as fast as that goes."""
    TRICKLE = "trickle"
    """From here on a byte comes only so often: no frame is whole in time."""
    WRONG_KIND = "wrong kind"
    UNKNOWN_KIND = "unknown kind"
    WRONG_IDS = "wrong ids"
    GARBAGE = "garbage"
    """As many bytes as the frame has, drawn from the seed."""
    KILL = "kill"
    """The process of a stage is gone, without a word."""

    @property
    def harmless(self) -> bool:
        """The request must go on to its normal end."""
        return self is Failure.SLOW


LIES = frozenset({Failure.WRONG_KIND, Failure.UNKNOWN_KIND, Failure.WRONG_IDS, Failure.GARBAGE})

_OTHER_KIND = {
    MessageKind.CONFIGURE_GENERATION: MessageKind.PREFILL_EMBD,
    MessageKind.PREFILL_EMBD: MessageKind.DECODE_EMBD,
    MessageKind.DECODE_EMBD: MessageKind.PREFILL_EMBD,
}


def lie(kind: Failure, piece: Piece, chance: random.Random) -> bytes:
    """What comes instead of ``piece``, which holds a frame; as long as that."""
    frame = piece.frame
    assert frame is not None
    size = estimated_wire_bytes(frame) if isinstance(frame, Message) else len(encode_reply(frame))
    before = piece.data[:-size]
    if kind is Failure.GARBAGE:
        said = chance.randbytes(size)
    elif kind is Failure.UNKNOWN_KIND:
        said = UNKNOWN_KIND.to_bytes(4, "little") + piece.data[-size + 4 :]
    elif kind is Failure.WRONG_KIND:
        said = int(_other_kind(frame)).to_bytes(4, "little", signed=True) + piece.data[-size + 4 :]
    else:
        said = _wrong_ids(frame, chance)
    assert len(said) == size
    return before + said


def _other_kind(frame: Message | Reply) -> MessageKind | ReplyKind:
    """Another kind with the same layout."""
    if isinstance(frame, Message):
        return _OTHER_KIND.get(frame.kind, MessageKind.TRIM_SESSION)
    return ReplyKind.PREDICTED_TOKEN if frame.kind is ReplyKind.ACK else ReplyKind.ACK


def _wrong_ids(frame: Message | Reply, chance: random.Random) -> bytes:
    """Other ids; a reply has none but that of a verify window."""
    other = chance.randint(1, _ID_BITS)
    if isinstance(frame, Reply):
        return encode_reply(attrs.evolve(frame, window_id=frame.window_id ^ other))
    changed = attrs.evolve(
        frame, request_id=frame.request_id ^ other, session_id=frame.session_id ^ (other << 16)
    )
    return b"".join(map(bytes, encode_message(changed)))
