"""Links worse than the real ones in both directions, acknowledgements and returned tokens included."""

from __future__ import annotations

import socket

from skippy.config import Endpoint
from skippy.stage.links import ConditionedTransport, Link, Listener


class SlowTransport(ConditionedTransport):
    """Conditions what is accepted, too, so each side's frames take their time."""

    async def listen(self, endpoint: Endpoint) -> Listener:
        return _SlowListener(self, await self._inner.listen(endpoint))

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return _SlowListener(self, self._inner.adopt(sock, scheme))


class _SlowListener(Listener):
    def __init__(self, transport: SlowTransport, inner: Listener) -> None:
        self._transport = transport
        self._inner = inner

    @property
    def endpoint(self) -> Endpoint:
        return self._inner.endpoint

    async def accept(self) -> Link:
        return self._transport.condition(await self._inner.accept())

    def close(self) -> None:
        self._inner.close()
