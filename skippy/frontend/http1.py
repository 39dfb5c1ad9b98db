"""HTTP/1.1 for the endpoint: Hypercorn's protocol, with our words for requests that are no HTTP.

An offer to switch to another protocol (WebSocket, HTTP/2 without TLS) is ignored, as RFC 9110 §7.8 allows.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable

import h11
from hypercorn.events import RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol

from .direct import OfferingApp
from .errors import ApiError
from .responses import dump


class EnvelopeProtocol(H11Protocol):
    """Answers what h11 refuses with OpenAI's envelope instead of an empty body; offers a direct body."""

    @classmethod
    def instead_of(cls, wrapper: ProtocolWrapper, send_now: Callable[[bytes], int]) -> EnvelopeProtocol:
        """One with the arguments that ``wrapper`` gave its own.

        Args:
            send_now: as :meth:`skippy.frontend.direct.Connection.send_now`.
        """
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
        protocol.app = OfferingApp(wrapper.app, _DirectConnection(protocol, send_now))
        return protocol

    async def _check_protocol(self, event: h11.Request) -> None:
        pass  # no upgrade to HTTP/2

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
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
            (b"x-request-id", str(uuid.uuid4()).encode()),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


class _DirectConnection:
    """The connection, as a direct body uses it."""

    def __init__(self, protocol: EnvelopeProtocol, send_now: Callable[[bytes], int]) -> None:
        self._protocol = protocol
        self.send_now = send_now

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
