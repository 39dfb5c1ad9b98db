"""Link backends: byte streams between stages behind one small interface.

Here live the interface and its backends (tcp, memory). Never here: frames, messages, anything that parses.
"""

from .base import Link, LinkClosed, Listener, Transport
from .memory import MemoryTransport
from .tcp import TcpTransport

__all__ = ["Link", "LinkClosed", "Listener", "MemoryTransport", "TcpTransport", "Transport"]
