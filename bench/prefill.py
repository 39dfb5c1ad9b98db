"""Prefill of a long prompt over a chain on loopback, against the least time it could take.

    python -m bench.prefill [--model FILE] [--stages 3] [--threads 1] [--rounds 5] [--prompt 2000]
                            [--policies adaptive-ramp,64,128,256]

A chain cannot be done before its slowest stage has computed all chunks, after the stages before it have
computed the first one and before those after it have computed the last one; nor before the machine's cores
have computed everything. The larger of the two is the bound. What computing takes is measured in the same
round: the same chunks, one engine at a time, in this process. All policies take turns within a round; the
first round warms up, and teaches the adaptive policy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import trio

from skippy import embed
from skippy.cli.demo import find_model
from skippy.config import OpenAIOptions
from skippy.engine import EngineOptions, Segment, StageEngine
from skippy.engine.llama import LlamaEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.models import ensure_slice
from skippy.telemetry import Level, MemorySink, Telemetry, names
from skippy.topology import plan_even

from .chains import ChainSpec, RunningChain, Timed, open_lanes
from .common import Report, Spread, in_turn, machine, parser, ratios, table

DECODES = 8
"""Tokens after each prefill; the mean of their gaps is taken out of the time to the first one."""


@attrs.frozen
class Sample:
    """One prefill: how it was cut, its seconds, and the two lower bounds of them."""

    chunks: list[int]
    seconds: float
    pipeline: float
    cores: float

    @property
    def bound(self) -> float:
        return max(self.pipeline, self.cores)


class Engines:
    """The stages' engines, called one after the other."""

    def __init__(self, spec: ChainSpec) -> None:
        assert spec.model is not None
        options = EngineOptions(
            context_length=spec.context,
            max_sequences=1,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
        )
        parts = [ensure_slice(spec.model, r.start, r.end) for r in plan_even(spec.layers, spec.stages)]
        self._engines = [LlamaEngine.load(part, options) for part in parts]

    def measure(self, prompt: Sequence[int], chunks: Sequence[int]) -> list[list[float]]:
        """Seconds of each stage for each chunk: ``[stage][chunk]``."""
        for engine in self._engines:
            engine.drop(0)
        times: list[list[float]] = [[] for _ in self._engines]
        start = 0
        for size in chunks:
            activation: memoryview | None = None
            for engine, row in zip(self._engines, times, strict=True):
                began = time.perf_counter()
                activation = _compute(engine, prompt[start : start + size], start, activation)
                row.append(time.perf_counter() - began)
            start += size
        return times


def _compute(
    engine: StageEngine, tokens: Sequence[int], position: int, activation: memoryview | None
) -> memoryview | None:
    info = engine.info
    output = None if info.is_last else np.empty(len(tokens) * info.output_width * 4, np.uint8).data
    segment = Segment(
        sequence=0,
        position=position,
        count=len(tokens),
        tokens=tokens if info.is_first else None,
        activation=activation,
    )
    engine.decode([segment], output)
    return output


def bounds(times: Sequence[Sequence[float]], cores: int) -> tuple[float, float]:
    """Slowest stage and the filling of the pipeline before and behind it; everything, on all cores."""
    slowest = max(range(len(times)), key=lambda stage: sum(times[stage]))
    fill = sum(row[0] for row in times[:slowest]) + sum(row[-1] for row in times[slowest + 1 :])
    return sum(times[slowest]) + fill, sum(map(sum, times)) / cores


class ChunkWatch(Telemetry):
    """Keeps the sizes of the chunks that stage 0 sends, and nothing else."""

    def __init__(self) -> None:
        super().__init__(Level.DEBUG, MemorySink())
        self.sizes: list[int] = []

    def record(
        self, name: str, level: Level, time_ns: int, elapsed_ms: float | None, attributes: Mapping[str, Any]
    ) -> None:
        if name == names.STAGE_OPENAI_PREFILL_CHUNK:
            self.sizes.append(attributes["token_count"])


def prefill_seconds(timed: Timed) -> float:
    """The first token marks the end of prefill; it holds one decode step, which is taken out again."""
    return timed.times[0] - timed.started - statistics.mean(timed.gaps)


def make_generators(stage: embed.Stage, pool: LanePool, policies: Sequence[str]) -> dict[str, ChainGenerator]:
    """A generator for each policy: a number is a fixed size, numbers with ``+`` between them a schedule."""
    generators = {}
    for policy in policies:
        if policy[0].isdigit():
            sizes = tuple(int(part) for part in policy.split("+"))
            options = OpenAIOptions(prefill_chunk_policy="schedule", prefill_chunk_schedule=sizes)
        else:
            options = OpenAIOptions(prefill_chunk_policy=policy)  # type: ignore[arg-type]
        generators[policy] = ChainGenerator(stage, pool, "bench", options)
    return generators


def rows(samples: Mapping[str, Sequence[Sample]]) -> list[list[str]]:
    made = []
    for policy, row in samples.items():
        chunks, seconds = row[-1].chunks, [sample.seconds for sample in row]
        made.append(
            [
                policy,
                " ".join(map(str, chunks[:4])) + (" …" if len(chunks) > 4 else ""),
                Spread.of(seconds).show(),
                Spread.of([sample.pipeline for sample in row]).show(),
                Spread.of([sample.cores for sample in row]).show(),
                ratios(seconds, [sample.bound for sample in row]).show(),
            ]
        )
    return made


async def run(arguments: argparse.Namespace) -> None:
    model = find_model(arguments.model)
    prompt = np.random.default_rng(0).integers(100, 30_000, arguments.prompt).tolist()
    spec = ChainSpec(
        stages=arguments.stages,
        model=model,
        threads=arguments.threads,
        context=arguments.prompt + DECODES + 1,
    )
    engines = Engines(spec)
    cores = len(os.sched_getaffinity(0))
    watch = ChunkWatch()
    async with open_lanes(spec, watch) as (stage, pool):
        generators = make_generators(stage, pool, arguments.policies.split(","))
        samples: dict[str, list[Sample]] = {name: [] for name in generators}
        for number in range(arguments.rounds + 1):
            for name in in_turn(list(generators), number):
                watch.sizes.clear()
                pool.on_request_over = generators[name].prefill.learn
                timed = await RunningChain(spec, generators[name]).generate(prompt, DECODES)
                times = engines.measure(prompt, watch.sizes)
                if number:
                    sample = Sample(list(watch.sizes), prefill_seconds(timed), *bounds(times, cores))
                    samples[name].append(sample)
            print(f"round {number} of {arguments.rounds}", file=sys.stderr)
    report = Report(arguments.out, "prefill")
    report.add(
        f"{spec.stages} stages, {spec.threads} thread(s) each, prompt {len(prompt)}, "
        f"{arguments.rounds} rounds; {machine()}"
    )
    headers = ["policy", "chunks", "measured s", "slowest stage + fill s", "all / cores s", "ratio"]
    report.add(table(headers, rows(samples)))
    report.finish({name: [attrs.asdict(sample) for sample in row] for name, row in samples.items()})


def main() -> int:
    made = parser(__doc__, rounds=5)
    for name, default in (("stages", 3), ("threads", 1), ("prompt", 2000)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--policies", default="adaptive-ramp,64,128,256")
    trio.run(run, made.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
