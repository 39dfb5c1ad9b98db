"""The transports of one stage: by the scheme of the endpoint, and worse on purpose where asked for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping

import attrs
import trio

from skippy.config import ConfigError, Endpoint, StageOptions

from ..nurseries import open_hidden_nursery
from .base import Link, Listener, Transport
from .conditioned import ConditionedTransport
from .tcp import TcpTransport
from .tls import TlsFiles, TlsTransport
from .websocket import WebSocketTransport


@attrs.frozen(slots=True)
class SchemeTransport(Transport):
    """Leaves each endpoint to the transport of its scheme."""

    transports: Mapping[str, Transport]

    def _of(self, scheme: str) -> Transport:
        try:
            return self.transports[scheme]
        except KeyError:
            known = ", ".join(f"{name}://" for name in self.transports)
            raise ConfigError(f"endpoint: scheme {scheme}:// is unknown; use one of {known}") from None

    async def listen(self, endpoint: Endpoint) -> Listener:
        return await self._of(endpoint.scheme).listen(endpoint)

    def adopt(self, sock: socket.socket, scheme: str) -> Listener:
        return self._of(scheme).adopt(sock, scheme)

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        return await self._of(endpoint.scheme).connect(endpoint, source_host=source_host)


@attrs.frozen(slots=True)
class StageLinks:
    """Attributes:
    transport: to listen, and to dial stage 0 for a return stream.
    downstream: to dial the next stage; conditioned where the options say so.
    """

    transport: Transport
    downstream: Transport


@contextlib.asynccontextmanager
async def open_links(options: StageOptions, transport: Transport | None = None) -> AsyncIterator[StageLinks]:
    """The links that ``options`` ask for; their tasks live as long as the block, also when it is cancelled.

    Args:
        transport: used instead of the one that knows tcp, tls, ws and wss.

    Raises:
        ConfigError: a TLS file cannot be used.
    """
    async with open_hidden_nursery() as nursery:
        scope = trio.CancelScope(shield=True)

        async def keep(task_status: trio.TaskStatus[trio.Nursery]) -> None:
            with scope:
                async with trio.open_nursery() as tasks:
                    task_status.started(tasks)
                    await trio.sleep_forever()

        tasks: trio.Nursery = await nursery.start(keep)
        try:
            transport = transport or _by_scheme(options, tasks)
            conditions = options.wire_conditions
            downstream = ConditionedTransport(transport, conditions, tasks) if conditions else transport
            yield StageLinks(transport, downstream)
        finally:
            scope.cancel()


def _by_scheme(options: StageOptions, tasks: trio.Nursery) -> SchemeTransport:
    tcp = TcpTransport()
    tls = TlsTransport(tcp, TlsFiles.of(options))
    return SchemeTransport(
        {
            "tcp": tcp,
            "tls": tls,
            "ws": WebSocketTransport(tcp, tasks, "ws", "tcp"),
            "wss": WebSocketTransport(tls, tasks, "wss", "tls"),
        }
    )
