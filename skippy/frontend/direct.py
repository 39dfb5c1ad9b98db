"""The short way of a streamed piece of text to the client's socket.

An ASGI server takes each piece of a body through tasks, locks and checkpoints of its own. For an event of one
token that costs more than all else together that the event loop does for it, on a core that the engine wants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from hypercorn.typing import AppWrapper, ASGIReceiveCallable, ASGISendCallable, Scope

EXTENSION: Final = "skippy.direct_body"
"""The ASGI extension of requests whose server offers a :class:`DirectBody`: its member ``"body"``."""


class Connection(Protocol):
    """What a :class:`DirectBody` needs of the HTTP connection under it."""

    def frame(self, piece: bytes) -> bytes:
        """A piece of the body of the running response, as it goes over the wire."""

    def send_now(self, data: bytes) -> int:
        """Send what can be sent without waiting; the number of bytes. Never raises."""

    def send(self, data: bytes) -> Awaitable[None]:
        """Send all of it, waiting as every write does; never raises for a client that is gone."""


class DirectBody:
    """Sends pieces of one response's body at once, from any task of the event loop.

    To be used only when the response's head and all pieces that went through the server have left, and none
    is on its way: a response that waits for what to send next may let somebody else send meanwhile.

    Attributes:
        on_probe: called when the client sends no more, and only a write can tell whether it is gone. If there
            is something that may fill a pause in this body, it should be sent, in the ordinary way. Must not
            wait or raise.
    """

    def __init__(self, connection: Connection) -> None:
        self.on_probe: Callable[[], object] | None = None
        self._connection = connection
        self._chunked = False
        self._rest = b""

    def send_now(self, piece: bytes) -> bool:
        """Send a piece; whether all of it has left. If not, :meth:`flush` must come before anything else."""
        data = self._frame(piece)
        self._rest = data[self._connection.send_now(data) :]
        return not self._rest

    async def flush(self) -> None:
        """Send what :meth:`send_now` has left."""
        if self._rest:
            rest, self._rest = self._rest, b""
            await self._connection.send(rest)

    def _frame(self, piece: bytes) -> bytes:
        if self._chunked and piece:
            return _chunk(piece)
        # The framing of a body never changes, so once it is known to be chunked, nobody needs to be asked.
        data = self._connection.frame(piece)
        self._chunked = data == _chunk(piece)
        return data


class OfferingApp:
    """An ASGI application around another one, whose requests carry a :class:`DirectBody`."""

    def __init__(self, app: AppWrapper, connection: Connection) -> None:
        self._app = app
        self._connection = connection
        self._body: DirectBody | None = None

    def probe(self) -> None:
        """Ask the response that is being sent for something to send."""
        if self._body is not None and self._body.on_probe is not None:
            self._body.on_probe()

    async def __call__(
        self,
        scope: Scope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        sync_spawn: Callable[..., Any],
        call_soon: Callable[..., Any],
    ) -> None:
        if scope["type"] == "http":
            self._body = DirectBody(self._connection)
            scope["extensions"][EXTENSION] = {"body": self._body}
        await self._app(scope, receive, send, sync_spawn, call_soon)


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)
