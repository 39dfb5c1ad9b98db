"""HTTP clients' connections: Hypercorn's protocol over streams that cannot hold up the server.

Hypercorn writes inside a shielded scope, reads nothing while a pipelined request waits, and forgets tasks of
connections that broke. So each connection gets a stream whose writes have a deadline, that is read ahead, and
that ends everything on the connection once the client is known to be gone.

The end of a client's data is not the end of the client: it has no more requests, but may still read (each
direction of a TCP connection closes by itself; ``nc -N`` and some proxies do so). Whether it has closed both
shows in nothing but the reset with which it then answers bytes that are sent to it. So what it has asked for
in whole goes on; and as long as there is nothing else to send, bytes are sent that harm nobody: one by one
those that every response begins with, and comments in a stream.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, cast

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from quart_trio import QuartTrio

from skippy.stage.nurseries import leaves

from .http1 import EnvelopeProtocol

logger = logging.getLogger(__name__)

# When a client that sends no more is first probed: an answer that is there sooner leaves in one piece. The
# next time is as much later, the one after that twice as much, and so on. One that has closed the connection
# is found out by the second, one that leaves later within about three times the time that it has waited.
PROBE_SECS: Final = 0.5
_MAX_PROBE_SECS: Final = 60.0
# Each may hold a request body, and takes a descriptor that links between stages may need.
MAX_CLIENTS: Final = 512
_CHUNK_BYTES: Final = 64 * 1024


class GuardedStream:
    """A client's TCP stream, as Hypercorn's server uses it.

    Writes fail when the client takes nothing for ``stall_secs``, and when it is gone: then everything on the
    connection is cancelled. :meth:`read_ahead` must be running.

    Attributes:
        gone: scope for all work on this connection; cancelled when the client is known to be gone.
        idle_since: when its last request ended (or it was opened), on Trio's clock; None during a request.
            ``on_idle`` is called when it is set.
    """

    def __init__(self, stream: trio.SocketStream, stall_secs: float, on_idle: Callable[[], object]) -> None:
        self._stream = stream
        self._stall_secs = stall_secs
        self._sending = False
        self._sent_ahead = 0
        self._arriving, self._arrived = trio.open_memory_channel[bytes](1)
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
        view = memoryview(data)[self._sent_ahead :]
        self._sent_ahead = 0
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
        except BlockingIOError:
            return 0
        except OSError:
            self.gone.cancel()
            return 0

    def send_ahead(self, beginning: bytes) -> None:
        """Send one byte more of ``beginning``; the data of the next :meth:`send_all` must begin with it."""
        self._sent_ahead += self.send_now(beginning[self._sent_ahead : self._sent_ahead + 1])

    async def receive_some(self, limit: int) -> bytes:
        """The next chunk, which the size limit of :meth:`read_ahead` bounds; empty at the end."""
        try:
            return await self._arrived.receive()
        except trio.EndOfChannel:
            return b""

    async def read_ahead(self, probe: Callable[[], object]) -> None:
        """Read a little ahead of Hypercorn, so that a client that leaves is always noticed.

        Args:
            probe: has something sent, if that is possible. Called from time to time once there is no more to
                read, until cancelled.
        """
        try:
            async with self._arriving:
                while data := await self._stream.receive_some(_CHUNK_BYTES):
                    await self._arriving.send(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.gone.cancel()
            return
        pause = PROBE_SECS
        await trio.sleep(pause)
        while True:
            probe()
            await trio.sleep(pause)
            pause = min(2 * pause, _MAX_PROBE_SECS)

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
        wrapper.protocol = EnvelopeProtocol.instead_of(wrapper, cast(GuardedStream, self.stream))
        self._wrapper = wrapper

    def probe(self) -> None:
        """Have something sent, so that a client that is gone is noticed. Does not wait."""
        cast(EnvelopeProtocol, self._wrapper.protocol).probe()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            cast(GuardedStream, self.stream).set_idle(event.idle)
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        # Hypercorn's own would end the running request here.
        more = True
        while more:
            data = await self.stream.receive_some(MAX_RECV)
            await self._wrapper.handle(RawData(bytes(data)))
            more = len(data) > 0
        # The keep-alive timer would hold the connection until it is over. A request that runs closes it.
        await self.idle_task.stop()


class _Interruptible:
    """The application of one connection, which ends where what is to end the program has hit a request.

    Trio delivers a Ctrl-C to whichever task runs, and hypercorn logs whatever a group of errors holds.

    Attributes:
        error: KeyboardInterrupt or its like.
    """

    def __init__(self, app: AppWrapper, end: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._app = app
        self._end = end

    async def __call__(self, *arguments: Any) -> None:
        try:
            await self._app(*arguments)
        except BaseExceptionGroup as group:
            fatal = (error for error in leaves(group) if not isinstance(error, Exception | trio.Cancelled))
            self.error = next(fatal, None)
            if self.error is not None:
                self._end()
            raise


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
        app = _Interruptible(self._app, guarded.gone.cancel)
        try:
            with guarded.gone:
                async with trio.open_nursery() as nursery:
                    # Hypercorn's annotation asks for TLS streams only.
                    server = _ClientServer(app, self._config, self._context, state, guarded)  # type: ignore[arg-type]
                    nursery.start_soon(guarded.read_ahead, server.probe)
                    await server.run()
                    nursery.cancel_scope.cancel()
        except Exception:
            if app.error is None:
                logger.exception("a connection failed")
        finally:
            self._open.discard(guarded)
            stream.socket.close()
            self._changed.unpark_all()
        if app.error is not None:
            raise app.error

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
