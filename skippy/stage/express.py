"""Decode frames leave from the engine's thread.

A token crosses every stage once, so the way through a stage is the latency of the whole chain. Waking the
event loop's thread only to have it send what the engine has just computed costs more than the sending, so
where the link is idle the engine's thread hands the frame to the system itself, and the event loop hears of
it with the next message. All that does not fit this case takes the ordinary way through the writer task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skippy.protocol import Buffer, Message, Reply, ReplyStats, encode_prediction, encode_reply
from skippy.telemetry import Level, Span, Telemetry, names

from .intake import ONE_TOKEN
from .session import Predicted, Sink
from .work import Work
from .writer import Reservation

Frame = Callable[[Predicted, Work], Sequence[Buffer]]
"""What to send once a work's rows have run."""


class Express:
    """One frame on its way past the writer: what follows a :class:`skippy.stage.work.Work`.

    Args:
        reservation: the right to send, released by :meth:`settle`.
        frame: what to send.
        on_error: told when the rows or the sending failed.
    """

    __slots__ = ("_frame", "_lent", "_on_error", "_reservation", "_settled")

    def __init__(self, reservation: Reservation, frame: Frame, on_error: Callable[[Exception], None]) -> None:
        self._reservation = reservation
        self._frame = frame
        self._on_error = on_error
        self._lent = False
        self._settled = False

    @property
    def pending(self) -> bool:
        """Not settled yet, so the right to send has not been given up."""
        return not self._settled

    def lend(self, on_wanted: Callable[[], object]) -> None:
        """Keep the right to send for steps that follow, until :meth:`give_back`.

        ``on_wanted`` is called in the event loop's thread when somebody else wants to send.
        """
        self._lent = True
        self._reservation.on_wanted = on_wanted

    def give_back(self) -> None:
        """No further step follows this one. In the event loop's thread."""
        if self._lent:
            self._lent = False
            self._reservation.on_wanted = None
            if self._settled:
                self._reservation.release()

    def followed_by(self, frame: Frame) -> Express:
        """The next step with the same right to send. In the engine's thread."""
        following = Express(self._reservation, frame, self._on_error)
        following._lent = True
        return following

    def sink(self, predicted: Predicted, work: Work) -> bool:
        """Send. True when the system did not take the whole frame, so the writer must go on.

        Raises LinkClosed.
        """
        return not self._reservation.send(self._frame(predicted, work))

    def settle(self, error: Exception | None) -> None:
        self._settled = True
        if not self._lent:
            self._reservation.release()
        if error is not None:
            self._on_error(error)


def prediction_frame(predicted: Predicted, work: Work, stats: ReplyStats) -> Sequence[Buffer]:
    """The last stage's frame for a token, with statistics."""
    assert isinstance(predicted, int)
    return [encode_reply(Reply.predicted_token(predicted, stats))]


def token_frame(predicted: Predicted, work: Work) -> Sequence[Buffer]:
    """The last stage's frame for a token."""
    assert isinstance(predicted, int)
    return [encode_prediction(predicted)]


def decode_span(telemetry: Telemetry, message: Message, stage_index: int) -> Span:
    """Around the engine's work on a data message, its wait for the engine included."""
    return telemetry.span(_name(message, stage_index), **_attributes(message))


def reported(sink: Sink, telemetry: Telemetry, message: Message, stage_index: int) -> Sink:
    """``sink``, which also records the step whose rows have run."""

    def report(predicted: Predicted, work: Work) -> bool:
        telemetry.emit(
            _name(message, stage_index),
            level=Level.DEBUG,
            compute_ms=work.compute_us / 1000,
            decode_batch_size=work.batch_size,
            **_attributes(message),
        )
        return sink(predicted, work)

    return report


def _name(message: Message, stage_index: int) -> str:
    """Decode steps of stage 0 have a name of their own."""
    if stage_index == 0 and message.kind in ONE_TOKEN:
        return names.STAGE_OPENAI_STAGE0_LLAMA_DECODE
    return names.STAGE_BINARY_LLAMA_DECODE


def _attributes(message: Message) -> dict[str, Any]:
    return {
        "request_id": message.request_id,
        "message_kind": message.kind.name,
        "token_count": message.token_count,
        "pos_start": message.pos_start,
    }
