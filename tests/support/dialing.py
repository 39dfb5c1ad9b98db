"""Dialling a stage, as a peer that a test plays."""

from __future__ import annotations

import attrs

from skippy.config import Endpoint
from skippy.protocol import AdmissionRequest
from skippy.sim.peers import lane_request
from skippy.stage import Stage
from skippy.stage.dialing import dial_admitted
from skippy.stage.links import Link, Transport


async def dial_stage(
    transport: Transport,
    endpoint: Endpoint,
    *,
    request: AdmissionRequest | None = None,
    token: bytes | None = None,
    timeout_secs: float = 5,
) -> Link:
    """As :func:`skippy.stage.dialing.dial_admitted`, for a connection on which no extension matters."""
    link, _ = await dial_admitted(
        transport, endpoint, token=token, source_host=None, timeout_secs=timeout_secs, request=request
    )
    return link


async def dial_lane(stage: Stage, *extensions: str) -> Link:
    """A lane into ``stage``, for which these extensions are agreed."""
    link, agreed = await dial_admitted(
        stage.context.transport,
        stage.endpoint,
        token=None,
        source_host=None,
        timeout_secs=5,
        request=attrs.evolve(lane_request(stage), extensions=extensions),
    )
    assert agreed == extensions
    return link
