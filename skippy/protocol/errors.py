"""The two errors of the protocol layer and the wire format's three error classes."""

from __future__ import annotations

import enum


class ErrorKind(enum.Enum):
    """What went wrong, in the wire format's own classes (``docs/protocol.md``)."""

    INVALID_DATA = "InvalidData"
    """The bytes break a rule."""
    UNEXPECTED_EOF = "UnexpectedEof"
    """The stream ended inside a field."""
    INVALID_INPUT = "InvalidInput"
    """A caller asked the writer for something illegal."""


class ProtocolError(Exception):
    """Base of both protocol errors; never raised itself.

    Attributes:
        kind: the wire format's error class.
    """

    def __init__(self, message: str, kind: ErrorKind) -> None:
        super().__init__(message)
        self.kind = kind


class LocalProtocolError(ProtocolError):
    """Our own caller is wrong: a bug on this side. Nothing was sent."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.INVALID_INPUT) -> None:
        super().__init__(message, kind)


class RemoteProtocolError(ProtocolError):
    """The peer is wrong: close that connection, tell the affected requests."""

    def __init__(self, message: str, kind: ErrorKind = ErrorKind.INVALID_DATA) -> None:
        super().__init__(message, kind)
