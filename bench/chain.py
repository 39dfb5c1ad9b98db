"""Decode and prefill rates of the unsplit engine, the chain in one process, and the chain over loopback.

    python -m bench.chain [--model FILE] [--stages 3] [--threads 1] [--rounds 7] [--prompt 512] [--tokens 64]

All arms run the same model, prompt, chunk size and threads per stage, in turn within each round, so that a
machine that is busy for a while is busy for all of them. Ratios are taken round by round; the table gives the
median and the interval from the lowest to the highest round. The first round warms up and is not counted.
The three arms must generate the same tokens, or nothing is printed but the difference.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo, ensure_slice
from skippy.topology import plan_even

from .chains import ChainSpec, Timed, open_chain
from .common import (
    BenchError,
    Report,
    Spread,
    in_turn,
    machine,
    parser,
    ratios,
    require_same_outputs,
    table,
)

CONTEXT = 2048


@attrs.frozen
class Sample:
    """One arm in one round: prompt and generated tokens per second, and what was generated."""

    prefill: float
    decode: float
    tokens: list[int]


@attrs.frozen(kw_only=True)
class Settings:
    model: Path
    stages: int
    threads: int
    rounds: int
    prompt: list[int]
    tokens: int
    chunk: int
    out: Path


class InProcess:
    """Engines called one after the other on one thread; one engine is the unsplit model."""

    def __init__(self, slices: Sequence[SliceInfo], threads: int) -> None:
        options = EngineOptions(
            context_length=CONTEXT, max_sequences=1, n_threads=threads, n_threads_batch=threads
        )
        self._engines = [LlamaEngine.load(item, options) for item in slices]

    def _run(self, tokens: Sequence[int], position: int, logits: int, pause: float = 0.0) -> float:
        """Seconds that the engines took; each one rests for ``pause`` seconds before."""
        activation: memoryview | None = None
        taken = 0.0
        for engine in self._engines:
            if pause:
                time.sleep(pause)
            started = time.perf_counter()
            info = engine.info
            output = None
            if not info.is_last:
                output = np.empty(len(tokens) * info.output_width * 4, np.uint8).data
            segment = Segment(
                sequence=0,
                position=position,
                count=len(tokens),
                tokens=tokens if info.is_first else None,
                activation=activation,
                logits=logits if info.is_last else 0,
            )
            engine.decode([segment], output)
            activation = output
            taken += time.perf_counter() - started
        return taken

    def step_times(self, prompt: Sequence[int], tokens: int, pause: float) -> list[float]:
        """Seconds that the engines took for each token of a generation; each rests before its part of it."""
        for engine in self._engines:
            engine.drop(0)
        self._run(prompt[:-1], 0, 0)
        times, current = [], prompt[-1]
        for step in range(tokens):
            times.append(self._run([current], len(prompt) - 1 + step, 1, pause))
            current = int(self._engines[-1].logits(0).argmax())
        return times

    async def generate(self, prompt: Sequence[int], tokens: int, chunk: int) -> Timed:
        """One greedy generation; prompts are cut into chunks as the chain's front end does."""
        await trio.lowlevel.checkpoint()
        for engine in self._engines:
            engine.drop(0)
        started = time.perf_counter()
        for start in range(0, len(prompt) - 1, chunk):
            self._run(prompt[start : min(start + chunk, len(prompt) - 1)], start, 0)
        last = self._engines[-1]
        taken, times, current = [], [], prompt[-1]
        for step in range(tokens):
            self._run([current], len(prompt) - 1 + step, 1)
            current = int(last.logits(0).argmax())
            taken.append(current)
            times.append(time.perf_counter())
        return Timed(taken, started, times)


def make_sample(timed: Timed, prompt_tokens: int) -> Sample:
    """The first token marks the end of prefill; it holds one decode step, which is taken out again."""
    step = (timed.times[-1] - timed.times[0]) / (len(timed.tokens) - 1)
    prefill = timed.times[0] - timed.started - step
    return Sample((prompt_tokens - 1) / prefill, 1 / step, timed.tokens)


def report(samples: dict[str, list[Sample]], settings: Settings) -> None:
    out = Report(settings.out, "chain")
    out.add(
        f"{settings.stages} stages, {settings.threads} thread(s) each, prompt {len(settings.prompt)}, "
        f"{settings.tokens} tokens, chunks of {settings.chunk}, {settings.rounds} rounds, {machine()}"
    )
    rows = [
        [name, Spread.of([s.prefill for s in row]).show(0), Spread.of([s.decode for s in row]).show(1)]
        for name, row in samples.items()
    ]
    out.add(table(["arm", "prefill tok/s", "decode tok/s"], rows))
    pairs = [
        [f"{over} / {under}"]
        + [
            ratios(
                [getattr(s, what) for s in samples[over]], [getattr(s, what) for s in samples[under]]
            ).show()
            for what in ("prefill", "decode")
        ]
        for over, under in itertools.pairwise(reversed(list(samples)))
    ]
    out.add(table(["ratio", "prefill", "decode"], pairs))
    out.finish({name: [attrs.asdict(sample) for sample in row] for name, row in samples.items()})


async def run(settings: Settings) -> int:
    layers = SliceInfo.from_file(settings.model).layer_count
    parts = [ensure_slice(settings.model, r.start, r.end) for r in plan_even(layers, settings.stages)]
    unsplit = InProcess([SliceInfo.from_file(settings.model)], settings.threads)
    split = InProcess(parts, settings.threads)
    sizes = (settings.prompt, settings.tokens)
    spec = ChainSpec(
        stages=settings.stages,
        model=settings.model,
        threads=settings.threads,
        context=CONTEXT,
        chunk=settings.chunk,
    )
    async with open_chain(spec) as chain:
        arms: dict[str, Callable[[], Awaitable[Timed]]] = {
            "unsplit, in process": lambda: unsplit.generate(*sizes, settings.chunk),
            "chain, in process": lambda: split.generate(*sizes, settings.chunk),
            "chain, loopback processes": lambda: chain.generate(*sizes),
        }
        samples: dict[str, list[Sample]] = {name: [] for name in arms}
        for number in range(settings.rounds + 1):
            for name, measure in in_turn(list(arms.items()), number):
                sample = make_sample(await measure(), len(settings.prompt))
                if number:
                    samples[name].append(sample)
            print(f"round {number} of {settings.rounds}", file=sys.stderr)
    try:
        require_same_outputs({name: str(row[0].tokens) for name, row in samples.items()})
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(samples, settings)
    return 0


def main() -> int:
    made = parser(__doc__, rounds=7)
    for name, default in (("stages", 3), ("threads", 1), ("prompt", 512), ("tokens", 64), ("chunk", 256)):
        made.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    args = made.parse_args()
    settings = Settings(
        model=find_model(args.model),
        stages=args.stages,
        threads=args.threads,
        rounds=args.rounds,
        prompt=np.random.default_rng(0).integers(100, 30_000, args.prompt).tolist(),
        tokens=args.tokens,
        chunk=args.chunk,
        out=args.out,
    )
    return trio.run(run, settings)


if __name__ == "__main__":
    sys.exit(main())
