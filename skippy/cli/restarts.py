"""When a stage that has ended is started again, and when it is given up. No clock and no processes here."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

DEFAULT_MAX_RESTARTS = 5


@attrs.frozen(slots=True, kw_only=True)
class RestartPolicy:
    """How patient a supervisor is.

    Attributes:
        max_restarts: in a row; the crash after that many is the last one.
        first_pause_secs: longest pause before the first restart; each one in a row doubles it.
        longest_pause_secs: up to this.
        well_secs: a stage that has been up for so long is well: what was before counts no longer, as after a
            request.
    """

    max_restarts: int = DEFAULT_MAX_RESTARTS
    first_pause_secs: float = 0.25
    longest_pause_secs: float = 30.0
    well_secs: float = 60.0


class Restarts:
    """Counts the restarts of one stage.

    Args:
        chance: a random number, 0 to 1.
    """

    def __init__(self, policy: RestartPolicy, chance: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._chance = chance
        self.in_a_row = 0

    def crashed(self, served_secs: float, *, served: bool = False) -> float | None:
        """The stage has ended after its port was served for so long (0: it never was).

        ``served``: a request has gone through it meanwhile.

        Returns the pause before it is to be started again, or None if it is to be given up. Of the longest
        pause that is due, at least one half is waited for: the rest is jitter, so that stages which fall
        together do not load together each time ("equal jitter" in Brooker, Exponential Backoff And Jitter).
        """
        policy = self._policy
        if served or served_secs >= policy.well_secs:
            self.in_a_row = 0
        if self.in_a_row >= policy.max_restarts:
            return None
        longest = min(policy.longest_pause_secs, policy.first_pause_secs * 2.0 ** min(self.in_a_row, 60))
        self.in_a_row += 1
        return longest * (1 + self._chance()) / 2
