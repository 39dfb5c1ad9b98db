"""Links over TCP: no delay, scatter writes, received straight into the caller's buffer."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Sequence

import trio

from skippy.config import Endpoint
from skippy.protocol import Buffer

from .base import Link, LinkClosed, Listener, Transport

_BACKLOG = 128
# An idle link whose peer's machine is gone without a word fails after 15 + 3 * 5 seconds.
_KEEPALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
# Errors of accept() that concern one peer or a passing shortage, not the listener.
_ACCEPT_TRANSIENT = {errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EHOSTUNREACH}
_ACCEPT_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TcpLink(Link):
    """A connected TCP socket."""

    def __init__(self, sock: trio.socket.SocketType, peer: str) -> None:
        self._socket = sock
        self._peer = peer
        self._closing = threading.Lock()
        self._drained = False
        """The last receive took all there was, so the next one has to wait."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, buffers: Sequence[Buffer]) -> None:
        views = _views(buffers)
        try:
            while views:
                _consume(views, await self._socket.sendmsg(views))
        except (OSError, trio.ClosedResourceError) as exc:
            raise LinkClosed(f"sending to {self._peer} failed: {_reason(exc)}") from exc

    @property
    def sends_from_any_thread(self) -> bool:
        return True

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        views = _views(buffers)
        try:
            # The socket is non-blocking, and trio has no call that tries once without a checkpoint. The lock
            # keeps the descriptor ours until the call is over: a number closed meanwhile may be another link.
            with self._closing:
                sent = os.writev(self._socket.fileno(), views)
        except BlockingIOError:
            return views
        except OSError as exc:
            raise LinkClosed(f"sending to {self._peer} failed: {_reason(exc)}") from exc
        _consume(views, sent)
        return views

    async def receive_into(self, buffer: memoryview) -> int:
        try:
            count = await self._receive_drained(buffer) if self._drained else None
            if count is None:
                count = await self._socket.recv_into(buffer)
            self._drained = count < buffer.nbytes
            return count
        except (OSError, trio.ClosedResourceError) as exc:
            raise LinkClosed(f"receiving from {self._peer} failed: {_reason(exc)}") from exc

    @property
    def descriptor(self) -> int | None:
        number = self._socket.fileno()
        return None if number < 0 else number

    def receive_nowait(self, buffer: memoryview, *, ready: bool = False) -> int | None:
        if self._drained and not ready:
            return None
        try:
            with self._closing:
                count = os.readv(self._socket.fileno(), [buffer])
        except BlockingIOError:
            self._drained = True
            return None
        except OSError as exc:
            raise LinkClosed(f"receiving from {self._peer} failed: {_reason(exc)}") from exc
        self._drained = count < buffer.nbytes
        return count

    async def _receive_drained(self, buffer: memoryview) -> int | None:
        """Wait first, then receive: as trio does after an attempt that failed. None if it fails."""
        if self._socket.fileno() < 0:
            # Nobody may wait for descriptor -1: trio takes the attempt down for good, also for other sockets.
            raise trio.ClosedResourceError
        await trio.lowlevel.wait_readable(self._socket)
        try:
            return os.readv(self._socket.fileno(), [buffer])
        except BlockingIOError:
            return None

    def close(self) -> None:
        with self._closing:
            self._socket.close()


class TcpListener(Listener):
    """A listening TCP socket."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        host, port = sock.getsockname()[:2]
        self._endpoint = Endpoint(host, port)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def accept(self) -> Link:
        while True:
            try:
                sock, address = await self._socket.accept()
                return TcpLink(sock, _address_text(address))
            except trio.ClosedResourceError as exc:
                raise LinkClosed("the listener is closed") from exc
            except OSError as exc:
                if exc.errno in _ACCEPT_TRANSIENT:
                    continue
                if exc.errno in _ACCEPT_SHORTAGE:
                    # Descriptors are freed by connections that end; there is no event to wait for.
                    await trio.sleep(0.1)
                    continue
                raise LinkClosed(f"accepting on {self._endpoint} failed: {_reason(exc)}") from exc

    def close(self) -> None:
        self._socket.close()


class TcpTransport(Transport):
    """TCP over IPv4 and IPv6."""

    async def listen(self, endpoint: Endpoint) -> Listener:
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await sock.bind((endpoint.host, endpoint.port))
            sock.listen(_BACKLOG)
        except (OSError, UnicodeError) as exc:
            sock.close()
            raise OSError(_number(exc), f"cannot listen on {endpoint}: {_reason(exc)}") from exc
        return TcpListener(sock)

    def adopt(self, sock: socket.socket, scheme: str = "tcp") -> Listener:
        sock.setblocking(False)
        return TcpListener(trio.socket.from_stdlib_socket(sock))

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        family, address = await _resolve(endpoint, source_host)
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            if source_host is not None:
                await sock.bind((source_host, 0))
            await sock.connect(address)
            refuse_self_connection(sock, endpoint)
            return TcpLink(sock, str(endpoint))
        except OSError as exc:
            sock.close()
            raise OSError(_number(exc), _reason(exc)) from exc  # trio's text names the address once more
        except BaseException:
            sock.close()
            raise


def refuse_self_connection(sock: trio.socket.SocketType, endpoint: Endpoint) -> None:
    """Raise OSError if the socket is connected to itself.

    TCP does that on loopback when nothing listens and the system picks the very port that is dialled as the
    source port. Left alone it would look like a silent stage, and keep the real one from binding.
    """
    if sock.getsockname() == sock.getpeername():
        # Reset instead of closing: no TIME_WAIT may keep the port from the stage that wants it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise OSError(errno.ECONNREFUSED, f"nothing listens on {endpoint}")


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    return [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]


def _consume(views: list[memoryview], sent: int) -> None:
    """Take ``sent`` bytes off the front, in place."""
    while views and sent >= views[0].nbytes:
        sent -= views.pop(0).nbytes
    if sent:
        views[0] = views[0][sent:]


async def _resolve(
    endpoint: Endpoint, source_host: str | None
) -> tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]:
    """One address for the endpoint: of the source's family where pinned, else IPv4 first, else any."""
    try:
        infos = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as exc:
        raise OSError(_number(exc), f"{endpoint.host}: {_reason(exc)}") from exc
    wanted = socket.AF_INET
    if source_host is not None:
        version = ipaddress.ip_address(source_host).version
        wanted = socket.AF_INET if version == 4 else socket.AF_INET6
        if not any(info[0] == wanted for info in infos):
            raise OSError(
                errno.EINVAL,
                f"{endpoint} has no IPv{version} address, but bind_addr pins the source to {source_host}",
            )
    best = min(infos, key=lambda info: info[0] != wanted)
    return best[0], best[4]  # type: ignore[return-value]


def _address_text(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return str(Endpoint(str(address[0]), int(address[1])))
    return str(address)


def _number(exc: OSError | UnicodeError) -> int:
    return exc.errno if isinstance(exc, OSError) and exc.errno is not None else errno.EINVAL


def _reason(exc: BaseException) -> str:
    if isinstance(exc, UnicodeError):
        return "not a host name"  # what the encoder of names says is no help
    if isinstance(exc, socket.gaierror):
        return str(exc.strerror)  # its numbers are not those of errno
    if isinstance(exc, OSError) and exc.errno is not None:
        return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__
