"""Many seeds, over processes: each seed has one to itself while it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

from .processes import run_each
from .running import simulate
from .scenario import FAULT_NAMES, draw

LAST_LINES: Final = 40
"""Lines of the trace that a failing seed shows."""
_SEEDS_AT_ONCE: Final = 8


@attrs.frozen(slots=True, kw_only=True)
class Settings:
    """What is asked for beside the seed. None: the seed says."""

    size: str | None = None
    stages: int | None = None
    requests: int | None = None
    faults: tuple[str, ...] = FAULT_NAMES

    def command(self, seed: int) -> str:
        """What runs this one seed again."""
        words = ["skippy sim", f"--seed {seed}"]
        if self.size is not None:
            words.append(f"--size {self.size}")
        if self.stages is not None:
            words.append(f"--stages {self.stages}")
        if self.requests is not None:
            words.append(f"--requests {self.requests}")
        if self.faults != FAULT_NAMES:
            words.append(f"--faults {','.join(self.faults) or 'none'}")
        return " ".join(words)


@attrs.frozen(slots=True)
class Result:
    """What came of one seed.

    Attributes:
        faulty: whether the seed had faults.
        violation: what does not hold; None where all does.
        outcomes: how requests have ended, and how often.
        secs: of virtual time.
        digest: of the trace.
        lines: of the trace, as many as were asked for: the last ones.
    """

    seed: int
    faulty: bool
    violation: str | None
    outcomes: dict[str, int]
    secs: float
    digest: str
    lines: Sequence[str]


def run_seed(settings: Settings, seed: int, *, all_lines: bool = False) -> Result:
    """Run one seed, in this process."""
    scenario = draw(seed, **attrs.asdict(settings))
    report = simulate(scenario)
    lines = report.trace.lines if all_lines else report.trace.lines[-LAST_LINES:]
    if report.violation is None and not all_lines:
        lines = []
    return Result(
        seed,
        scenario.faulty,
        report.violation,
        report.outcomes,
        report.secs,
        report.trace.digest,
        tuple(lines),
    )


def run_seeds(settings: Settings, seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """Run seeds in so many processes, in order; with one job in this process."""
    return run_each(functools.partial(run_seed, settings), seeds, jobs, at_once=_SEEDS_AT_ONCE)
