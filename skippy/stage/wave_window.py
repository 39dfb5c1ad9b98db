"""How long the rows of a wave that have arrived wait for those that have not."""

from __future__ import annotations

from typing import Final

LEAST_SECS: Final = 0.0002
MOST_SECS: Final = 0.005
MOST_OF_STEP: Final = 0.25
"""The wait may cost at most this part of a step's time."""
_SMOOTHING: Final = 0.25


class WaveWindow:
    """Twice the time that passes, on average, between the first and the last row of a complete wave."""

    def __init__(self) -> None:
        self._spread_secs = MOST_SECS / 4

    def observe(self, spread_secs: float) -> None:
        """A wave was complete this long after its first row."""
        self._spread_secs += (spread_secs - self._spread_secs) * _SMOOTHING

    def seconds(self, step_secs: float) -> float:
        """How long to wait after the first row, where a step takes ``step_secs`` (0: not known yet)."""
        most = min(MOST_SECS, step_secs * MOST_OF_STEP) if step_secs else MOST_SECS
        return max(LEAST_SECS, min(2 * self._spread_secs, most))
