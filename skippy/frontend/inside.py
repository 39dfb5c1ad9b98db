"""Routes that look inside: the lanes, the metrics; and the one that ends a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from quart import Response, request
from quart_trio import QuartTrio

from .connection import shown_key
from .errors import ApiError
from .generation import Generator
from .metrics import Metrics
from .requests import RunningRequests
from .routing import json_answer
from .status import ChainStatus


def add_inside_routes(
    app: QuartTrio, generator: Generator, requests: RunningRequests, metrics: Metrics
) -> None:
    """``GET /slots``, ``GET /metrics`` and ``DELETE /v1/requests/{id}``."""

    @app.get("/slots")
    async def slots() -> Response:
        return json_answer(slot_table(generator.status()))

    @app.get("/metrics")
    async def expose() -> Response:
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, content_type=content_type)

    # No form and no script of another origin can send this without asking first.
    @app.delete("/v1/requests/<request_id>")
    async def cancel(request_id: str) -> Response:
        if not requests.cancel(request_id.lower(), shown_key()):
            raise ApiError(
                f"no request of yours with the id {request_id[:100]!r} runs; ids are in the header "
                f"x-request-id of answers",
                status=404,
                code="request_not_found",
            )
        return json_answer({"id": request_id, "object": "request.cancelled", "cancelled": True})


def slot_table(status: ChainStatus) -> Mapping[str, Any]:
    """What ``GET /slots`` answers: a row for each lane, and who waits."""
    return {
        "object": "list",
        "data": [{"object": "slot", **attrs.asdict(lane)} for lane in status.lanes],
        "concurrency": status.concurrency,
        "running": status.running,
        "queue_depth": status.queue_depth,
        "queue_capacity": status.queue_capacity,
        "kv_tokens": status.kv_tokens,
        "reserved_kv_tokens": status.reserved_kv_tokens,
    }
