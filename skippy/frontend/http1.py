"""HTTP/1.1 for the endpoint: Hypercorn's protocol, with our words for requests that are no HTTP.

An offer to switch to another protocol (WebSocket, HTTP/2 without TLS) is ignored, as RFC 9110 §7.8 allows,
but for a WebSocket where there is one.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections import Counter
from dataclasses import replace
from typing import Final, Protocol

import h11
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Event as StreamEvent, Response
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.protocol.ws_stream import Handshake

from .direct import OfferingApp
from .errors import ApiError
from .guard import SECURITY_HEADERS
from .live import LIVE_PATH
from .responses import dump

# With which every response of h11's begins.
_BEGINNING: Final = b"HTTP/1.1 "
# What decides who is served must not have a second meaning for a proxy in between.
_SINGLE: Final = (b"origin", b"authorization", b"api-key", b"x-api-key", b"content-type", b"x-request-id")
_ABSOLUTE: Final = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)([/?].*)?", re.IGNORECASE)


class ClientStream(Protocol):
    """What the protocol needs of the client's stream, beyond what Hypercorn does."""

    def send_now(self, data: bytes) -> int:
        """As :meth:`skippy.frontend.direct.Connection.send_now`."""

    def send_ahead(self, beginning: bytes) -> None:
        """Send one more byte of what the next data that is sent will begin with."""


class _Connection(h11.Connection):
    """Refuses requests that could be read in two ways, which h11 takes.

    Looks at nothing behind a request that was to be the last, as RFC 9112 §9.6 asks. h11 takes that for an
    error, to which the answer to the request would be lost: ``echo`` ends what it sends with a line feed.
    """

    def receive_data(self, data: bytes) -> None:
        if self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check(event)
        return event


def _check(request: h11.Request) -> None:
    """Raises h11.RemoteProtocolError."""
    counts = Counter(name for name, _ in request.headers)
    if counts[b"content-length"] and counts[b"transfer-encoding"]:
        # RFC 9112 §6.3: an attempt at request smuggling, perhaps.
        raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are given")
    for name in _SINGLE:
        if counts[name] > 1:
            raise h11.RemoteProtocolError(f"the header {name.decode()} is given more than once")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """A request whose target names the server, as for a proxy: that name counts, whatever Host says.

    Source: RFC 9112 §3.2.2.
    """
    match = _ABSOLUTE.fullmatch(request.target)
    if match is None:
        return request
    path = match[2] or b"/"
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[
            (name, match[1] if name.lower() == b"host" else value)
            for name, value in request.headers.raw_items()
        ],
        http_version=request.http_version,
    )


class EnvelopeProtocol(H11Protocol):
    """Answers what h11 refuses with OpenAI's envelope instead of an empty body; offers a direct body."""

    _stream: ClientStream
    _offering: OfferingApp

    @classmethod
    def instead_of(cls, wrapper: ProtocolWrapper, stream: ClientStream) -> EnvelopeProtocol:
        """One with the arguments that ``wrapper`` gave its own, for the client of ``stream``."""
        protocol = cls(
            wrapper.app,
            wrapper.config,
            wrapper.context,
            wrapper.task_group,
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            wrapper.send,
        )
        limit = wrapper.config.h11_max_incomplete_size
        protocol.connection = _Connection(h11.SERVER, max_incomplete_event_size=limit)
        protocol._stream = stream
        protocol._offering = OfferingApp(wrapper.app, _DirectConnection(protocol, stream))
        protocol.app = protocol._offering
        return protocol

    def probe(self) -> None:
        """Have a little sent of what the client waits for, where that can be. Does not wait."""
        if self.connection.our_state is h11.SEND_RESPONSE:
            self._stream.send_ahead(_BEGINNING)
        elif self.connection.our_state is h11.SEND_BODY:
            self._offering.probe()

    async def _check_protocol(self, event: h11.Request) -> None:
        pass  # no upgrade to HTTP/2

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData) and not event.data and isinstance(self.connection, H11WSConnection):
            event = Closed()  # no direction of a WebSocket ends by itself
        await super().handle(event)

    async def stream_send(self, event: StreamEvent) -> None:
        # Hypercorn answers some handshakes itself, and what the application could not.
        if isinstance(event, Response) and all(name.lower() != b"x-request-id" for name, _ in event.headers):
            event = replace(event, headers=[*event.headers, *_own_headers()])
        # Hypercorn closes after an answer to a request whose body has not come, and says nothing of it: the
        # next request of a client that keeps connections would be lost.
        if isinstance(event, Response) and self.connection.their_state is h11.SEND_BODY:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _create_stream(self, request: h11.Request) -> None:
        request = _in_origin_form(request)
        # Compressed messages may be much larger than they look.
        ignored = [b"sec-websocket-extensions"]
        # Handshakes are read as ASCII. What is none is a plain request, which is refused.
        readable = all(value.isascii() for _, value in request.headers)
        version = request.http_version.decode()
        offers = any(name == b"upgrade" for name, _ in request.headers)
        valid = readable and offers and Handshake(list(request.headers), version).is_valid()
        if not valid or request.target.partition(b"?")[0] != LIVE_PATH.encode():
            ignored.append(b"upgrade")
        items = request.headers.raw_items()
        headers = [(name, value) for name, value in items if name.lower() not in ignored]
        if len(headers) < len(request.headers):
            request = h11.Request(
                method=request.method,
                target=request.target,
                headers=headers,
                http_version=request.http_version,
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        # Called where h11's error is being handled.
        body = dump(_refusal(status_code, self.config.h11_max_incomplete_size, sys.exception()).envelope())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *_own_headers(),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _own_headers() -> list[tuple[bytes, bytes]]:
    """What is on every response."""
    security = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
    return [(b"x-request-id", str(uuid.uuid4()).encode()), *security]


class _DirectConnection:
    """The connection, as a direct body uses it."""

    def __init__(self, protocol: EnvelopeProtocol, stream: ClientStream) -> None:
        self._protocol = protocol
        self.send_now = stream.send_now

    def frame(self, piece: bytes) -> bytes:
        return self._protocol.connection.send(h11.Data(data=piece))

    async def send(self, data: bytes) -> None:
        await self._protocol.send(RawData(data))


def _refusal(status: int, head_limit: int, error: BaseException | None) -> ApiError:
    if status == 431:
        text = f"the head of the request is larger than {head_limit} bytes"
        return ApiError(text, status=status, code="request_header_fields_too_large")
    reason = f": {error}" if error is not None and str(error) else ""
    return ApiError(f"the request is not valid HTTP/1.1{reason}", status=status)
