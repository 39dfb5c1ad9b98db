"""The connections of a stage's listener: bounded in number, and strangers give way to newcomers."""

from __future__ import annotations

import trio

from skippy.telemetry import names

from .context import StageContext, log
from .links import Link, LinkClosed, Listener
from .upstream import serve_connection

SPARE_CONNECTIONS = 256
"""Links served at once beyond one per session, for peers that come while the lanes they replace are still
ending, and for strangers; more wait in the system's backlog."""


async def serve_listener(context: StageContext, listener: Listener) -> None:
    """Accept until the listener fails; each connection is a task of its own.

    When all places are taken, the connection that has waited longest to be admitted is closed for the next:
    peers that connect and do nothing cannot keep the others out. Raises LinkClosed.
    """
    connections = _Connections(context)
    async with trio.open_nursery() as nursery:
        while True:
            try:
                link = await listener.accept()
            except LinkClosed as exc:
                log.error("the listener failed", endpoint=str(listener.endpoint), error=str(exc))
                raise
            try:
                await connections.make_room()
            except trio.Cancelled:
                link.close()
                raise
            nursery.start_soon(connections.serve, link)


class _Connections:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._places = trio.Semaphore(context.config.lane_count + SPARE_CONNECTIONS)
        self._strangers: dict[Link, trio.CancelScope] = {}
        """Those not admitted yet, longest here first."""

    async def make_room(self) -> None:
        """Wait for a place, at the cost of a stranger where there is none; ``serve`` gives it back."""
        if self._places.value == 0 and self._strangers:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
        await self._places.acquire()

    async def serve(self, link: Link) -> None:
        try:
            with trio.CancelScope() as scope:
                self._strangers[link] = scope
                await serve_connection(
                    self._context, link, on_admitted=lambda: self._strangers.pop(link, None)
                )
            if scope.cancelled_caught:
                self._context.telemetry.emit(
                    names.STAGE_BINARY_CONNECTION_ERROR,
                    peer_addr=link.peer,
                    error="not admitted yet when a newer connection needed the place",
                )
        finally:
            self._strangers.pop(link, None)
            self._places.release()
