"""Making a connection to another stage and getting it ready."""

from __future__ import annotations

import trio

from skippy.config import Endpoint
from skippy.protocol import READY_WORD, DialerHandshake, ProtocolError

from .errors import DownstreamUnavailable
from .links import Link, LinkClosed, Transport

ATTEMPT_SECS = 2.0
"""Longest one attempt to connect may take."""
RETRY_PAUSE_SECS = 0.1
MAX_RETRY_PAUSE_SECS = 1.0


async def dial_stage(
    transport: Transport,
    endpoint: Endpoint,
    *,
    token: bytes | None,
    source_host: str | None,
    timeout_secs: float,
    retry: bool = True,
) -> Link:
    """A connection to the stage at ``endpoint`` that has said it is ready.

    Tries again, with growing pauses, until ``timeout_secs`` have passed (connecting and readiness together);
    with ``retry`` false only once. A stage that is still loading accepts and stays silent: that wait counts
    against the same deadline.

    Raises:
        DownstreamUnavailable: the deadline passed; names the endpoint and the last reason.
    """
    reason = "no answer to the connection attempt"
    pause = RETRY_PAUSE_SECS
    with trio.move_on_after(timeout_secs) as deadline:
        while True:
            try:
                with trio.fail_after(ATTEMPT_SECS):
                    link = await transport.connect(endpoint, source_host=source_host)
                reason = (
                    "it accepted the connection and is silent: it still loads, waits for the stage after it, "
                    "asks for a link token, or speaks TLS or WebSocket"
                )
                await _become_ready(link, token)
                return link
            except trio.TooSlowError:
                reason = f"no answer within {ATTEMPT_SECS:g} s"
            except (OSError, LinkClosed) as exc:
                reason = _text(exc)
            except ProtocolError as exc:
                reason = f"its handshake failed: {exc}"
            if not retry:
                break
            await trio.sleep(pause)
            pause = min(pause * 2, MAX_RETRY_PAUSE_SECS)
    within = f" within {timeout_secs:g} s" if deadline.cancelled_caught else ""
    raise DownstreamUnavailable(f"stage at {endpoint} did not become ready{within}: {reason}")


async def _become_ready(link: Link, token: bytes | None) -> None:
    """The dialer's half of the handshake; closes the link if it fails."""
    handshake = DialerHandshake(token)
    try:
        await link.handshake()
        await link.send([handshake.data_to_send()])
        # Exactly the ready word and no more: what follows belongs to the reply decoder.
        ready = bytearray(len(READY_WORD))
        while not handshake.admitted:
            count = await link.receive_into(memoryview(ready))
            if count == 0:
                raise LinkClosed("it closed the connection before it was ready")
            handshake.receive_data(ready[:count])
            del ready[:count]
    except BaseException:
        link.close()
        raise


def _text(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror.lower()
    return str(exc)
