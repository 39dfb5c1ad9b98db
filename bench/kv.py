"""Split caches (one per sequence) against a unified one (a pool of cells for all), on one engine.

    python -m bench.kv [--loads 8x200,8x1500,16x1000,1x1500] [--threads 2] [--rounds 5] [--steps 4]

A load `8x1500` is eight sequences that hold 1500 positions each, in a context of 2048. Both engines live in
one process and take turns within each round. A case is what one native call carries: a row for each of some
sequences, a chunk of a prompt, or both. The first round warms up and is not counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo

from .common import Report, Spread, in_turn, machine, parser, ratios, table

CONTEXT = 2048
CHUNK = 256


@attrs.frozen
class Case:
    """One shape of a native call: (sequence, rows) of each segment.

    Attributes:
        fresh: the last segment's sequence holds nothing before, instead of what all hold.
    """

    name: str
    rows: Sequence[tuple[int, int]]
    fresh: bool = False


def cases_of(lanes: int) -> list[Case]:
    """Waves of decode rows over consecutive and other ids, prompt chunks, and a mixture."""
    every = range(lanes)
    waves = [("1 row", [lanes // 2])]
    for count in (2, 4, 8):
        if count < lanes:
            waves.append((f"{count} rows, ids in a row", list(every[:count])))
            waves.append((f"{count} rows, every other id", list(every[::2][:count])))
    if lanes > 2:
        waves.append((f"{lanes - 1} rows, one id missing", [i for i in every if i != lanes // 2]))
    if lanes > 1:
        waves.append((f"{lanes} rows, all ids", list(every)))
    cases = [Case(name, [(sequence, 1) for sequence in ids]) for name, ids in waves]
    cases.append(Case(f"chunk of {CHUNK} rows", [(lanes - 1, CHUNK)]))
    cases.append(Case(f"first chunk of {CHUNK} rows", [(lanes - 1, CHUNK)], fresh=True))
    if lanes > 4:
        cases.append(Case("3 rows and a chunk of 64", [(0, 1), (1, 1), (2, 1), (lanes - 1, 64)]))
        cases.append(Case("2 first chunks of 128", [(0, 128), (lanes - 1, 128)], fresh=True))
    return cases


class Arm:
    """An engine whose sequences all hold the same number of positions between cases."""

    def __init__(self, model: Path, lanes: int, held: int, threads: int, kv_unified: bool) -> None:
        options = EngineOptions(
            context_length=CONTEXT,
            max_sequences=lanes,
            n_threads=threads,
            n_threads_batch=threads,
            kv_unified=kv_unified,
        )
        self._engine = LlamaEngine.load(SliceInfo.from_file(model), options)
        self._held = held
        self._tokens = np.random.default_rng(0).integers(100, 30_000, CONTEXT).tolist()
        self._engine.decode([self._segment(0, held)])
        self._state = self._engine.export_state(0)
        for sequence in range(1, lanes):
            self._engine.import_state(sequence, self._state)

    def close(self) -> None:
        self._engine.close()

    def _segment(self, sequence: int, rows: int) -> Segment:
        start = self._engine.length(sequence)
        return Segment(sequence, start, rows, tokens=self._tokens[start : start + rows], logits=1)

    def measure(self, case: Case, steps: int) -> float:
        """Median seconds of the case's call, ``steps`` times in a row where it carries no chunk."""
        engine, times = self._engine, []
        last = case.rows[-1][0]
        if any(rows > 1 for _, rows in case.rows):
            steps = 1
        with self._without(last if case.fresh else None):
            for _ in range(steps):
                segments = [self._segment(sequence, rows) for sequence, rows in case.rows]
                started = time.perf_counter()
                engine.decode(segments)
                times.append(time.perf_counter() - started)
        for sequence, _ in case.rows:
            engine.trim(sequence, self._held)
        return statistics.median(times)

    @contextmanager
    def _without(self, sequence: int | None) -> Iterator[None]:
        if sequence is not None:
            self._engine.drop(sequence)
        yield
        if sequence is not None:
            self._engine.drop(sequence)
            self._engine.import_state(sequence, self._state)


Times = dict[str, tuple[list[float], list[float]]]
"""By case: seconds with split caches, and with a unified one, round by round."""


def compare(model: Path, lanes: int, held: int, *, threads: int, rounds: int, steps: int) -> Times:
    """Measure one load."""
    arms = [Arm(model, lanes, held, threads, kv_unified) for kv_unified in (False, True)]
    times: Times = {}
    for case in cases_of(lanes):
        found: dict[Arm, list[float]] = {arm: [] for arm in arms}
        for number in range(rounds + 1):
            for arm in in_turn(arms, number):
                seconds = arm.measure(case, steps)
                if number:
                    found[arm].append(seconds)
        times[case.name] = (found[arms[0]], found[arms[1]])
    for arm in arms:
        arm.close()
    return times


def rows_of(times: Times) -> list[list[str]]:
    return [
        [
            name,
            f"{Spread.of(split).median * 1e3:.1f}",
            f"{Spread.of(unified).median * 1e3:.1f}",
            ratios(unified, split).show(),
        ]
        for name, (split, unified) in times.items()
    ]


def main() -> int:
    made = parser(__doc__, rounds=5)
    made.add_argument("--loads", default="8x200,8x1500,16x1000,1x1500", help="default: %(default)s")
    made.add_argument("--threads", type=int, default=2, help="default: 2")
    made.add_argument("--steps", type=int, default=4, help="calls per round; default: 4")
    args = made.parse_args()
    model, out = find_model(args.model), Report(args.out, "kv")
    out.add(f"{args.threads} threads, {args.rounds} rounds, {machine()}")
    results = {}
    for load in args.loads.split(","):
        lanes, held = map(int, load.split("x"))
        times = compare(model, lanes, held, threads=args.threads, rounds=args.rounds, steps=args.steps)
        out.add(f"{lanes} sequences of {held} positions:")
        out.add(table(["case", "split ms", "unified ms", "unified / split"], rows_of(times)))
        results[load] = times
    out.finish(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
