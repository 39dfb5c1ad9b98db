"""Adaptive concurrency: how many generations at once serve most tokens. Pure: told of the time and of ends.

A hill climb with three phases. *Watching*: while requests wait without a break, a window of finished
generations is measured. *Settling*: one lane more (or fewer) is in use, and what began before that is waited
out. *Trying*: a second window is measured and compared with the first. The step is kept, and the next
one follows, or it is taken back and nothing is tried for :data:`COOLDOWN_SECS`.

One lane more must raise the throughput, and may slow a request down by no more than sharing the machine with
one more does. One lane fewer is tried where the throughput at the present number has fallen since it was
found good; it must keep the throughput and make requests faster.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal

import attrs

from .queueing import percentile_95

MIN_GAIN: Final = 1.05
"""Throughput that one lane more must bring, as a ratio."""
MAX_LOSS: Final = 0.98
"""Throughput that one lane fewer must leave, as a ratio."""
P95_TOLERANCE: Final = 1.1
FALLEN: Final = 0.9
"""A throughput of less than this part of what was found good asks for fewer lanes."""
WINDOW_SECS: Final = 5.0
WINDOW_SAMPLES: Final = 8
COOLDOWN_SECS: Final = 30.0


class Phase(enum.Enum):
    WATCHING = "watching"
    SETTLING = "settling"
    TRYING = "trying"


@attrs.frozen(slots=True)
class Measurement:
    """A window: tokens per second of all generations, and the 95th percentile of ms per token of one."""

    throughput: float
    p95_ms: float


@attrs.frozen(slots=True, kw_only=True)
class Adaptation:
    """A change of the limit, or the decision to leave it where a probe has moved it.

    Attributes:
        action: ``probe``: the limit moves and is measured; ``keep``: it stays; ``back_off``: it moves back.
        reason: why, in one word.
        baseline: what was measured before the probe.
        measured: what was measured in it; None before that, and where a failure ended it.
    """

    action: Literal["probe", "keep", "back_off"]
    reason: Literal["queueing", "slower", "throughput", "latency", "failure"]
    previous: int
    current: int
    baseline: Measurement
    measured: Measurement | None = None

    def attributes(self) -> dict[str, Any]:
        """For telemetry: throughput in tokens/s, latency in ms per token, ratios measured / baseline."""
        shown: dict[str, Any] = {
            "action": self.action,
            "reason": self.reason,
            "previous": self.previous,
            "current": self.current,
            "baseline_throughput": self.baseline.throughput,
            "baseline_p95_ms": self.baseline.p95_ms,
        }
        for name in ("throughput", "p95_ms") if self.measured is not None else ():
            before, after = getattr(self.baseline, name), getattr(self.measured, name)
            shown[name] = after
            if before:
                shown[f"{name.removesuffix('_ms')}_ratio"] = after / before
        return shown


class _Window:
    def __init__(self, now: float, tokens: int) -> None:
        self._began = now
        self._tokens = tokens
        self._samples: list[float] = []

    def add(self, ms_per_token: float) -> None:
        self._samples.append(ms_per_token)

    def measure(self, now: float, tokens: int, limit: int) -> Measurement | None:
        """None while the window is too short to say anything."""
        elapsed = now - self._began
        if elapsed < WINDOW_SECS or len(self._samples) < max(WINDOW_SAMPLES, 2 * limit):
            return None
        return Measurement((tokens - self._tokens) / elapsed, percentile_95(self._samples))


class ConcurrencyController:
    """Moves :attr:`limit` between ``minimum``, where it starts, and ``ceiling``."""

    def __init__(self, minimum: int, ceiling: int) -> None:
        if not 1 <= minimum <= ceiling:
            raise ValueError(f"the least concurrency is {minimum}; it must be 1 to {ceiling}")
        self._minimum = minimum
        self._ceiling = ceiling
        self.limit = minimum
        self.phase = Phase.WATCHING
        self._previous = minimum
        self._unsettled = 0
        self._rest_until = float("-inf")
        self._window: _Window | None = None
        self._baseline = Measurement(0.0, 0.0)
        self._step = 1
        self._good: dict[int, float] = {}
        """Throughput of limits when they were last found good."""

    def finished(self, now: float, tokens: int, ms_per_token: float, *, queued: bool) -> Adaptation | None:
        """A generation has finished.

        Args:
            now: seconds, of any clock that does not go back.
            tokens: prompt and answer tokens of all generations since the start.
            ms_per_token: time this generation ran, by its prompt and answer tokens.
            queued: whether requests wait.
        """
        if self.phase is Phase.SETTLING:
            self._unsettled -= 1
            if self._unsettled <= 0:
                self.phase, self._window = Phase.TRYING, _Window(now, tokens)
            return None
        if self.phase is Phase.WATCHING and not (queued and now >= self._rest_until):
            self._window = None
            return None
        if self._window is None:
            self._window = _Window(now, tokens)
            return None
        self._window.add(ms_per_token)
        measured = self._window.measure(now, tokens, self.limit)
        if measured is None:
            return None
        if self.phase is Phase.WATCHING:
            return self._probe(measured)
        return self._judge(now, measured)

    def failed(self, now: float) -> Adaptation | None:
        """A generation was failed by the server: a lane more that is being tried is taken back at once."""
        if self.phase is Phase.WATCHING or self._step < 0:
            return None
        return self._back_off(now, "failure", None)

    def _probe(self, baseline: Measurement) -> Adaptation | None:
        if baseline.throughput < FALLEN * self._good.get(self.limit, 0.0):
            self._step = -1
        if self.limit == self._minimum:
            self._step = 1
        self._good[self.limit] = baseline.throughput
        self._baseline, self._window = baseline, None
        return self._move() if self.limit + self._step <= self._ceiling else None

    def _move(self) -> Adaptation:
        self._previous, self.limit = self.limit, self.limit + self._step
        self.phase = Phase.SETTLING
        self._unsettled = max(self._previous, self.limit)
        return Adaptation(
            action="probe",
            reason="queueing" if self._step > 0 else "slower",
            previous=self._previous,
            current=self.limit,
            baseline=self._baseline,
        )

    def _judge(self, now: float, measured: Measurement) -> Adaptation:
        more, share = self._step > 0, self.limit / self._previous
        if measured.throughput < (MIN_GAIN if more else MAX_LOSS) * self._baseline.throughput:
            return self._back_off(now, "throughput", measured)
        if measured.p95_ms > (share * P95_TOLERANCE if more else 1.0) * self._baseline.p95_ms:
            return self._back_off(now, "latency", measured)
        self._good[self.limit] = measured.throughput
        self.phase, self._window = Phase.WATCHING, None
        return Adaptation(
            action="keep",
            reason="throughput" if more else "latency",
            previous=self._previous,
            current=self.limit,
            baseline=self._baseline,
            measured=measured,
        )

    def _back_off(
        self, now: float, reason: Literal["throughput", "latency", "failure"], measured: Measurement | None
    ) -> Adaptation:
        tried, self.limit = self.limit, self._previous
        self.phase, self._window, self._step = Phase.WATCHING, None, 1
        self._rest_until = now + COOLDOWN_SECS
        return Adaptation(
            action="back_off",
            reason=reason,
            previous=tried,
            current=self.limit,
            baseline=self._baseline,
            measured=measured,
        )
