"""Who is admitted next, and how long the others may wait. Pure: no clock, no tasks."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator
from typing import Final, Generic, Protocol, TypeVar

import attrs

MAX_PASSES: Final = 32
"""How often a request that does not fit yet may be overtaken before the pool is kept free for it."""
ESTIMATE_ALPHA: Final = 0.25
ESTIMATE_SAMPLES: Final = 64


@attrs.frozen(slots=True)
class Demand:
    """What a generation takes: positions in the KV cache, all of which may come to be used."""

    prompt_tokens: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens


class Waiting(Protocol):
    """A request in a :class:`WaitingLine`, which keeps count of how often it was overtaken."""

    passed: int

    @property
    def demand(self) -> Demand: ...


W = TypeVar("W", bound=Waiting)


class WaitingLine(Generic[W]):
    """Requests in order of arrival; one that fits may overtake those that do not fit yet.

    After :data:`MAX_PASSES` the oldest has the pool reserved: nobody else is chosen until it fits.
    """

    def __init__(self) -> None:
        self._line: list[W] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[W]:
        return iter(self._line)

    def join(self, request: W) -> None:
        self._line.append(request)

    def leave(self, request: W) -> None:
        self._line.remove(request)

    def take(self, free_tokens: int) -> W | None:
        """The request to admit now, out of the line; None if none may be."""
        if not self._line:
            return None
        reserved = self._line[0].passed >= MAX_PASSES
        candidates = self._line[:1] if reserved else self._line
        chosen = next((request for request in candidates if request.demand.tokens <= free_tokens), None)
        if chosen is None:
            return None
        index = self._line.index(chosen)
        for older in self._line[:index]:
            older.passed += 1
        del self._line[index]
        return chosen


class Estimate:
    """What to expect next: the larger of a moving average and the 95th percentile of the last samples.

    Samples count by their weight. A rate per token must have the tokens as its weight: the first token of a
    short prompt took its turn with others, which would seem to be the price of each token of a long one.
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        """Moving averages, whose ratio is the average of the samples."""
        self._samples: deque[tuple[float, float]] = deque(maxlen=ESTIMATE_SAMPLES)

    def observe(self, sample: float, weight: float = 1.0) -> None:
        alpha = ESTIMATE_ALPHA if self._samples else 1.0
        self._sum += alpha * (sample * weight - self._sum)
        self._weight += alpha * (weight - self._weight)
        self._samples.append((sample, weight))

    @property
    def value(self) -> float | None:
        """None before the first sample."""
        return max(self._sum / self._weight, self._percentile_95()) if self._samples else None

    def _percentile_95(self) -> float:
        ordered = sorted(self._samples)
        up_to = itertools.accumulate(weight for _, weight in ordered)
        most = 0.95 * sum(weight for _, weight in ordered)
        return next(sample for (sample, _), so_far in zip(ordered, up_to, strict=True) if so_far >= most)


class ServiceRates:
    """What tokens have cost in generations that have finished, and how long the answers were."""

    def __init__(self) -> None:
        self._prefill_ms = Estimate()
        self._decode_ms = Estimate()
        self._answer = Estimate()

    def observe(self, prompt_tokens: int, prefill_ms: float, generated: int, decode_ms: float) -> None:
        """A generation has finished: ``prefill_ms`` to its first token, ``decode_ms`` for the others.

        ``prompt_tokens``: those of the prompt that were computed.
        """
        if prompt_tokens:
            self._prefill_ms.observe(prefill_ms / prompt_tokens, prompt_tokens)
        if generated > 1:
            self._decode_ms.observe(decode_ms / (generated - 1), generated - 1)
        self._answer.observe(generated)

    def answer_tokens(self, max_tokens: int) -> float:
        """Tokens that an answer will have: most are shorter than they may be."""
        expected = self._answer.value
        return max_tokens if expected is None else min(max_tokens, expected)

    def secs(self, prompt_tokens: float, answer_tokens: float) -> float | None:
        """How long this work takes on one lane; None until something like it has finished."""
        total = 0.0
        for tokens, ms in ((prompt_tokens, self._prefill_ms.value), (answer_tokens, self._decode_ms.value)):
            if tokens:
                if ms is None:
                    return None
                total += tokens * ms
        return total / 1000


def percentile_95(samples: Collection[float]) -> float:
    """The 95th percentile by nearest rank of at least one sample."""
    return sorted(samples)[math.ceil(0.95 * len(samples)) - 1]


def default_queue_capacity(concurrency: int) -> int:
    """Requests that may wait on top of the running ones, unless configured otherwise."""
    return min(max(8 * concurrency, 16), 256)


def work_limit_secs(prompt_tokens: int, admission_timeout_secs: float) -> float:
    """How long a running generation may make no progress: a second per 64 prompt tokens, 1 to 30 minutes.

    Never less than it might have waited for admission, up to the 30 minutes.
    """
    return min(max(prompt_tokens / 64, 60.0, admission_timeout_secs), 1800.0)
