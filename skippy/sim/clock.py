"""Virtual time: it stands still while a task can run, and then goes on to whatever is due next."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import trio


class SimClock(trio.abc.Clock):
    """Trio's time; while an engine computes, that plus how far it has got.

    An engine's thread does not wait for the event loop, so what it sends leaves when it has been computed,
    which is later than the event loop's time. All engines share one clock: one computes at a time, and what
    it was ahead is slept off before anything else runs in its name.

    Attributes:
        time: Trio's, in seconds.
        ahead: seconds.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.ahead = 0.0
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.time + self.ahead

    def call_at(self, due: float, call: Callable[[], object]) -> None:
        """Call that when the time is ``due`` and no task can run; it must not raise."""
        heapq.heappush(self._calls, (due, next(self._numbers), call))

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Trio asks when no task can run, and next looks which deadlines have passed."""
        calls = self._calls
        due = min(deadline, calls[0][0]) if calls else deadline
        if self.time < due < math.inf:
            self.time = due
        while calls and calls[0][0] <= self.time:
            heapq.heappop(calls)[2]()
        return 0.0


class Alarm:
    """Calls something when it is due, at the earliest of the times it was set to; then that looks anew.

    A deadline of Trio's does the same for one task, by cancelling what it waits for, which costs ten times
    as much.
    """

    __slots__ = ("_at", "_call", "_clock")

    def __init__(self, clock: SimClock, call: Callable[[], object]) -> None:
        self._clock = clock
        self._call = call
        self._at = math.inf

    def set(self, due: float) -> None:
        """Also to inf, which is never."""
        if due < self._at:
            self._at = due
            self._clock.call_at(due, self._ring)

    def _ring(self) -> None:
        if self._at <= self._clock.time:
            self._at = math.inf
            self._call()
