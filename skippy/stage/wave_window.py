"""How long the rows of a wave that have arrived wait for those that have not."""

from __future__ import annotations

from typing import Final

LEAST_SECS: Final = 0.0002
MOST_SECS: Final = 0.005
MOST_OF_STEP: Final = 0.25
"""The wait may cost at most this part of a step's time, at stage 0 of a ring's."""
_SMOOTHING: Final = 0.25


class WaveWindow:
    """Twice the time that passes, on average, between the first and the last row of a complete wave."""

    def __init__(self) -> None:
        self._spread_secs = MOST_SECS / 4

    def observe(self, spread_secs: float) -> None:
        """A row came this long after the first one of its wave, as the last one or too late.

        One that hangs says nothing of what is usual: it counts for as long as a window can be.
        """
        self._spread_secs += (min(spread_secs, MOST_SECS) - self._spread_secs) * _SMOOTHING

    def seconds(self, step_secs: float) -> float:
        """How long to wait after the first row, where a step takes ``step_secs`` (0: not known yet)."""
        most = min(MOST_SECS, step_secs * MOST_OF_STEP) if step_secs else MOST_SECS
        return max(LEAST_SECS, min(2 * self._spread_secs, most))
