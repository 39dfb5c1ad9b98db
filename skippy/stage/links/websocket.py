"""Links inside WebSockets, for chains that must cross an HTTP proxy: binary messages carry the byte stream.

Where messages begin and end means nothing. Masking in pure Python bounds the speed to about 100 MB/s.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import trio
from trio_websocket import (
    ConnectionClosed,
    ConnectionRejected,
    WebSocketConnection,
    wrap_client_stream,
    wrap_server_stream,
)

from skippy.config import Endpoint
from skippy.protocol import Buffer

from ..nurseries import leaves
from .base import Link, LinkClosed, Listener, Transport
from .layers import LayeredListener, LinkStream

MAX_MESSAGE_BYTES = 1024 * 1024
"""A longer message of the peer ends the link."""
_SEND_BYTES = 256 * 1024
_RECEIVE_BYTES = 64 * 1024
_CLOSE_SECS = 1.0
"""How long a closing handshake may take in the background."""
_RESOURCE = "/"
_ORDERLY = (1000, 1001, 1005)
"""Closing codes that mean an end of stream: normal, going away, none given (RFC 6455 section 7.4.1)."""


class WebSocketLink(Link):
    """A WebSocket over ``inner``, which it owns; the protocol's reader is a task in ``nursery``.

    Args:
        host: what the dialling side asks for in its ``Host`` header; None on the accepting side.
    """

    def __init__(self, inner: Link, host: str | None, nursery: trio.Nursery) -> None:
        self._inner = inner
        self._host = host
        self._nursery = nursery
        self._stream = LinkStream(inner)
        self._started = False
        self._settled = trio.Event()
        self._connection: WebSocketConnection | None = None
        self._failure = "the connection ended during the WebSocket handshake"
        self._life = trio.CancelScope()
        self._closing = trio.Event()
        self._closed = False
        self._waits: set[trio.CancelScope] = set()
        self._rest = memoryview(b"")

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def handshake(self) -> None:
        with self._until_closed("the WebSocket handshake with"):
            await self._open()

    async def _open(self) -> WebSocketConnection:
        if not self._started:
            self._started = True
            try:
                await self._inner.handshake()
                self._nursery.start_soon(self._run)
            except BaseException:
                self._settled.set()
                raise
        await self._settled.wait()
        if self._connection is None:
            raise LinkClosed(f"the WebSocket handshake with {self.peer} failed: {self._failure}")
        return self._connection

    async def _run(self) -> None:
        """The connection's own task: opens it, lets the library's reader run, and closes it in good order."""
        stream = self._stream
        try:
            with self._life:
                async with trio.open_nursery() as nursery:

                    async def give_up() -> None:
                        await stream.ended.wait()
                        if self._connection is None:
                            nursery.cancel_scope.cancel()

                    nursery.start_soon(give_up)
                    self._connection = await self._upgrade(nursery, stream)
                    self._settled.set()
                    await self._closing.wait()
                    with trio.move_on_after(_CLOSE_SECS):
                        await self._connection.aclose()
                    nursery.cancel_scope.cancel()
        except* Exception as group:
            self._failure = "; ".join(_text(exc) for exc in leaves(group))
        finally:
            self._settled.set()
            self._inner.close()

    async def _upgrade(self, nursery: trio.Nursery, stream: LinkStream) -> WebSocketConnection:
        if self._host is not None:
            return await wrap_client_stream(
                nursery,
                stream,  # type: ignore[arg-type]
                self._host,
                _RESOURCE,
                max_message_size=MAX_MESSAGE_BYTES,
                receive_buffer_size=_RECEIVE_BYTES,
            )
        request = await wrap_server_stream(
            nursery, stream, max_message_size=MAX_MESSAGE_BYTES, receive_buffer_size=_RECEIVE_BYTES
        )
        if any(name.lower() == b"origin" for name, _ in request.headers):
            # Browsers let any page open a WebSocket to any address, also to loopback, and always say so.
            await request.reject(403)
            raise LinkClosed("a browser's page is no stage")
        return await request.accept()

    async def send(self, buffers: Sequence[Buffer]) -> None:
        with self._until_closed("sending to"):
            connection = await self._open()
            pending = bytearray()
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                while view.nbytes:
                    room = _SEND_BYTES - len(pending)
                    pending += view[:room]
                    view = view[room:]
                    if len(pending) == _SEND_BYTES:
                        await connection.send_message(bytes(pending))
                        pending.clear()
            if pending:
                await connection.send_message(bytes(pending))

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Takes nothing: the library only sends with a checkpoint."""
        return [memoryview(buffer).cast("B") for buffer in buffers]

    async def receive_into(self, buffer: memoryview) -> int:
        with self._until_closed("receiving from"):
            connection = await self._open()
            while not self._rest:
                try:
                    message = await connection.get_message()
                except ConnectionClosed as exc:
                    if exc.reason is not None and exc.reason.code in _ORDERLY:
                        return 0
                    raise
                if isinstance(message, str):
                    raise LinkClosed(f"{self.peer} sent a text message; the stream is in binary ones")
                self._rest = memoryview(message)
            count = min(buffer.nbytes, self._rest.nbytes)
            buffer[:count] = self._rest[:count]
            self._rest = self._rest[count:]
            return count
        raise AssertionError("unreachable")

    @property
    def arrived(self) -> int:
        return self._stream.received

    @contextlib.contextmanager
    def _until_closed(self, what: str) -> Iterator[None]:
        """One wait of a caller, which ``close`` ends; the library's errors become ours."""
        with trio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                if self._closed:
                    raise LinkClosed(f"{what} {self.peer} failed: the link is closed")
                yield
            except ConnectionClosed as exc:
                raise LinkClosed(f"{what} {self.peer} failed: {_text(exc)}") from exc
            finally:
                self._waits.discard(scope)
        if scope.cancelled_caught:
            raise LinkClosed(f"{what} {self.peer} failed: the link is closed")

    def close(self) -> None:
        """As on every link; the closing handshake goes on in the background, for a second at most."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        for scope in self._waits:
            scope.cancel()
        if self._connection is None:
            self._life.cancel()
            self._inner.close()


class WebSocketTransport(Transport):
    """WebSockets over the links of ``inner``.

    Args:
        nursery: for the tasks of the links; they end soon after their link is closed.
        scheme, inner_scheme: what its own endpoints and those of ``inner`` are called.
    """

    def __init__(self, inner: Transport, nursery: trio.Nursery, scheme: str, inner_scheme: str) -> None:
        self._inner = inner
        self._nursery = nursery
        self._scheme = scheme
        self._inner_scheme = inner_scheme

    async def listen(self, endpoint: Endpoint) -> Listener:
        inner = await self._inner.listen(endpoint.with_scheme(self._inner_scheme))
        return LayeredListener(inner, self._scheme, self._accept)

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return LayeredListener(self._inner.adopt(sock, self._inner_scheme), self._scheme, self._accept)

    def _accept(self, link: Link) -> Link:
        return WebSocketLink(link, None, self._nursery)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        inner = endpoint.with_scheme(self._inner_scheme)
        link = await self._inner.connect(inner, source_host=source_host)
        return WebSocketLink(link, str(endpoint.with_scheme("tcp")), self._nursery)


def _text(exc: BaseException) -> str:
    if isinstance(exc, ConnectionRejected):
        return f"it answered with HTTP status {exc.status_code} instead of a WebSocket"
    if isinstance(exc, ConnectionClosed):
        reason = exc.reason
        if reason is None or reason.code == 1006:
            return "the connection was cut off"
        return f"it was closed with code {reason.code}" + (f": {reason.reason}" if reason.reason else "")
    return str(exc) or type(exc).__name__
