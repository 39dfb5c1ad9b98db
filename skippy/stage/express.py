"""Decode frames leave from the engine's thread.

A token crosses every stage once, so the way through a stage is the latency of the whole chain. Waking the
event loop's thread only to have it send what the engine has just computed costs more than the sending, so
where the link is idle the engine's thread hands the frame to the system itself, and the event loop hears of
it with the next message. All that does not fit this case takes the ordinary way through the writer task.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from skippy.engine import StageEngine
from skippy.protocol import EMPTY_STATS, Buffer, Message, Reply, ReplyStats, encode_reply
from skippy.telemetry import Span, Telemetry, names

from .session import EngineCall, Predicted
from .writer import Reservation

_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Express:
    """One frame on its way past the writer: the two halves of a :class:`skippy.stage.runtime.Started`.

    Args:
        reservation: the right to send, released by :meth:`settle`.
        compute: the engine call; gives a token where the stage is the last.
        frame: what to send for the token.
        on_error: told when the call or the sending failed.
    """

    __slots__ = ("_compute", "_frame", "_on_error", "_reservation")

    def __init__(
        self,
        reservation: Reservation,
        compute: EngineCall,
        frame: Callable[[Predicted], Sequence[Buffer]],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._reservation = reservation
        self._compute = compute
        self._frame = frame
        self._on_error = on_error

    def call(self, engine: StageEngine) -> bool:
        """Compute and send. True when the system did not take the whole frame, so the writer must go on.

        Raises LinkClosed besides what the engine raises.
        """
        gone = self._reservation.send(self._frame(self._compute(engine)))
        # Where the next stage is on this machine, the system has just put its reader on a core, as likely as
        # not behind this thread, whose own work is done.
        _yield_core()
        return not gone

    def settle(self, error: Exception | None) -> None:
        self._reservation.release()
        if error is not None:
            self._on_error(error)


def prediction_frame(token: Predicted, stats: ReplyStats = EMPTY_STATS) -> Sequence[Buffer]:
    """The last stage's frame for a token."""
    assert isinstance(token, int)
    return [encode_reply(Reply.predicted_token(token, stats))]


def always(buffers: Sequence[Buffer]) -> Callable[[Predicted], Sequence[Buffer]]:
    """A frame that is the same for every token: a boundary activation, which the engine fills in."""
    return lambda _: buffers


def decode_span(telemetry: Telemetry, message: Message) -> Span:
    """Around the engine's work on a data message."""
    return telemetry.span(
        names.STAGE_BINARY_LLAMA_DECODE,
        request_id=message.request_id,
        message_kind=message.kind.name,
        token_count=message.token_count,
        pos_start=message.pos_start,
    )


def timed(compute: EngineCall, telemetry: Telemetry, message: Message) -> EngineCall:
    """``compute`` inside its span, which begins and ends in the engine's thread."""

    def compute_in_span(engine: StageEngine) -> Predicted:
        with decode_span(telemetry, message):
            return compute(engine)

    return compute_in_span
