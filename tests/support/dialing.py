"""Dialling a stage, for tests that do not care what was agreed."""

from __future__ import annotations

from skippy.config import Endpoint
from skippy.protocol import AdmissionRequest
from skippy.stage.dialing import dial_admitted
from skippy.stage.links import Link, Transport


async def dial_stage(
    transport: Transport,
    endpoint: Endpoint,
    *,
    token: bytes | None,
    source_host: str | None,
    timeout_secs: float,
    request: AdmissionRequest | None = None,
    allow_plain: bool = False,
    retry: bool = True,
) -> Link:
    """As :func:`skippy.stage.dialing.dial_admitted`, for a connection on which no extension matters."""
    link, _ = await dial_admitted(
        transport,
        endpoint,
        token=token,
        source_host=source_host,
        timeout_secs=timeout_secs,
        request=request,
        allow_plain=allow_plain,
        retry=retry,
    )
    return link
