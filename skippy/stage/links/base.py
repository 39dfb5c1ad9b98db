"""The interface that every link backend implements."""

from __future__ import annotations

import abc
import socket
from collections.abc import Sequence

from skippy.config import Endpoint
from skippy.protocol import Buffer


class LinkClosed(Exception):
    """The link ended: reset by the peer, timed out below us, or closed on this side."""


class Link(abc.ABC):
    """A reliable, ordered byte stream between two processes.

    One task may send and one task may receive at the same time. A cancelled or failed ``send`` may leave half
    a frame behind: the link is then of no further use.
    """

    @property
    @abc.abstractmethod
    def peer(self) -> str:
        """The peer's address, for messages to people."""

    async def handshake(self) -> None:  # noqa: B027 - most links have none
        """Do what the transport itself needs before bytes can flow. Raises LinkClosed.

        Both sides call it before anything else, each under its own deadline. A link that it failed on, or
        that it was cancelled on, is of no further use.
        """

    @abc.abstractmethod
    async def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all bytes of all buffers, in order, without joining them. Raises LinkClosed."""

    @property
    def sends_from_any_thread(self) -> bool:
        """Whether ``send_nowait`` may be called in another thread, also while the link closes."""
        return False

    @abc.abstractmethod
    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Hand over what the system takes at once; returns the rest, in order, which may be everything.

        Only while no ``send`` is under way. Raises LinkClosed.
        """

    @abc.abstractmethod
    async def receive_into(self, buffer: memoryview) -> int:
        """Receive at least one byte into ``buffer``; 0 at the end of the stream. Raises LinkClosed."""

    def receive_nowait(self, buffer: memoryview, *, ready: bool = False) -> int | None:
        """As :meth:`receive_into`, of what has arrived already; None when that is nothing, or not known.

        ``ready`` says that something has arrived since the last call that found nothing.
        """
        return None

    @property
    def descriptor(self) -> int | None:
        """What can be received shows here; ``receive_nowait`` is then for any thread, while no task receives.

        None where it is not known, or the link is closed.
        """
        return None

    @property
    def arrived(self) -> int | None:
        """Bytes that have come so far, also those of a piece that cannot be received before it is whole.

        None where there are no such pieces, or only small ones.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Close both directions at once, without waiting. Safe to call twice."""


class Listener(abc.ABC):
    """Accepts links on one endpoint."""

    @property
    @abc.abstractmethod
    def endpoint(self) -> Endpoint:
        """Where it listens, with the real port where 0 was asked for."""

    @abc.abstractmethod
    async def accept(self) -> Link:
        """Wait for the next link. Raises LinkClosed once the listener is closed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening. Safe to call twice."""


class Transport(abc.ABC):
    """A way to make links: one per kind of network."""

    @abc.abstractmethod
    async def listen(self, endpoint: Endpoint) -> Listener:
        """Listen on ``endpoint``. Raises OSError naming the endpoint when it is in use or not ours."""

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        """A listener over an already listening socket, for example an inherited one. Takes ownership.

        Raises ValueError where links are not made of sockets.
        """
        raise ValueError("this transport has no listening sockets")

    @abc.abstractmethod
    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        """One attempt to connect, from the address ``source_host`` where given. Raises OSError.

        Has no deadline of its own: the caller's cancel scope bounds it.
        """
