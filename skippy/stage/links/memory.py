"""Links inside one process: for tests and simulation, and for embedding a whole chain in one host."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence

import trio

from skippy.config import Endpoint
from skippy.protocol import Buffer

from .base import Link, LinkClosed, Listener, Transport


class MemoryLink(Link):
    """One end of an in-process stream pair; a send waits until the other end has taken the bytes."""

    def __init__(
        self, stream: trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream], peer: str
    ) -> None:
        self._stream = stream
        self._peer = peer

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, buffers: Sequence[Buffer]) -> None:
        try:
            for buffer in buffers:
                if memoryview(buffer).nbytes:
                    await self._stream.send_all(bytes(buffer))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise LinkClosed(f"sending to {self._peer} failed: the other end is closed") from exc

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Takes nothing: the pair has no buffer."""
        return [memoryview(buffer).cast("B") for buffer in buffers]

    async def receive_into(self, buffer: memoryview) -> int:
        try:
            data = await self._stream.receive_some(buffer.nbytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise LinkClosed(f"receiving from {self._peer} failed: the link is closed") from exc
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        # Both halves of a lockstep pair close synchronously; aclose() would need a task.
        self._stream.send_stream.close()  # type: ignore[attr-defined]
        self._stream.receive_stream.close()  # type: ignore[attr-defined]


class MemoryListener(Listener):
    """Accepts links that :meth:`MemoryTransport.connect` makes."""

    def __init__(self, transport: MemoryTransport, endpoint: Endpoint) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._send, self._receive = trio.open_memory_channel[MemoryLink](128)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def accept(self) -> Link:
        try:
            return await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as exc:
            raise LinkClosed("the listener is closed") from exc

    async def offer(self, link: MemoryLink) -> None:
        await self._send.send(link)

    def close(self) -> None:
        self._transport.forget(self._endpoint)
        self._send.close()
        self._receive.close()


class MemoryTransport(Transport):
    """A private network: endpoints are names in one dictionary."""

    def __init__(self) -> None:
        self._listeners: dict[Endpoint, MemoryListener] = {}
        self._ports = itertools.count(1)

    async def listen(self, endpoint: Endpoint) -> Listener:
        await trio.lowlevel.checkpoint()
        if endpoint.port == 0:
            endpoint = Endpoint(endpoint.host, next(self._ports))
        if endpoint in self._listeners:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {endpoint}: address already in use")
        listener = self._listeners[endpoint] = MemoryListener(self, endpoint)
        return listener

    def forget(self, endpoint: Endpoint) -> None:
        """Called by a listener that closes."""
        self._listeners.pop(endpoint, None)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        listener = self._listeners.get(endpoint)
        if listener is None:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.ECONNREFUSED, f"nothing listens on {endpoint}")
        from trio.testing import lockstep_stream_pair  # which imports pytest, where that is installed

        ours, theirs = lockstep_stream_pair()
        await listener.offer(MemoryLink(theirs, source_host or "memory"))
        return MemoryLink(ours, str(endpoint))
