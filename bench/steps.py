"""Many streams over three stages against one process, and against what the engines' step times allow.

    python -m bench.steps [--levels 1,2,4,8] [--rounds 5] [--tokens 48]

First the bare engines, one after the other: how long a decode step of 1, 2, 4 … sequences takes in each stage
(one thread) and in the unsplit model (two threads). From that the bound: streams in groups, each group a wave
through the stages, so many at once as there are cores. Then what a chain of three processes and one process
with two threads really give, without HTTP, in turn within each round, for as many streams at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo, ensure_slice
from skippy.topology import plan_even

from .chains import ChainSpec, RunningChain, open_chain
from .common import Report, Spread, in_turn, machine, parser, percentile, ratios, table
from .plots import line_chart

STAGES = 3
CONTEXT = 512
PROMPT = 24
STEPS = 24
TARGET = 0.85
SPLIT, WHOLE = "3 stages, 1 thread each", "1 process, 2 threads"

StepTimes = Mapping[int, Sequence[float]]
"""By batch size: milliseconds of one decode step in each stage."""


def cycle_ms(times: StepTimes, streams: int, groups: int, cores: int) -> float:
    """The least time in which ``streams`` streams in ``groups`` equal groups each get a token, in ms.

    A stage takes one group after the other; a group goes through one stage after the other; and no more
    stages compute at once than there are cores.
    """
    stage_ms = times[streams // groups]
    return max(groups * max(stage_ms), sum(stage_ms), groups * sum(stage_ms) / cores)


def bound(times: StepTimes, streams: int, cores: int) -> tuple[float, int]:
    """The highest rate, in tokens per second of all streams together, and the number of groups it takes."""
    groups = [count for count in range(1, streams + 1) if streams % count == 0 and streams // count in times]
    best = min(groups, key=lambda count: cycle_ms(times, streams, count, cores))
    return 1000 * streams / cycle_ms(times, streams, best, cores), best


def step_times(slices: Sequence[SliceInfo], threads: int, sizes: Sequence[int]) -> dict[int, list[float]]:
    """Milliseconds of a decode step at each batch size, for each slice; medians, nothing else running."""
    options = EngineOptions(
        context_length=CONTEXT, max_sequences=max(sizes), n_threads=threads, n_threads_batch=threads
    )
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(contextlib.closing(LlamaEngine.load(item, options))) for item in slices
        ]
        return {size: _one_size(engines, size) for size in sizes}


def _one_size(engines: Sequence[LlamaEngine], size: int) -> list[float]:
    for engine in engines:
        for sequence in range(size):
            engine.drop(sequence)
    for sequence in range(size):
        _pass(engines, [(sequence, 0)], PROMPT)
    taken = [
        _pass(engines, [(sequence, PROMPT + step) for sequence in range(size)], 1) for step in range(STEPS)
    ]
    return [percentile([step[stage] for step in taken], 50) for stage in range(len(engines))]


def _pass(engines: Sequence[LlamaEngine], rows: Sequence[tuple[int, int]], count: int) -> list[float]:
    """``count`` tokens of each (sequence, position) through all engines; milliseconds of each."""
    activation: memoryview | None = None
    taken = []
    for engine in engines:
        info = engine.info
        output = None if info.is_last else np.empty(len(rows) * count * info.output_width * 4, np.uint8).data
        width = info.input_width * 4 * count
        segments = [
            Segment(
                sequence=sequence,
                position=position,
                count=count,
                tokens=[1000 + sequence] * count if info.is_first else None,
                activation=None if activation is None else activation[index * width : (index + 1) * width],
                logits=1 if info.is_last else 0,
            )
            for index, (sequence, position) in enumerate(rows)
        ]
        started = time.perf_counter()
        engine.decode(segments, output)
        taken.append((time.perf_counter() - started) * 1000)
        activation = output
    return taken


async def rate(chain: RunningChain, streams: int, tokens: int, number: int) -> float:
    """Tokens per second of all streams together, from when the last has begun until the first ends."""
    prompts = [[1000 + 97 * number + client + i for i in range(PROMPT)] for client in range(streams)]
    results = await chain.generate_all(prompts, tokens)
    start, end = max(r.times[0] for r in results), min(r.times[-1] for r in results)
    return sum(start < at <= end for r in results for at in r.times) / (end - start)


@attrs.frozen
class Settings:
    model: Path
    levels: Sequence[int]
    rounds: int
    tokens: int
    out: Path


async def run(settings: Settings) -> None:
    source = SliceInfo.from_file(settings.model)
    parts = [ensure_slice(settings.model, r.start, r.end) for r in plan_even(source.layer_count, STAGES)]
    split, whole = (
        step_times(parts, 1, settings.levels),
        step_times([source], 2, settings.levels),
    )
    most = max(settings.levels)
    rates: dict[tuple[str, int], list[float]] = {}
    spec = ChainSpec(stages=STAGES, model=settings.model, lanes=most, context=CONTEXT)
    async with open_chain(spec) as three, open_chain(attrs.evolve(spec, stages=1, threads=2)) as one:
        for number in range(settings.rounds + 1):
            for level in settings.levels:
                for name, chain in in_turn([(SPLIT, three), (WHOLE, one)], number):
                    value = await rate(chain, level, settings.tokens, number)
                    if number:  # the first one warms up
                        rates.setdefault((name, level), []).append(value)
            print(f"round {number} of {settings.rounds}", file=sys.stderr)
    report(split, whole, rates, settings)


def report(
    split: StepTimes, whole: StepTimes, rates: Mapping[tuple[str, int], list[float]], settings: Settings
) -> None:
    cores, out = os.cpu_count() or 1, Report(settings.out, "steps")
    out.add(f"{settings.model.name}, {settings.rounds} rounds of {settings.tokens} tokens, {machine()}")
    rows = []
    for level in settings.levels:
        stages = " + ".join(f"{ms:.1f}" for ms in split[level])
        rows.append([str(level), f"{stages} = {sum(split[level]):.1f}", f"{sum(whole[level]):.1f}"])
    out.add(table(["sequences in a step", f"{SPLIT}, ms", f"{WHOLE}, ms"], rows))
    rows = []
    for level in settings.levels:
        most, groups = bound(split, level, cores)
        measured = Spread.of(rates[SPLIT, level])
        rows.append(
            [
                str(level),
                measured.show(1),
                f"{most:.1f} in {groups} group(s)",
                f"{measured.median / most:.2f}",
                Spread.of(rates[WHOLE, level]).show(1),
                f"{1000 * level / sum(whole[level]):.1f}",
                ratios(rates[SPLIT, level], rates[WHOLE, level]).show(),
            ]
        )
    headers = ["streams", f"{SPLIT}, tok/s", "bound", "of it", f"{WHOLE}, tok/s", "its bound", "ratio"]
    out.add(table(headers, rows))
    out.add(f"Target: ratio at least {TARGET} for 8 streams.")
    series: dict[str, list[Spread | None]] = {
        name: [Spread.of(rates[name, level]) for level in settings.levels] for name in (SPLIT, WHOLE)
    }
    series["bound of 3 stages"] = [Spread.of([bound(split, n, cores)[0]]) for n in settings.levels]
    ticks = [str(level) for level in settings.levels]
    out.plot("rate", line_chart("Total tokens per second", "streams", "tokens/s", ticks, series))
    out.finish(
        {
            "split": split,
            "whole": whole,
            "rates": [{"arm": a, "streams": n, "rounds": row} for (a, n), row in rates.items()],
        }
    )


def main() -> int:
    made = parser(__doc__, rounds=5)
    made.add_argument("--levels", default="1,2,4,8", help="streams at once; default: 1,2,4,8")
    made.add_argument("--tokens", type=int, default=48, help="per stream; default: 48")
    args = made.parse_args()
    levels = [int(level) for level in args.levels.split(",")]
    trio.run(run, Settings(find_model(args.model), levels, args.rounds, args.tokens, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
