"""Links worse than the real ones in both directions, acknowledgements and returned tokens included."""

from __future__ import annotations

import itertools
import socket

import trio

from skippy.config import Endpoint, WireConditions
from skippy.stage.links import Link, Listener, Transport
from skippy.stage.links.conditioned import ConditionedLink


class SlowTransport(Transport):
    """Conditions what is dialled and what is accepted, so each side's frames take their time.

    Args:
        nursery: for the tasks of the links.
    """

    def __init__(self, inner: Transport, conditions: WireConditions, nursery: trio.Nursery) -> None:
        self._inner = inner
        self._conditions = conditions
        self._nursery = nursery
        self._streams = itertools.count()

    def slow(self, inner: Link) -> Link:
        link = ConditionedLink(inner, self._conditions, next(self._streams))
        self._nursery.start_soon(link.run)
        return link

    async def listen(self, endpoint: Endpoint) -> Listener:
        return _SlowListener(self, await self._inner.listen(endpoint))

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return _SlowListener(self, self._inner.adopt(sock, scheme))

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return self.slow(await self._inner.connect(endpoint, source_host=source_host))


class _SlowListener(Listener):
    def __init__(self, transport: SlowTransport, inner: Listener) -> None:
        self._transport = transport
        self._inner = inner

    @property
    def endpoint(self) -> Endpoint:
        return self._inner.endpoint

    async def accept(self) -> Link:
        return self._transport.slow(await self._inner.accept())

    def close(self) -> None:
        self._inner.close()
