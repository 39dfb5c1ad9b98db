"""Serving the application over HTTP: listening, start-up, and a shutdown that takes no longer than it may."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Final

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from quart_trio import QuartTrio

from .app import end_generations, refuse_generations
from .clients import ClientConnections

KEEP_ALIVE_SECS: Final = 30.0
# Of a WebSocket that takes none at all.
MAX_MESSAGE_BYTES: Final = 4096
# What is left for error frames to go out once generations were ended by shutdown.
FLUSH_SECS: Final = 0.5


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

    After ``shutdown`` new generations are refused with 503; running requests have ``grace_secs`` to finish,
    then no connection is accepted any more, generations end with an error frame, and 0.5 s later what is left
    is cut off. Cancellation does the same without the grace. Neither waits for a client that does not read.

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
    connections = ClientConnections(app, config, context, stall_secs)
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
                    refuse_generations(app)
                    # Whoever comes now is told so. Where somebody else holds the socket too, he would wait.
                    with trio.move_on_after(closing.grace_secs):
                        await connections.wait_idle()
                    accepting.cancel_scope.cancel()
                await context.terminated.set()  # idle connections close at once
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
    config.websocket_max_message_size = MAX_MESSAGE_BYTES
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
    listening.listen(0xFFFF)  # the system lowers it to what it allows
    listening.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
