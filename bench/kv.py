"""Split caches (one per sequence) against a unified one (a pool of cells for all), on one engine.

    python -m bench.kv [--model FILE] [--threads 2] [--rounds 5] [--steps 4] [--loads 8x200,8x1500]

A load `8x1500` is eight sequences that hold 1500 positions each, in a context of 2048. Both engines live in
one process and take turns within each round, so that a machine that is busy for a while is busy for both.
Printed are medians over all rounds, and the ratio round by round: median, and the interval from the lowest to
the highest. A case is what one native call carries: a row for each of some sequences, a chunk of a prompt, or
both.
"""

from __future__ import annotations

import argparse
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


def compare(model: Path, lanes: int, held: int, args: argparse.Namespace) -> None:
    """Measure and print one load."""
    split, unified = (Arm(model, lanes, held, args.threads, kv_unified) for kv_unified in (False, True))
    print(f"\n{lanes} sequences of {held} positions, {args.threads} threads\n")
    print("| case | split ms | unified ms | unified / split |")
    print("| --- | --- | --- | --- |")
    for case in cases_of(lanes):
        times: dict[Arm, list[float]] = {split: [], unified: []}
        for number in range(args.rounds + 1):
            for arm in (split, unified) if number % 2 else (unified, split):
                seconds = arm.measure(case, args.steps)
                if number:  # the first round warms up
                    times[arm].append(seconds)
        ratios = [over / under for over, under in zip(times[unified], times[split], strict=True)]
        medians = " | ".join(f"{statistics.median(times[arm]) * 1e3:.1f}" for arm in (split, unified))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {case.name} | {medians} | {spread} |", flush=True)
    split.close()
    unified.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    for name, default in (("threads", 2), ("rounds", 5), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loads", default="8x200,8x1500,16x1000,1x1500")
    args = parser.parse_args()
    model = find_model(args.model)
    for load in args.loads.split(","):
        lanes, held = map(int, load.split("x"))
        compare(model, lanes, held, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
