"""How long the rows of a wave that have arrived wait for those that have not."""

from __future__ import annotations

from typing import Final

LEAST_SECS: Final = 0.0002
MOST_SECS: Final = 0.010
MOST_OF_STEP: Final = 0.5
"""The wait may cost at most this part of a step's time."""
_FADING: Final = 0.98
"""How much of what the slowest row took is still expected one wave later."""


class WaveWindow:
    """Twice what the slowest row of late has taken after the first row of its wave.

    A wave that leaves without a row costs one more batch on this stage and all later ones; waiting for rows
    that come costs nothing. So what counts is the slowest row, not the usual one: on a busy machine most come
    at once, and some only when their reader gets a core.
    """

    def __init__(self) -> None:
        self._slowest_secs = MOST_SECS / 2

    def observe(self, spread_secs: float) -> None:
        """A row came this long after the first one of its wave, as the last one or too late.

        One that hangs says nothing of what is usual: it counts for as long as a window can be.
        """
        self._slowest_secs = max(min(spread_secs, MOST_SECS), self._slowest_secs * _FADING)

    def seconds(self, step_secs: float) -> float:
        """How long to wait after the first row, where a step takes ``step_secs`` (0: not known yet)."""
        most = min(MOST_SECS, step_secs * MOST_OF_STEP) if step_secs else MOST_SECS
        return max(LEAST_SECS, min(2 * self._slowest_secs, most))
