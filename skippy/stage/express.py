"""Decode frames leave from the engine's thread.

A token crosses every stage once, so the way through a stage is the latency of the whole chain. Waking the
event loop's thread only to have it send what the engine has just computed costs more than the sending, so
where the link is idle the engine's thread hands the frame to the system itself. Everything else, and all that
does not fit this case, takes the ordinary way through the writer task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skippy.engine import StageEngine
from skippy.protocol import Buffer, Reply, encode_reply

from .session import EngineCall, Predicted
from .writer import Reservation


class Express:
    """One frame on its way past the writer: :meth:`call` is for the engine's thread, :meth:`finish` follows.

    Args:
        reservation: the right to send, released by :meth:`finish`.
        frame: what to send for what was predicted (None where the stage is not the last).
        on_error: told when the call or the sending failed.
    """

    def __init__(
        self,
        reservation: Reservation,
        frame: Callable[[Predicted], Sequence[Buffer]],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._reservation = reservation
        self._frame = frame
        self._on_error = on_error

    def call(self, compute: EngineCall) -> EngineCall:
        """``compute``, followed by the sending. Raises LinkClosed besides what ``compute`` raises."""

        def compute_and_send(engine: StageEngine) -> Predicted:
            predicted = compute(engine)
            self._reservation.send(self._frame(predicted))
            return predicted

        return compute_and_send

    def finish(self, error: Exception | None) -> None:
        """Part of :data:`Finish`: in the event loop's thread, whether or not anyone waits for the call."""
        self._reservation.release()
        if error is not None:
            self._on_error(error)


def prediction_frame(token: Predicted) -> Sequence[Buffer]:
    """The last stage's frame for a token."""
    assert isinstance(token, int)
    return [encode_reply(Reply.predicted_token(token))]
