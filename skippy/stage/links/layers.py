"""What transports over others share: a listener that wraps, and trio's stream interface on a link."""

from __future__ import annotations

from collections.abc import Callable

import trio

from skippy.config import Endpoint

from .base import Link, LinkClosed, Listener

_RECEIVE_BYTES = 64 * 1024


class LayeredListener(Listener):
    """Accepts the links of ``inner`` and puts a layer on each. Their handshakes are up to whoever accepts."""

    def __init__(self, inner: Listener, scheme: str, wrap: Callable[[Link], Link]) -> None:
        self._inner = inner
        self._scheme = scheme
        self._wrap = wrap

    @property
    def endpoint(self) -> Endpoint:
        return self._inner.endpoint.with_scheme(self._scheme)

    async def accept(self) -> Link:
        return self._wrap(await self._inner.accept())

    def close(self) -> None:
        self._inner.close()


class LinkStream(trio.abc.Stream):
    """A link as a trio stream, for libraries that speak over one.

    Attributes:
        ended: set once nothing more can be received.
        received: bytes so far.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.ended = trio.Event()
        self.received = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._link.send([data])
        except LinkClosed as exc:
            raise trio.BrokenResourceError(str(exc)) from exc

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        buffer = bytearray(max_bytes or _RECEIVE_BYTES)
        try:
            count = await self._link.receive_into(memoryview(buffer))
        except LinkClosed as exc:
            self.ended.set()
            raise trio.BrokenResourceError(str(exc)) from exc
        if not count:
            self.ended.set()
        self.received += count
        return bytes(memoryview(buffer)[:count])

    async def aclose(self) -> None:
        self._link.close()
        self.ended.set()
        await trio.lowlevel.checkpoint()
