"""Samples of :mod:`bench.serving`, and the tables and plots they become."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from .common import Report, Spread, percentile, ratios, table
from .load import Outcome
from .plots import line_chart

PERCENTILES = (50, 95, 99)
PAIRS = (
    ("skippy", "llama.cpp"),
    ("skippy", "llama-cpp-python"),
    ("skippy", "engine"),
    ("skippy 3 stages", "skippy"),
)


@attrs.frozen(kw_only=True)
class Sample:
    """One arm in one round at one concurrency.

    Attributes:
        rate: generated tokens per second, all clients together, from the first request to the last byte.
        stream_rate: tokens per second of one stream, its wait for the first one not counted (median).
        first: seconds to the first token of each request.
        gaps: seconds between the tokens of a stream, of all streams.
        cpu: processor milliseconds of the server per token; None where it cannot be told.
        elsewhere: share of the machine, 0 to 1, that something else used meanwhile.
    """

    rate: float
    stream_rate: float
    first: list[float]
    gaps: list[float]
    cpu: float | None
    elsewhere: float = 0.0

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], cpu_seconds: float | None, elsewhere: float = 0.0) -> Sample:
        tokens = sum(outcome.tokens for outcome in outcomes)
        seconds = max(o.ended for o in outcomes) - min(o.started for o in outcomes)
        streams = [
            (outcome.tokens - 1) / (outcome.times[-1] - outcome.times[0])
            for outcome in outcomes
            if outcome.tokens > 1 and outcome.times[-1] > outcome.times[0]
        ]
        return cls(
            rate=tokens / seconds,
            stream_rate=percentile(streams, 50) if streams else 0.0,
            first=[outcome.times[0] - outcome.started for outcome in outcomes],
            gaps=[b - a for o in outcomes for a, b in zip(o.times, o.times[1:], strict=False)],
            cpu=None if cpu_seconds is None else cpu_seconds * 1000 / tokens,
            elsewhere=elsewhere,
        )


class Levels:
    """The samples of all arms, by arm and concurrency, in the order of the rounds."""

    def __init__(self, levels: Sequence[int], arms: Sequence[str]) -> None:
        self.levels = list(levels)
        self.arms = list(arms)
        self.samples: dict[tuple[str, int], list[Sample]] = {}
        self.cold: dict[str, list[float]] = {arm: [] for arm in arms}

    def add(self, arm: str, level: int, sample: Sample) -> None:
        self.samples.setdefault((arm, level), []).append(sample)

    def rates(self, arm: str, level: int) -> list[float] | None:
        row = self.samples.get((arm, level))
        return None if row is None else [sample.rate for sample in row]

    def as_json(self) -> Any:
        return {
            "cold": self.cold,
            "samples": [
                {"arm": arm, "level": level, "rounds": [attrs.asdict(sample) for sample in row]}
                for (arm, level), row in self.samples.items()
            ],
        }


def report(levels: Levels, out: Report, head: str, prompt: int) -> None:
    out.add(head)
    for level in levels.levels:
        out.add(f"Concurrency {level}:\n\n{level_table(levels, level)}")
    out.add(f"First token of a cold prompt of about {prompt} tokens:\n\n{cold_table(levels)}")
    if pairs := [pair for pair in PAIRS if set(pair) <= set(levels.arms)]:
        out.add(f"Ratios, round by round:\n\n{ratio_table(levels, pairs)}")
    out.plot("rate", rate_plot(levels))
    out.plot("gap", gap_plot(levels))
    out.finish(levels.as_json())


def level_table(levels: Levels, level: int) -> str:
    rows = []
    for arm in levels.arms:
        samples = levels.samples.get((arm, level))
        if samples is None:
            continue
        gaps = [1000 * gap for sample in samples for gap in sample.gaps]
        first = [1000 * value for sample in samples for value in sample.first]
        cpu = [sample.cpu for sample in samples if sample.cpu is not None]
        rows.append(
            [
                arm,
                Spread.of([sample.rate for sample in samples]).show(1),
                Spread.of([sample.stream_rate for sample in samples]).show(1),
                f"{percentile(first, 50):.0f}",
                " / ".join(f"{percentile(gaps, p):.1f}" for p in PERCENTILES),
                f"{Spread.of(cpu).median:.1f}" if cpu else "-",
                f"{100 * max(sample.elsewhere for sample in samples):.0f}",
            ]
        )
    headers = ["arm", "total tok/s", "tok/s of a stream", "first token, ms", "gap p50/p95/p99, ms"]
    return table([*headers, "CPU ms per token", "busy elsewhere, %, at most"], rows)


def cold_table(levels: Levels) -> str:
    rows = [[arm, Spread.of([v * 1000 for v in row]).show(0)] for arm, row in levels.cold.items() if row]
    return table(["arm", "ms"], rows)


def ratio_table(levels: Levels, pairs: Sequence[tuple[str, str]]) -> str:
    """Of rates more is better for the arm above the line, of times less."""

    def cells(level: int, value: Callable[[Sample], float]) -> Iterator[str]:
        for over, under in pairs:
            rows = [[value(s) for s in levels.samples.get((arm, level), ())] for arm in (over, under)]
            yield ratios(*rows).show() if all(rows) else "-"

    rows = [["tok/s of a stream at 1", *cells(1, lambda sample: sample.stream_rate)]]
    rows += [[f"total tok/s at {level}", *cells(level, lambda s: s.rate)] for level in levels.levels]
    cold = [ratios(levels.cold[over], levels.cold[under]).show() for over, under in pairs]
    rows.append(["time to a cold first token", *cold])
    return table(["", *(f"{over} / {under}" for over, under in pairs)], rows)


def rate_plot(levels: Levels) -> str:
    series = {
        arm: [
            None if (row := levels.rates(arm, level)) is None else Spread.of(row) for level in levels.levels
        ]
        for arm in levels.arms
    }
    ticks = [str(level) for level in levels.levels]
    return line_chart("Total tokens per second", "clients", "tokens/s", ticks, series)


def gap_plot(levels: Levels) -> str:
    series: dict[str, list[Spread | None]] = {}
    for arm in levels.arms:
        series[arm] = []
        for level in levels.levels:
            rows = levels.samples.get((arm, level))
            values = [1000 * percentile(s.gaps, 95) for s in rows or () if s.gaps]
            series[arm].append(Spread.of(values) if values else None)
    ticks = [str(level) for level in levels.levels]
    return line_chart("Gap between tokens, 95th percentile", "clients", "ms", ticks, series)
