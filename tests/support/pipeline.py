"""A chain of stages as a discrete-event simulation: waves of decode rows, and nothing else.

A wave visits every stage in order and waits in each one's queue for its turn; a stage takes ``step(rows)``
seconds of processor for it. Then it is ``delay`` seconds under way to the next stage, from the last one back
to stage 0. Where more stages compute at once than there are cores, each gets an equal share.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from skippy.stage.groups import DecodeGroups

Step = Callable[[int], float]
"""Seconds for a batch of so many rows."""


def line(fixed: float, each: float) -> Step:
    return lambda rows: fixed + each * rows


def table(seconds: dict[int, float]) -> Step:
    """A straight line between each two entries, and beyond the last ones."""
    known = sorted(seconds)

    def step(rows: int) -> float:
        low, high = next(((a, b) for a, b in itertools.pairwise(known) if rows <= b), (known[-2], known[-1]))
        return seconds[low] + (seconds[high] - seconds[low]) * (rows - low) / (high - low)

    return step


@attrs.define(eq=False)
class _Wave:
    """One group's rows on their way around.

    Attributes:
        work: seconds of processor that the stage it is at still owes it.
        began: when stage 0 began with it.
        sent: when stage 0 was done with it.
    """

    group: int
    sessions: list[int]
    work: float = 0.0
    began: float = 0.0
    sent: float = 0.0


@attrs.define
class Pipeline:
    """A running chain. Times in seconds.

    Args:
        steps: of each stage, how long it takes for a batch of so many rows.
        delay: of every link, the way back included.
        cores: that the stages share; None: one each.
        noise: standard deviation of the logarithm of each step's length.
    """

    steps: Sequence[Step]
    groups: DecodeGroups
    delay: float = 0.0
    cores: int | None = None
    noise: float = 0.0
    now: float = 0.0
    tokens: int = 0
    changes: int = 0
    _queues: list[deque[_Wave]] = attrs.field(init=False)
    _flights: list[tuple[float, int, _Wave]] = attrs.field(factory=list, init=False)
    _ready: dict[int, list[int]] = attrs.field(factory=dict, init=False)
    _away: set[int] = attrs.field(factory=set, init=False)
    _leaving: set[int] = attrs.field(factory=set, init=False)
    _chance: random.Random = attrs.field(factory=lambda: random.Random(1), init=False)

    def __attrs_post_init__(self) -> None:
        self._queues = [deque() for _ in self.steps]

    def join(self, session: int) -> None:
        """A session's prompt is done: its first row is ready."""
        self._ready.setdefault(self.groups.join(session), []).append(session)
        self._form_waves()

    def leave(self, session: int) -> None:
        """A session ends: at once where it waits, else when its row is back."""
        if session in self._away:
            self._leaving.add(session)
            return
        self._ready[self.groups.group_of(session)].remove(session)
        self.groups.leave(session)
        self._form_waves()

    def run(self, seconds: float) -> float:
        """Go on for so long; returns tokens per second."""
        end, before = self.now + seconds, self.tokens
        while self._advance(end):
            pass
        return (self.tokens - before) / seconds

    # -- events ----------------------------------------------------------------------------------------

    def _advance(self, end: float) -> bool:
        busy = [queue[0] for queue in self._queues if queue]
        share = 1.0 if self.cores is None else min(1.0, self.cores / max(1, len(busy)))
        computed = min((wave.work / share for wave in busy), default=math.inf)
        landed = min((due for due, _, _ in self._flights), default=math.inf) - self.now
        passed = max(0.0, min(computed, landed, end - self.now))
        self.now += passed
        for wave in busy:
            wave.work -= passed * share
        if passed < min(computed, landed):
            return False
        for index, queue in reversed(list(enumerate(self._queues))):
            if queue and queue[0].work <= 1e-12:
                self._computed(index, queue.popleft())
        for flight in [each for each in self._flights if each[0] <= self.now + 1e-12]:
            self._flights.remove(flight)
            self._land(flight[1], flight[2])
        return True

    def _arrive(self, index: int, wave: _Wave) -> None:
        noise = math.exp(self._chance.gauss(0, self.noise)) if self.noise else 1.0
        wave.work = self.steps[index](len(wave.sessions)) * noise
        self._queues[index].append(wave)
        if index == 0 and len(self._queues[0]) == 1:
            wave.began = self.now

    def _computed(self, index: int, wave: _Wave) -> None:
        if index == 0:
            self.groups.observe_step(len(wave.sessions), self.now - wave.began)
            wave.sent = self.now
            if self._queues[0]:
                self._queues[0][0].began = self.now
        self._flights.append((self.now + self.delay, (index + 1) % len(self.steps), wave))

    def _land(self, index: int, wave: _Wave) -> None:
        if index:
            self._arrive(index, wave)
            return
        self.tokens += len(wave.sessions)
        before = self.groups.count
        self.groups.observe_ring(len(wave.sessions), self.now - wave.sent)
        self.changes += self.groups.count != before
        for session in wave.sessions:
            self._away.discard(session)
            if session in self._leaving:
                self._leaving.discard(session)
                self.groups.leave(session)
        for session in wave.sessions:
            if session in self.groups:
                self._ready.setdefault(self.groups.between_waves(session), []).append(session)
        self._form_waves()

    def _form_waves(self) -> None:
        """Every group whose rows are all here is a wave."""
        for group, rows in sorted(self._ready.items()):
            if rows and len(rows) == self.groups.size(group):
                self._ready[group] = []
                self._away.update(rows)
                self._arrive(0, _Wave(group, rows))
