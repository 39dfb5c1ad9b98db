"""HTTP clients' connections: Hypercorn's protocol over streams that cannot hold up the server.

Hypercorn writes inside a shielded scope, reads nothing while a pipelined request waits, and forgets tasks of
connections that broke. So each connection gets a stream whose writes have a deadline, that is read ahead, and
that ends everything on the connection once the client is known to be gone.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from quart_trio import QuartTrio

from .http1 import EnvelopeProtocol

logger = logging.getLogger(__name__)

# How long the end of a client's data may wait to be read, before the client counts as gone.
EOF_SECS: Final = 1.0
# Each may hold a request body, and takes a descriptor that links between stages may need.
MAX_CLIENTS: Final = 512
_CHUNK_BYTES: Final = 64 * 1024


class GuardedStream:
    """A client's TCP stream, as Hypercorn's server uses it.

    Writes fail when the client takes nothing for ``stall_secs``. :meth:`read_ahead` must be running.

    Attributes:
        gone: scope for all work on this connection; cancelled when the client is known to be gone.
        idle_since: when its last request ended (or it was opened), on Trio's clock; None during a request.
            ``on_idle`` is called when it is set.
    """

    def __init__(self, stream: trio.SocketStream, stall_secs: float, on_idle: Callable[[], object]) -> None:
        self._stream = stream
        self._stall_secs = stall_secs
        self._sending = False
        self._arriving, self._arrived = trio.open_memory_channel[bytes](1)
        self._eof_read = trio.Event()
        self.gone = trio.CancelScope()
        self.idle_since: float | None = trio.current_time()
        self._on_idle = on_idle
        self.socket = stream.socket  # Hypercorn asks it for the addresses

    def set_idle(self, idle: bool) -> None:
        """A request has ended, or begun."""
        self.idle_since = trio.current_time() if idle else None
        if idle:
            self._on_idle()

    async def send_all(self, data: bytes) -> None:
        view = memoryview(data)
        self._sending = True
        try:
            for start in range(0, len(view), _CHUNK_BYTES):
                with trio.move_on_after(self._stall_secs) as scope:
                    await self._stream.send_all(view[start : start + _CHUNK_BYTES])
                if scope.cancelled_caught:
                    self.abort()
                    raise trio.BrokenResourceError("the client stopped reading")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.cancel()
            raise
        self._sending = False

    def send_now(self, data: bytes) -> int:
        """Send as much as the system takes without waiting; the number of bytes.

        Never raises: what ails the connection shows in the send that must follow.
        """
        if self._sending:
            return 0
        try:
            # The socket is non-blocking, and trio has no call that tries once without a checkpoint.
            return os.write(self.socket.fileno(), data)
        except OSError:
            return 0

    async def receive_some(self, limit: int) -> bytes:
        """The next chunk, which the size limit of :meth:`read_ahead` bounds; empty at the end."""
        try:
            return await self._arrived.receive()
        except trio.EndOfChannel:
            self._eof_read.set()
            return b""

    async def read_ahead(self) -> None:
        """Read a little ahead of Hypercorn, so that a client that leaves is always noticed."""
        try:
            async with self._arriving:
                while data := await self._stream.receive_some(_CHUNK_BYTES):
                    await self._arriving.send(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.cancel()
            return
        with trio.move_on_after(EOF_SECS):
            await self._eof_read.wait()
            return
        self.gone.cancel()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        """Drop the connection. Does not wait; tasks that use it fail at once."""
        self.gone.cancel()
        if self.socket.fileno() >= 0:
            if self._sending:
                # Linger for 0 s: a reset instead of minutes of retries to a client that does not read.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()


class _ClientServer(TCPServer):
    _wrapper: ProtocolWrapper

    # Hypercorn's server makes its protocol in the middle of run(): this is where ours gets in.
    @property
    def protocol(self) -> ProtocolWrapper:
        return self._wrapper

    @protocol.setter
    def protocol(self, wrapper: ProtocolWrapper) -> None:
        wrapper.protocol = EnvelopeProtocol.instead_of(wrapper, cast(GuardedStream, self.stream).send_now)
        self._wrapper = wrapper

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            cast(GuardedStream, self.stream).set_idle(event.idle)
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        # The keep-alive timer would hold the closed connection until it is over.
        await self.idle_task.stop()


class ClientConnections:
    """The open connections, and the way to end them all.

    At MAX_CLIENTS connections a new one takes the place of the one that has been idle for longest; where all
    are busy, it is closed at once.
    """

    def __init__(self, app: QuartTrio, config: Config, context: WorkerContext, stall_secs: float) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._context = context
        self._stall_secs = stall_secs
        self._open: set[GuardedStream] = set()
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def count(self) -> int:
        return len(self._open)

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one client until it or the server has had enough."""
        if len(self._open) >= MAX_CLIENTS and not self._drop_idlest():
            logger.warning("a client was turned away: %d are connected", MAX_CLIENTS)
            stream.socket.close()
            return
        guarded = GuardedStream(stream, self._stall_secs, self._changed.unpark_all)
        self._open.add(guarded)
        state = ConnectionState({})
        try:
            with guarded.gone:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(guarded.read_ahead)
                    # Hypercorn's annotation asks for TLS streams only.
                    await _ClientServer(self._app, self._config, self._context, state, guarded).run()  # type: ignore[arg-type]
                    nursery.cancel_scope.cancel()
        except Exception:
            logger.exception("a connection failed")
        finally:
            self._open.discard(guarded)
            stream.socket.close()
            self._changed.unpark_all()

    def _drop_idlest(self) -> bool:
        """Make room for another connection; False if all are busy."""
        idle = {guarded: since for guarded in self._open if (since := guarded.idle_since) is not None}
        if not idle:
            return False
        idlest = min(idle, key=idle.__getitem__)
        idlest.abort()
        self._open.discard(idlest)
        return True

    async def wait_empty(self) -> None:
        """Wait until there is no connection."""
        while self._open:
            await self._changed.park()

    async def wait_idle(self) -> None:
        """Wait until no connection is in the middle of a request."""
        while any(guarded.idle_since is None for guarded in self._open):
            await self._changed.park()

    async def abort_when_cancelled(self) -> None:
        """Sleep until cancelled, then free the tasks that are stuck in shielded writes."""
        try:
            await trio.sleep_forever()
        finally:
            for guarded in tuple(self._open):
                guarded.abort()
