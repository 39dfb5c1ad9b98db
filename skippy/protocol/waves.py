"""Decode waves: which one-token frames stage 0 has computed together, so that every stage can.

An extension: where both sides of a lane agreed to :data:`WAVES_EXTENSION` at admission, ``state.seq_id`` of
kinds 2, 8 and 9 is a word that names the frame's wave and says how many rows the wave has. Each row leaves as
a frame of its own, on its own lane. Sans-IO. Source: ``docs/protocol.md``, section "Decode waves".
"""

from __future__ import annotations

from typing import Final

import attrs

from .errors import LocalProtocolError, RemoteProtocolError
from .kinds import DECODE_WAVE_NUMBERS, MAX_DECODE_WAVE_ROWS

WAVES_EXTENSION: Final = "skippy.decode-waves.v1"
"""The name under which it is agreed."""


@attrs.frozen(slots=True)
class Wave:
    """The rows that stage 0 has computed in one native batch.

    Attributes:
        number: counts waves, modulo 2**23.
        rows: how many there are, 1 to 255.
    """

    number: int
    rows: int


def pack_wave(wave: Wave | None) -> int:
    """The word of a frame of this wave; 0 for a frame of none.

    Raises:
        LocalProtocolError: (InvalidInput) the number is not 0 to 8388607, or the rows are not 1 to 255.
    """
    if wave is None:
        return 0
    if not 0 <= wave.number < DECODE_WAVE_NUMBERS:
        raise LocalProtocolError(f"decode wave {wave.number}; they are 0 to {DECODE_WAVE_NUMBERS - 1}")
    if not 1 <= wave.rows <= MAX_DECODE_WAVE_ROWS:
        raise LocalProtocolError(
            f"a decode wave of {wave.rows} rows; it has 1 to {MAX_DECODE_WAVE_ROWS}, or the frame has no wave"
        )
    return wave.number << 8 | wave.rows


def unpack_wave(word: int) -> Wave | None:
    """The wave that a word names; None for 0, a frame on its own.

    Raises:
        RemoteProtocolError: the word is negative, or names a wave without rows.
    """
    if word == 0:
        return None
    if word < 0:
        raise RemoteProtocolError(f"decode wave word {word} in seq_id; none is negative")
    if not word & 0xFF:
        raise RemoteProtocolError(
            f"decode wave {word >> 8} has 0 rows; a frame of no wave has the word 0 in seq_id"
        )
    return Wave(word >> 8, word & 0xFF)
