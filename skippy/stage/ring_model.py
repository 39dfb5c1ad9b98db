"""How fast a chain would be with another number of decode groups: fitted to what stage 0 measures.

One wave of all sessions leaves every stage but one idle; a wave of one wastes the engine. ``N`` sessions in
``G`` groups of ``b = N / G`` rows each make, per second, ``N / max(T(b), B)`` tokens, where

* ``T(b)`` is the time of a wave's ring when it waits nowhere: network delay and the compute of all stages;
* ``B`` is what the chain needs for all G waves when it never rests: their compute, divided by the chain's
  *width*, the number of stages that then compute at the same time. That is all of them where they are
  equal and each has a processor of its own, and less where one is slow or where they share processors.

Batch sizes that were not measured lie on a line ``a + c * b``, for the steps of stage 0 and for rings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import attrs

SMOOTHING: Final = 0.2
"""Weight of a new measurement in an average."""
FORGETTING: Final = 0.001
"""What was learnt in other circumstances fades so fast, per measurement."""
FORGOTTEN: Final = 0.02
"""Weight below which a batch size counts as not measured."""
QUEUED: Final = 1.2
"""A ring that takes so many times what it should has waited somewhere."""
SHORTEST: Final = 1e-6
"""Least a step counts for, in seconds, where a clock is too coarse to see it."""
ALMOST: Final = 0.9
"""Chains that have to compute for so much of a ring may well have waves that wait."""
TAPERING: Final = 0.7
"""The slope of a prediction beyond the largest batch that was measured, as a part of the line's: a row costs
less in a larger batch. A promise that proves false is found out by one trial, an opportunity that is never
taken is not found at all."""
MEMORY: Final = 10_000
"""Cycles, a wave of each group, for which a measured cycle counts more than a predicted one."""
RECENT: Final = 9
"""Rings of which the median is taken."""
ENOUGH: Final = 3
"""Rings before their median says anything."""
FIXED_PART: Final = 0.5
"""The part of a step that does not depend on its rows, until two batch sizes were measured."""


@attrs.frozen
class Division:
    """Sessions divided into groups whose sizes differ by at most one.

    Attributes:
        sessions: at least ``groups``.
        groups: at least 1.
    """

    sessions: int
    groups: int

    @property
    def largest(self) -> int:
        """Rows of the largest group."""
        return -(-self.sessions // self.groups)

    def sum(self, time: Callable[[int], float]) -> float:
        """The sum over all groups of a time that depends on a group's rows."""
        size, larger = divmod(self.sessions, self.groups)
        return (self.groups - larger) * time(size) + (larger * time(size + 1) if larger else 0.0)


class _Averages:
    """Moving averages of a time, one per batch size. What was not measured for long fades and is dropped."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[float, float]] = {}
        self._line: tuple[float, float] | None = None

    def add(self, rows: int, seconds: float) -> None:
        value, weight = self._values.get(rows, (seconds, 0.0))
        kept = {
            size: (other, faded)
            for size, (other, old) in self._values.items()
            if (faded := old * (1 - FORGETTING)) > FORGOTTEN
        }
        self._values = kept
        self._line = None
        kept[rows] = (value + SMOOTHING * (seconds - value), min(1.0, weight + SMOOTHING))

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __getitem__(self, rows: int) -> float:
        return self._values[rows][0]

    def __contains__(self, rows: int) -> bool:
        return rows in self._values

    def line(self) -> tuple[float, float]:
        """``a, c`` of ``a + c * rows``, neither negative, by weighted least squares."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        points = [(rows, value, weight) for rows, (value, weight) in self._values.items()]
        total = sum(weight for _, _, weight in points)
        mean_rows = sum(weight * rows for rows, _, weight in points) / total
        mean = sum(weight * value for _, value, weight in points) / total
        if len(points) == 1:
            return FIXED_PART * mean, (1 - FIXED_PART) * mean / mean_rows
        spread = sum(weight * (rows - mean_rows) ** 2 for rows, _, weight in points)
        slope = sum(weight * (rows - mean_rows) * (value - mean) for rows, value, weight in points) / spread
        slope = min(max(slope, 0.0), mean / mean_rows)
        return mean - slope * mean_rows, slope

    def on_line(self, rows: int) -> float:
        """The average of this batch size, or what the line says of it."""
        fixed, each = self.line()
        return self[rows] if rows in self._values else fixed + each * rows

    def predict(self, rows: int) -> float:
        """As :meth:`on_line`, tapering off beyond the largest batch that was measured."""
        if rows in self._values:
            return self[rows]
        fixed, each = self.line()
        largest = max(self._values)
        return fixed + each * (min(rows, largest) + TAPERING * max(0, rows - largest))


@attrs.define
class _Cycle:
    """What was measured with one division.

    Attributes:
        recent: rings of its largest wave, waits included. Their median counts: some meet prefill on a later
            stage, and take ten times as long.
        seconds: between two waves of a group.
        measured: the count of cycles when it was measured last.
    """

    recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT))
    seconds: float = 0.0
    measured: float = 0.0

    @property
    def ring(self) -> float:
        return sorted(self.recent)[(len(self.recent) - 1) // 2]

    def forgotten(self, count: float) -> bool:
        return count - self.measured > MEMORY


class RingModel:
    """Predicts the tokens per second of a chain, for any number of groups.

    Args:
        stages: of the chain, at least 1.
        most: how many of them can compute at the same time, as far as is known; default: all.

    Attributes:
        width: how many stages compute at the same time when there is enough to do.
    """

    def __init__(self, stages: int, most: int | None = None) -> None:
        self._stages = stages
        self._steps = _Averages()
        self._rings = _Averages()
        self._latest: dict[int, float] = {}
        self._cycles: dict[Division, _Cycle] = {}
        self._count = 0.0
        self._most = float(stages if most is None else max(1, min(stages, most)))
        self.width = self._most

    def observe_step(self, groups: int, rows: int, seconds: float) -> None:
        """One batch of decode rows took so long at stage 0, while there were so many groups."""
        seconds = max(seconds, SHORTEST)
        latest = self._latest.get(rows, seconds)
        self._latest[rows] = latest + SMOOTHING * (seconds - latest)
        # Stages that share processors slow each other down: that is the width's, not the step's.
        if groups == 1 or len(self._steps) < 2 or seconds <= QUEUED * self._steps.on_line(rows):
            self._steps.add(rows, seconds)

    def observe_ring(self, division: Division, seconds: float) -> None:
        """A wave of the largest group came around, so long after stage 0 had sent it. Not before its step."""
        rows = division.largest
        ring = self._latest_step(rows) + seconds
        known = self._cycles.get(division)
        if known is None:
            self._cycles = {k: cycle for k, cycle in self._cycles.items() if not cycle.forgotten(self._count)}
            known = self._cycles[division] = _Cycle()
        known.recent.append(ring)
        ring = known.ring
        known.seconds = cycle = max(known.ring, division.sum(self._latest_step))
        known.measured = self._count = self._count + 1 / division.groups
        self.width += FORGETTING * (self._most - self.width)
        busy = self._is_busy(division, known)
        if not busy or (rows in self._rings and ring < self._rings[rows]):
            self._rings.add(rows, ring)
        width = min(self._most, self._work(division) / cycle)
        if busy:
            self.width += SMOOTHING * (max(1.0, width) - self.width)
        self.width = max(self.width, width)

    def _latest_step(self, rows: int) -> float:
        return self._latest[rows] if rows in self._latest else self.step(rows)

    def _is_busy(self, division: Division, measured: _Cycle) -> bool:
        """Whether waves wait for each other, on any stage."""
        rings, rows = self._rings, division.largest
        if division.groups == 1 or not len(rings):
            return False
        if measured.seconds > measured.ring or any(measured.ring > rings[b] for b in rings if b > rows):
            return True
        if len(rings) == 1:
            return False
        # A ring that waits a little must not pass for a longer one, or the next one that waits would, too.
        expected = self._work(division) / self.width
        return measured.ring > QUEUED * rings.on_line(rows) or expected > ALMOST * measured.ring

    def step(self, rows: int) -> float:
        """Seconds that stage 0 takes for a batch of so many rows. After the first step."""
        return self._steps.predict(rows)

    def ring(self, rows: int) -> float:
        """Seconds of a wave's ring, stage 0 included, if it waits nowhere. After the first ring."""
        if rows in self._rings or len(self._rings) > 1:
            return self._rings.predict(rows)
        (size,) = self._rings
        compute = self._rings[size] - self.delay
        return self.delay + compute * self.step(rows) / self.step(size)

    @property
    def delay(self) -> float:
        """Seconds of a ring in which nobody computes: what it has beyond the compute of all stages.

        How much more than stage 0 all stages compute shows in how much more a row costs. While that is not
        known, they are taken to be equal.
        """
        fixed, each = self._steps.line()
        beyond = [self._rings[size] - self._stages * self.step(size) for size in self._rings]
        if len(self._rings) > 1 and len(self._steps) > 1 and each * max(self._rings) > 0.1 * fixed:
            ring_fixed, ring_each = self._rings.line()
            return max(0.0, min(ring_fixed - fixed * ring_each / each, *beyond))
        return max(0.0, sum(beyond) / len(beyond))

    def _work(self, division: Division) -> float:
        """Seconds of compute, on all stages together, of one wave of each group."""
        delay = self.delay
        return division.sum(lambda rows: max(self.ring(rows) - delay, self.step(rows)))

    def knows(self, division: Division) -> bool:
        """Whether the chain has run with such groups not long ago."""
        cycle = self._cycles.get(division)
        return cycle is not None and len(cycle.recent) >= ENOUGH and not cycle.forgotten(self._count)

    def rate(self, division: Division) -> float:
        """Tokens per second with such groups. After the first ring.

        Waves do not overtake each other, so the largest one sets the pace of all. What was measured not long
        ago counts instead of what is predicted.
        """
        if self.knows(division):
            return division.sessions / self._cycles[division].seconds
        busy = max(self._work(division) / self.width, division.sum(self.step))
        return division.sessions / max(self.ring(division.largest), busy)
