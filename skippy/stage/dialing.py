"""Making a connection to another stage: connect, credentials, ready word, admission."""

from __future__ import annotations

import errno
import math

import trio

from skippy.config import Endpoint
from skippy.protocol import AdmissionRequest, DialerHandshake, ProtocolError
from skippy.telemetry import get_logger

from .errors import DownstreamRefused, DownstreamUnavailable
from .links import Link, LinkClosed, Transport

log = get_logger("skippy.stage")

ATTEMPT_SECS = 2.0
"""Longest one attempt to connect may take."""
ANSWER_SECS = 20.0
"""Longest a stage that is ready may take to answer a request for admission, unless said otherwise."""
SILENT = (
    "it accepted the connection and is silent: it still loads, waits for the stage after it, asks for a link "
    "token, or speaks TLS or WebSocket"
)
RETRY_PAUSE_SECS = 0.1
MAX_RETRY_PAUSE_SECS = 1.0


Admitted = tuple[Link, tuple[str, ...] | None]
"""A link and the extensions that were agreed; None in their place for a peer that was asked for nothing and
only knows the ready word."""


class _Refused(Exception):
    """The stage answered, and does not want this one."""


class _Unanswered(Exception):
    """The stage ended the connection instead of answering the admission request."""


class DialWatch:
    """What goes wrong while the lanes of a stage dial the next one, told before they give up.

    Attributes:
        trouble: why the last attempt failed, for clients; None before it has come to anything, while the
            next stage is waited for, and once a lane is connected.
        waiting: for what the next stage is waited for; None while it is not.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.waiting: str | None = None
        self._logged: str | None = None

    def waits(self, endpoint: Endpoint, reason: str) -> None:
        """There is nothing to complain about yet, such as a stage that still loads."""
        self.waiting, self.trouble = _unready(endpoint, reason), None

    def failed(self, endpoint: Endpoint, reason: str) -> None:
        """An attempt failed and another one follows. Logs a reason once, not once per lane and attempt."""
        self.waiting, self.trouble = None, _unready(endpoint, reason)
        if reason != self._logged:
            self._logged = reason
            log.warning("dialling the next stage failed; trying again", endpoint=str(endpoint), reason=reason)

    def succeeded(self) -> None:
        self.trouble = self.waiting = self._logged = None


def _unready(endpoint: Endpoint, reason: str) -> str:
    return f"stage at {endpoint} did not become ready: {reason}"


async def dial_admitted(
    transport: Transport,
    endpoint: Endpoint,
    *,
    token: bytes | None,
    source_host: str | None,
    timeout_secs: float,
    request: AdmissionRequest | None = None,
    allow_plain: bool = False,
    retry: bool = True,
    watch: DialWatch | None = None,
    answer_secs: float = ANSWER_SECS,
) -> Admitted:
    """A connection to the stage at ``endpoint`` that has said it is ready and admitted this stage.

    Tries again, with growing pauses, until ``timeout_secs`` have passed (connecting and readiness together);
    with ``retry`` false only once. A stage that is still loading accepts and stays silent: that wait counts
    against the same deadline. A refusal ends it at once: what was compared does not change by waiting.

    Args:
        request: what to ask for admission with; None ends with the ready word, as plain generation 8 does.
        allow_plain: dial again, without a request, where the peer ends the connection instead of answering
            it, as one that only knows the ready word does.
        watch: is told how the dial goes.
        answer_secs: a stage that is ready answers within this, or is dialled anew.

    Raises:
        DownstreamUnavailable: the deadline passed; names the endpoint and the last reason.
        DownstreamRefused: the stage refused this one, and said why.
    """
    reason = "no answer to the connection attempt"
    pause = RETRY_PAUSE_SECS
    asked = request
    watch = watch or DialWatch()
    with trio.move_on_after(timeout_secs) as deadline:
        while True:
            try:
                with trio.fail_after(ATTEMPT_SECS):
                    link = await transport.connect(endpoint, source_host=source_host)
                reason = SILENT
                watch.waits(endpoint, reason)
                extensions = await _become_ready(link, token, asked, answer_secs)
                watch.succeeded()
                return link, extensions
            except _Refused as exc:
                watch.waits(endpoint, str(exc))
                raise DownstreamRefused(_unready(endpoint, str(exc))) from exc
            except _Unanswered as exc:
                reason = str(exc)
                if allow_plain:
                    asked = None
                    continue
            except (trio.TooSlowError, OSError, LinkClosed, ProtocolError) as exc:
                reason = _why(exc)
            if not retry:
                break
            watch.failed(endpoint, reason)
            asked = request
            await trio.sleep(pause)
            pause = min(pause * 2, MAX_RETRY_PAUSE_SECS)
    within = f" within {timeout_secs:g} s" if deadline.cancelled_caught else ""
    raise DownstreamUnavailable(f"stage at {endpoint} did not become ready{within}: {reason}")


async def _become_ready(
    link: Link, token: bytes | None, request: AdmissionRequest | None, answer_secs: float
) -> tuple[str, ...] | None:
    """The dialer's half of the handshake; closes the link if it fails. Returns as :func:`dial_admitted`."""
    patience = trio.CancelScope()
    with patience:
        return await _shake_hands(link, token, request, answer_secs, patience)
    raise OSError(errno.ETIMEDOUT, f"it was ready, and then silent for {answer_secs:g} s")


async def _shake_hands(
    link: Link,
    token: bytes | None,
    request: AdmissionRequest | None,
    answer_secs: float,
    patience: trio.CancelScope,
) -> tuple[str, ...] | None:
    handshake = DialerHandshake(token, request)
    try:
        await link.handshake()
        await _send_on(link, handshake)
        while not handshake.admitted:
            # Exactly what belongs to the handshake: what follows belongs to the reply decoder.
            buffer = bytearray(handshake.bytes_wanted)
            count = await link.receive_into(memoryview(buffer))
            if count == 0:
                wants = "it may ask for one" if token is None else "its own may be another, or none"
                raise LinkClosed(
                    "it closed the connection before it was ready; if this goes on, see its log, and the "
                    f"link token: {wants}"
                )
            handshake.receive_data(buffer[:count])
            if handshake.awaits_admission and patience.deadline == math.inf:
                patience.deadline = trio.current_time() + answer_secs
            await _send_on(link, handshake)
        return None if request is None else handshake.extensions
    except BaseException as exc:
        link.close()
        if isinstance(exc, LinkClosed) and handshake.awaits_admission:
            raise _Unanswered(
                "it closed the connection instead of answering the admission request: "
                "an older or incomplete peer"
            ) from exc
        if isinstance(exc, ProtocolError) and handshake.answer is not None:
            raise _Refused(str(exc)) from exc
        raise


async def _send_on(link: Link, handshake: DialerHandshake) -> None:
    if data := handshake.data_to_send():
        await link.send([data])


def _why(exc: Exception) -> str:
    """Why an attempt has failed."""
    if isinstance(exc, trio.TooSlowError):
        return f"no answer within {ATTEMPT_SECS:g} s"
    if isinstance(exc, ProtocolError):
        return f"its handshake failed: {exc}"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror.lower()
    return str(exc)
