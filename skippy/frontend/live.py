"""A chain as it is now, over a WebSocket: what the web page and ``skippy top`` show."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import attrs
import trio
from quart import websocket
from quart.wrappers import Websocket
from quart_trio import QuartTrio

from .access import AccessPolicy
from .connection import credentials, request_id
from .errors import ApiError
from .responses import dump
from .status import ChainStatus

LIVE_PATH: Final = "/live"
PROTOCOL: Final = "skippy.live"
"""The WebSocket's subprotocol, which clients that name any must name."""
KEY_PROTOCOL: Final = "skippy.key."
"""Begins a second one that carries an API key, in base64url without padding: scripts of web pages can set no
header."""
PERIOD_SECS: Final = 1.0
WAITING_SNAPSHOTS: Final = 4
"""How many may wait for a watcher to take them; who lets more come is dropped."""
MAX_WATCHERS: Final = 32
_TOO_SLOW: Final = 1013
_GOING_AWAY: Final = 1001
_TAKES_NOTHING: Final = 1008


class LiveFeed:
    """Tells watchers what the chain is doing, once at the start and then every ``period_secs``.

    Nothing is looked at while nobody watches.

    Args:
        refresh: called before each snapshot that is for all.
    """

    def __init__(
        self,
        status: Callable[[], ChainStatus],
        period_secs: float = PERIOD_SECS,
        refresh: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        self._status = status
        self._refresh = refresh
        self._period_secs = period_secs
        self._watchers: set[trio.MemorySendChannel[str]] = set()
        self._wanted = trio.Event()
        self._closed = False
        self._before: tuple[float, int] | None = None
        """When the last snapshot was taken, and how many tokens there were."""

    @property
    def closed(self) -> bool:
        """The server is shutting down: there are no more snapshots."""
        return self._closed

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    async def run(self) -> None:
        """Take snapshots until cancelled."""
        while True:
            await self._wanted.wait()
            while self._watchers:
                await self._refresh()
                snapshot = self._snapshot()
                for watcher in tuple(self._watchers):
                    self._tell(watcher, snapshot)
                await trio.sleep(self._period_secs)
            self._wanted = trio.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[trio.MemoryReceiveChannel[str]]:
        """The snapshots, as JSON, for the length of the block; they end for a watcher that is too slow.

        Raises:
            ApiError: 503, there are as many watchers as there may be, or the server is shutting down.
        """
        if self._closed or len(self._watchers) >= MAX_WATCHERS:
            why = "the server is shutting down" if self._closed else f"{MAX_WATCHERS} others watch already"
            raise ApiError(why, status=503)
        send, receive = trio.open_memory_channel[str](WAITING_SNAPSHOTS)
        self._watchers.add(send)
        if len(self._watchers) > 1:
            self._tell(send, self._snapshot())  # the next one for all may be a while
        self._wanted.set()
        try:
            yield receive
        finally:
            self._watchers.discard(send)
            send.close()
            receive.close()

    def close(self) -> None:
        """End the snapshots of all watchers. Does not wait."""
        self._closed = True
        for watcher in self._watchers:
            watcher.close()
        self._watchers.clear()

    def _tell(self, watcher: trio.MemorySendChannel[str], snapshot: str) -> None:
        try:
            watcher.send_nowait(snapshot)
        except trio.WouldBlock:
            self._watchers.discard(watcher)
            watcher.close()

    def _snapshot(self) -> str:
        status, now = self._status(), trio.current_time()
        count = status.totals.generated_tokens
        rate = 0.0
        # Of a time long ago nobody wants to know.
        if self._before is not None and 0 < now - self._before[0] < 3 * self._period_secs:
            rate = (count - self._before[1]) / (now - self._before[0])
        if self._before is None or now - self._before[0] > self._period_secs / 2:
            self._before = now, count
        return dump(live_object(status, rate)).decode()


def live_object(status: ChainStatus, tokens_per_second: float) -> dict[str, Any]:
    """One snapshot, as JSON values."""
    fields = attrs.asdict(status, filter=lambda attribute, _: attribute.name != "gaps")
    return {"object": "chain.status", "tokens_per_second": round(max(0.0, tokens_per_second), 2), **fields}


def add_live_route(app: QuartTrio, feed: LiveFeed, policy: AccessPolicy) -> None:
    """The WebSocket :data:`LIVE_PATH`."""

    async def refuse_messages(scope: trio.CancelScope) -> None:
        await websocket.receive()
        await websocket.close(_TAKES_NOTHING, "this WebSocket takes no messages")
        scope.cancel()

    @app.websocket(LIVE_PATH)
    async def live() -> None:
        policy.check_key(_shown_credentials(websocket))
        with feed.watching() as snapshots:
            offered = websocket.requested_subprotocols
            if offered and PROTOCOL not in offered:
                raise ApiError(f"the WebSocket's subprotocol is {PROTOCOL}")
            await websocket.accept(
                headers={"x-request-id": request_id(websocket)}, subprotocol=PROTOCOL if offered else None
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refuse_messages, nursery.cancel_scope)
                async for snapshot in snapshots:
                    await websocket.send(snapshot)
                if feed.closed:
                    await websocket.close(_GOING_AWAY, "the server is shutting down")
                else:
                    await websocket.close(_TOO_SLOW, "what was sent was not read in time")
                nursery.cancel_scope.cancel()


def _shown_credentials(asked: Websocket) -> str | None:
    """The API key of a handshake, in a header or in a subprotocol; "" for one that cannot be read."""
    if (key := credentials(asked)) is not None:
        return key
    for name in asked.requested_subprotocols:
        if name.startswith(KEY_PROTOCOL):
            text = name.removeprefix(KEY_PROTOCOL)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("latin-1")
            except (ValueError, binascii.Error):
                return ""
    return None
