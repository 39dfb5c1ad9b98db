"""The vocabulary in a SentencePiece model file, read without the library: it is a protobuf message.

Only what a GGUF needs: text, score and kind of every piece.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from skippy.models.errors import CheckpointError

MAX_PIECES: Final = 1 << 22
_PIECES: Final = 1  # field of ModelProto
_TEXT, _SCORE, _KIND = 1, 2, 3  # fields of SentencePiece
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_FLOAT: Final = struct.Struct("<f")
NORMAL: Final = 1


@attrs.frozen(slots=True)
class Piece:
    """One token. ``kind`` is the number of SentencePiece's enum, which GGUF shares: 1 normal, 2 unknown, …"""

    text: bytes
    score: float
    kind: int


class _Damaged(ValueError):
    pass


def read_pieces(path: Path, data: bytes) -> list[Piece]:
    """The pieces of the model in ``data``, in order. Raises CheckpointError when it is damaged."""
    pieces: list[Piece] = []
    try:
        for field, value in _fields(data):
            if field == _PIECES and isinstance(value, bytes):
                pieces.append(_piece(value))
                if len(pieces) > MAX_PIECES:
                    raise _Damaged(f"more than {MAX_PIECES} pieces")
    except _Damaged as error:
        raise CheckpointError(path, f"not a SentencePiece model, or damaged: {error}") from None
    if not pieces:
        raise CheckpointError(path, "not a SentencePiece model: it has no pieces")
    return pieces


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for field, value in _fields(data):
        if field == _TEXT and isinstance(value, bytes):
            text = value
        elif field == _SCORE and isinstance(value, float):
            score = value
        elif field == _KIND and isinstance(value, int):
            kind = value
    if not 1 <= kind <= 6:
        raise _Damaged(f"a piece of the unknown kind {kind}")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes | None]]:
    """Number and value of each field of a message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        value: int | float | bytes | None
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            size, at = _varint(data, at)
            if size > end - at:
                raise _Damaged(f"field {field} at byte {at} needs {size} bytes, {end - at} are left")
            value, at = data[at : at + size], at + size
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            if size > end - at:
                raise _Damaged(f"field {field} at byte {at} is cut off")
            value = _FLOAT.unpack_from(data, at)[0] if wire == _FIXED32 else None
            at += size
        else:
            raise _Damaged(f"wire type {wire} before byte {at}")
        yield field, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _Damaged(f"a number before byte {at} does not end")
