"""Serving the application: Hypercorn's HTTP on Trio, with listeners and streams of our own.

Hypercorn writes to a client inside a shielded scope, so a client that does not read would block shutdown for
ever. Its connections therefore get a stream whose writes have a deadline and can be aborted at any time.
"""

from __future__ import annotations

import logging
import socket
import struct
from functools import partial
from typing import Final

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart_trio import QuartTrio

from .app import end_generations

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECS: Final = 30.0
# What is left for error frames to go out once generations were ended by shutdown.
FLUSH_SECS: Final = 0.5
_WRITE_BYTES: Final = 64 * 1024


class GuardedStream:
    """A client's TCP stream whose writes fail when the client takes nothing for ``stall_secs``."""

    def __init__(self, stream: trio.SocketStream, stall_secs: float) -> None:
        self._stream = stream
        self._stall_secs = stall_secs
        self._sending = False
        self.socket = stream.socket  # Hypercorn asks it for the addresses

    async def send_all(self, data: bytes) -> None:
        view = memoryview(data)
        self._sending = True
        for start in range(0, len(view), _WRITE_BYTES):
            with trio.move_on_after(self._stall_secs) as scope:
                await self._stream.send_all(view[start : start + _WRITE_BYTES])
            if scope.cancelled_caught:
                self.abort()
                raise trio.BrokenResourceError("the client stopped reading")
        self._sending = False

    async def receive_some(self, limit: int) -> bytes:
        return bytes(await self._stream.receive_some(limit))

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection. Does not wait; tasks that use it fail at once."""
        if self.socket.fileno() >= 0:
            if self._sending:
                # Linger for 0 s: a reset instead of minutes of retries to a client that does not read.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()


class _Connections:
    """The open connections, and the way to end them all."""

    def __init__(self, app: QuartTrio, config: Config, context: WorkerContext, stall_secs: float) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._context = context
        self._stall_secs = stall_secs
        self._open: set[GuardedStream] = set()
        self._empty = trio.Event()

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one client until it or the server has had enough."""
        guarded = GuardedStream(stream, self._stall_secs)
        self._open.add(guarded)
        self._empty = trio.Event()
        try:
            server = TCPServer(self._app, self._config, self._context, ConnectionState({}), guarded)  # type: ignore[arg-type]
            await server.run()
        except Exception:
            logger.exception("a connection failed")
        finally:
            self._open.discard(guarded)
            stream.socket.close()
            if not self._open:
                self._empty.set()

    async def wait_empty(self) -> None:
        if self._open:
            await self._empty.wait()

    async def abort_when_cancelled(self) -> None:
        """Sleep until cancelled, then free the tasks that are stuck in shielded writes."""
        try:
            await trio.sleep_forever()
        finally:
            for guarded in tuple(self._open):
                guarded.abort()


async def serve_http(
    app: QuartTrio,
    bind: str | socket.socket,
    *,
    shutdown: trio.Event | None = None,
    grace_secs: float = 1.0,
    stall_timeout_secs: float = 10.0,
    task_status: trio.TaskStatus[tuple[str, int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` over HTTP until ``shutdown`` is set or the call is cancelled.

    After ``shutdown`` no connection is accepted; running requests have ``grace_secs`` to finish, then their
    generations end with an error frame, and 0.5 s later what is left is cut off. Cancellation does the same
    without the grace. Neither waits for a client that does not read.

    Args:
        bind: ``"host:port"`` (port 0 takes a free one, an IPv6 host goes in brackets), ``"fd://N"`` for an
            inherited listening socket, or a bound socket; a socket given is owned and closed by this call.
        stall_timeout_secs: a client that takes nothing for this long is disconnected.
        task_status: receives ``(host, port)`` of the first listener once it listens.

    Raises:
        ValueError: ``bind`` has none of these forms.
        OSError: the address cannot be had (in use, not of this machine); the text names it.
    """
    listeners = await open_listeners(bind, stall_timeout_secs)
    closing = _Closing(grace_secs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve, app, listeners, closing, stall_timeout_secs, task_status)
        try:
            await (trio.Event() if shutdown is None else shutdown).wait()
        except trio.Cancelled:
            closing.grace_secs = 0.0
            raise
        finally:
            closing.event.set()


@attrs.define(slots=True)
class _Closing:
    """How the shielded server learns that it is to end, and how much time it has."""

    grace_secs: float
    event: trio.Event = attrs.field(factory=trio.Event)


async def _serve(
    app: QuartTrio,
    listeners: list[trio.SocketListener],
    closing: _Closing,
    stall_secs: float,
    task_status: trio.TaskStatus[tuple[str, int]],
) -> None:
    """Everything but the wait for the end. Shielded, so that streams can say why they end; never for long."""
    config = _hypercorn_config()
    context = WorkerContext(None)
    connections = _Connections(app, config, context, stall_secs)
    lifespan = Lifespan(ASGIWrapper(app), config, {})
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as lifespan_nursery:
            await lifespan_nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connections.abort_when_cancelled)
                async with trio.open_nursery() as accepting:
                    serve = partial(trio.serve_listeners, handler_nursery=nursery)
                    await accepting.start(serve, connections.handle, listeners)
                    task_status.started(_address(listeners[0].socket.getsockname()))
                    await closing.event.wait()
                    accepting.cancel_scope.cancel()
                await context.terminated.set()  # idle connections close at once
                with trio.move_on_after(closing.grace_secs):
                    await connections.wait_empty()
                end_generations(app)
                with trio.move_on_after(FLUSH_SECS):
                    await connections.wait_empty()
                nursery.cancel_scope.cancel()
            await lifespan.wait_for_shutdown()
            lifespan_nursery.cancel_scope.cancel()


def _hypercorn_config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("skippy.http")
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_SECS
    return config


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    return name[0], name[1]


async def open_listeners(bind: str | socket.socket, stall_secs: float) -> list[trio.SocketListener]:
    """Listening sockets for ``bind``; see :func:`serve_http` for its forms and errors."""
    if isinstance(bind, socket.socket):
        listeners = [_adopt(bind)]
    elif bind.startswith("fd://"):
        if not bind[5:].isdecimal():
            raise ValueError(f"{bind!r} does not name a file descriptor, such as 'fd://3'")
        listeners = [_adopt(socket.socket(fileno=int(bind[5:])))]
    else:
        host, port = parse_bind(bind)
        try:
            listeners = await trio.open_tcp_listeners(port, host=host or None)
        except OSError as error:
            raise OSError(error.errno, f"cannot serve HTTP on {bind}: {error.strerror or error}") from error
    for listener in listeners:
        if hasattr(socket, "TCP_USER_TIMEOUT") and listener.socket.family != getattr(socket, "AF_UNIX", None):
            # Inherited by accepted sockets: clients that vanish without a word are noticed in time.
            milliseconds = max(1, round(stall_secs * 1000))
            listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listeners


def parse_bind(bind: str) -> tuple[str, int]:
    """``"host:port"`` as its two parts; brackets around an IPv6 host are taken off.

    Raises:
        ValueError: not of that form.
    """
    host, colon, port = bind.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ValueError(f"{bind!r} is not of the form host:port, such as 127.0.0.1:9337 or [::1]:9337")
    return host[1:-1] if bracketed else host, int(port)


def _adopt(listening: socket.socket) -> trio.SocketListener:
    listening.listen(128)
    listening.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
