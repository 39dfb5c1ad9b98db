"""Ports for processes that are yet to be started."""

from __future__ import annotations

import socket
import sys
from typing import Final

_held: Final[list[socket.socket]] = []


def reserve_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens, and which nobody else is given until this process ends.

    It stays bound. On Linux the system then gives it to nobody, also not for a connection, but to those who
    ask for it by number and with SO_REUSEADDR, as skippy does wherever it listens.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    port: int = sock.getsockname()[1]
    if sys.platform == "linux":
        _held.append(sock)
    else:
        sock.close()
    return port
