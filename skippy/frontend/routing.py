"""What the modules of the routes share: bodies in, JSON out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio
from quart import Response, request

from .caller import Caller
from .connection import (
    connection_nursery,
    credentials,
    direct_body,
    read_json_body,
    request_id,
    route,
    shown_key,
)
from .options import FrontendOptions
from .responses import dump

T = TypeVar("T")

# Larger bodies are parsed in a thread, so that they hold up nobody's stream.
_INLINE_PARSE_BYTES: Final = 64 * 1024


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(dump(value), status=status, content_type="application/json")


def caller_of_request() -> Caller:
    """Who has sent the request that is being answered."""
    return Caller(
        nursery=connection_nursery(request),
        request_id=request_id(request),
        direct=direct_body(request),
        credentials=credentials(request),
        key=shown_key(),
        route=route(request),
        address=request.remote_addr or "",
    )


class Bodies:
    """Reads and parses the bodies of one application's requests."""

    def __init__(self, options: FrontendOptions) -> None:
        self._options = options
        self._limiter = trio.CapacityLimiter(1)

    async def parsed(self, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of the body of the request that is being answered.

        Raises:
            ApiError: as ``parse`` does; 415, 413, 408: as :func:`read_json_body` does.
        """
        options = self._options
        body = await read_json_body(
            request, limit=options.max_body_bytes, timeout_secs=options.body_timeout_secs
        )
        return await self.parse(len(body), functools.partial(parse, body))

    async def parse(self, size: int, call: Callable[[], T]) -> T:
        """``call()``, in a thread where it parses so many bytes that others would have to wait for it."""
        if size <= _INLINE_PARSE_BYTES:
            return call()
        return await trio.to_thread.run_sync(call, limiter=self._limiter)
