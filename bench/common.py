"""What all benchmarks share: alternating order, paired ratios, percentiles, tables, and where results go."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

T = TypeVar("T")

RESULTS = Path("bench-results")


class BenchError(Exception):
    """The benchmark cannot be run, or its numbers must not be compared; says why."""


class OutputsDiffer(BenchError):
    """Arms that should generate the same text do not: then their speeds say nothing about each other."""


@attrs.frozen(slots=True)
class Spread:
    """The median of several rounds, and the interval from the lowest to the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there are no values."""
        if not values:
            raise ValueError("there is no median of no values")
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def percentile(values: Iterable[float], percent: float) -> float:
    """The ``percent``-th percentile, interpolated linearly between the two nearest values.

    Raises ValueError for no values, or a percentage outside 0 to 100.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent:g} is no percentage")
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def in_turn(arms: Sequence[T], number: int) -> list[T]:
    """The arms in the order of round ``number``: forwards and backwards in turn.

    What drifts while a benchmark runs (temperature, neighbours) then meets each arm early as often as late.
    """
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Ratio by ratio of the rounds, not of the medians: what slows a whole round cancels out.

    Raises ValueError where the arms were not measured equally often.
    """
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def require_same_outputs(outputs: Mapping[str, str]) -> None:
    """Raises OutputsDiffer, with every arm's text, unless all are the same."""
    if len(set(outputs.values())) > 1:
        shown = "".join(f"\n  {name}: {text!r}" for name, text in outputs.items())
        raise OutputsDiffer(f"the arms generate different texts greedily, so they are not compared:{shown}")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """One line about where the numbers were made."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"


class Report:
    """Text that is printed and kept, with its data and plots, in one folder.

    Args:
        folder: made if it is missing; None keeps nothing.
        name: of the files, without their endings.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder = folder
        self._name = name
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        print(text + "\n", flush=True)
        self._parts.append(text)

    def plot(self, what: str, svg: str) -> None:
        self._write(f"{self._name}-{what}.svg", svg)

    def finish(self, data: Any) -> None:
        """Write the text and the raw data; ``data`` is anything JSON can hold."""
        self._write(f"{self._name}.md", "\n\n".join(self._parts) + "\n")
        self._write(f"{self._name}.json", json.dumps(data, indent=1) + "\n")
        if self._folder is not None:
            print(f"written to {self._folder}/{self._name}*")

    def _write(self, name: str, text: str) -> None:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(text)


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes: the model, the rounds, and where results go."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file; default: the bundled model")
    made.add_argument("--rounds", type=int, default=rounds, metavar="N", help=f"default: {rounds}")
    made.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    return made
