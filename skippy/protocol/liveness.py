"""Heartbeats: how a peer that has nothing to say shows that it is there.

An extension: where both sides of a connection agreed to :data:`LIVENESS_EXTENSION` at admission, either side
may send a heartbeat between two frames, and sends one where it would be silent for long. Sans-IO.
Source: ``docs/protocol.md``, section "Liveness".
"""

from __future__ import annotations

import struct
from typing import Final

from .errors import LocalProtocolError
from .kinds import HEARTBEAT_MAGIC, MAX_PEER_TIMEOUT_MS, MIN_PEER_TIMEOUT_MS

LIVENESS_EXTENSION: Final = "skippy.liveness.v1"
"""The name under which it is agreed."""

_FRAME: Final = struct.Struct("<2I")


def encode_heartbeat(timeout_ms: int) -> bytes:
    """A heartbeat of a peer that gives the other one up after so much silence.

    Raises:
        LocalProtocolError: (InvalidInput) not 1000 to 3600000 ms.
    """
    if not MIN_PEER_TIMEOUT_MS <= timeout_ms <= MAX_PEER_TIMEOUT_MS:
        raise LocalProtocolError(
            f"a heartbeat with a peer timeout of {timeout_ms} ms; it is {MIN_PEER_TIMEOUT_MS} to "
            f"{MAX_PEER_TIMEOUT_MS}"
        )
    return _FRAME.pack(HEARTBEAT_MAGIC, timeout_ms)
