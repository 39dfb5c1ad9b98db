"""Link backends: byte streams between stages behind one small interface.

Here live the interface, its backends (tcp, tls, websocket, memory, conditioned) and the choice among them.
Never here: frames, messages, anything that parses what the stages say.
"""

from .base import Link, LinkClosed, Listener, Transport
from .choosing import SchemeTransport, StageLinks, open_links
from .conditioned import ConditionedTransport
from .memory import MemoryTransport
from .tcp import TcpTransport
from .tls import TlsFiles, TlsTransport
from .websocket import WebSocketTransport

__all__ = [
    "ConditionedTransport",
    "Link",
    "LinkClosed",
    "Listener",
    "MemoryTransport",
    "SchemeTransport",
    "StageLinks",
    "TcpTransport",
    "TlsFiles",
    "TlsTransport",
    "Transport",
    "WebSocketTransport",
    "open_links",
]
