"""What one HTTP request gives its handler: a nursery that lives as long as the connection, and its body."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any, Final, cast

import trio
from quart import current_app, g
from quart.asgi import ASGIHTTPConnection
from quart.wrappers import Request, Websocket
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import MethodNotAllowed
from werkzeug.routing import Rule
from werkzeug.routing.exceptions import WebsocketMismatch

from .direct import EXTENSION, DirectBody
from .errors import ApiError

_NURSERY: Final = "skippy.nursery"
_STACK: Final = "skippy.stack"
# A body over the limit is read on and dropped up to this factor, so that the client gets to see the 413.
_DRAIN_FACTOR: Final = 16


class OwningConnection(TrioASGIHTTPConnection):
    """Makes the request's nursery known to the handler.

    Tasks in it are cancelled when the client disconnects and when the response is complete, also while the
    response writer is stuck in a send. That holds on every path, which a ``finally`` in a response generator
    does not give: it never runs if the client leaves before the first chunk.
    """

    _complete = False

    # The two signatures are quart-trio's, which differ from those of its base class in quart.
    async def handle_request(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, send: Any
    ) -> None:
        scope = cast(dict[str, Any], request.scope)
        scope[_NURSERY] = nursery

        async def watched_send(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._complete = True
            await send(message)

        with contextlib.ExitStack() as scope[_STACK]:
            await super().handle_request(nursery, request, watched_send)

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: Any
    ) -> None:
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        # Hypercorn reports a disconnect from inside the send that completes a response, too. Cancelling that
        # send would leave the connection neither idle (no keep-alive deadline) nor closed.
        if not self._complete:
            nursery.cancel_scope.cancel()


def connection_nursery(request: Request) -> trio.Nursery:
    """The nursery of the request's connection; tasks in it must not raise."""
    nursery: trio.Nursery = cast(dict[str, Any], request.scope)[_NURSERY]
    return nursery


def exit_stack(request: Request) -> contextlib.ExitStack:
    """What is left when the whole response has been sent, or never will be."""
    stack: contextlib.ExitStack = cast(dict[str, Any], request.scope)[_STACK]
    return stack


def direct_body(request: Request) -> DirectBody | None:
    """The way past the ASGI server for the response's body, where the server offers it."""
    extensions = cast(dict[str, Any], request.scope).get("extensions") or {}
    return cast("DirectBody | None", extensions.get(EXTENSION, {}).get("body"))


def request_id(request: Request | Websocket) -> str:
    """The client's ``x-request-id`` if it is a UUID, else a new one; always in canonical form."""
    if "request_id" not in g:
        given = request.headers.get("x-request-id", "")
        try:
            # Longest accepted form: urn:uuid: and 36 characters.
            g.request_id = str(uuid.UUID(given)) if len(given) <= 45 else str(uuid.uuid4())
        except ValueError:
            g.request_id = str(uuid.uuid4())
    return cast(str, g.request_id)


def route(request: Request | Websocket) -> str:
    """The rule of the application that the request's path fits; "" where there is none."""
    rule: Rule | None = request.url_rule
    error = request.routing_exception
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        adapter = current_app.create_url_adapter(request)
        if adapter is not None:
            # That of a WebSocket fits no plain request, whatever its method.
            with contextlib.suppress(WebsocketMismatch):
                rule, _ = adapter.match(None, next(iter(error.valid_methods)), return_rule=True)
    return "" if rule is None else rule.rule


def set_key(key: bytes | None) -> None:
    """Say which of the server's keys the request has shown; None where it asks for none."""
    g.key = key


def shown_key() -> bytes | None:
    """What :func:`set_key` was told."""
    return cast("bytes | None", g.key)


def credentials(request: Request | Websocket) -> str | None:
    """The API key that a request brings, wherever clients put one; None: none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":  # another scheme's are the whole value
        key = request.headers.get("authorization", "")
    headers = request.headers
    return key.strip() or headers.get("api-key") or headers.get("x-api-key") or None


async def read_json_body(request: Request, *, limit: int, timeout_secs: float) -> bytes:
    """The raw body of a request that says it is JSON, or says nothing about its type.

    Raises:
        ApiError: 415 for another type or a compressed body, 413 over ``limit`` bytes, 408 if not complete
            after ``timeout_secs``.
    """
    kind = request.mimetype
    # Browsers send other types across origins without asking first.
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"the content type is {kind[:100]}; it must be application/json", status=415)
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(f"the content encoding is {coding[:100]}; send the body as it is", status=415)
    too_large = ApiError(f"the request body is larger than {limit} bytes", status=413)
    if (request.content_length or 0) > limit * _DRAIN_FACTOR:
        raise too_large
    body = bytearray()
    size = 0
    with trio.move_on_after(timeout_secs) as scope:
        async for chunk in request.body:
            size += len(chunk)
            if size <= limit:
                body += chunk
            elif size > limit * _DRAIN_FACTOR:
                break
    if size > limit:
        raise too_large
    if scope.cancelled_caught:
        raise ApiError(f"the request body was not complete after {timeout_secs:g} s", status=408)
    return bytes(body)
