"""Decode and prefill rates of the unsplit engine, the chain in one process, and the chain over loopback.

    python -m bench.chain [--model FILE] [--stages 3] [--threads 1] [--rounds 7] [--prompt 512] [--tokens 64]

All arms run the same model, prompt, chunk size and threads per stage, in turn within each round, so that a
machine that is busy for a while is busy for all of them. Ratios are taken round by round; the table gives the
median and the interval from the lowest to the highest round. The first round warms up and is not counted.
The three arms must generate the same tokens, or nothing is printed but the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import trio

from skippy import embed
from skippy.cli.demo import find_model
from skippy.config import Endpoint, OpenAIOptions, StageConfig, StageTopology, to_json_value
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.models import SliceInfo, ensure_slice
from skippy.topology import make_stage_configs, make_topology, plan_even

CONTEXT = 2048


@attrs.frozen
class Sample:
    """One arm in one round: prompt and generated tokens per second, and what was generated."""

    prefill: float
    decode: float
    tokens: list[int]


@attrs.frozen
class Settings:
    model: Path
    stages: int
    threads: int
    rounds: int
    prompt: list[int]
    tokens: int
    chunk: int


class InProcess:
    """Engines called one after the other on one thread; one engine is the unsplit model."""

    def __init__(self, slices: Sequence[SliceInfo], threads: int) -> None:
        options = EngineOptions(
            context_length=CONTEXT, max_sequences=1, n_threads=threads, n_threads_batch=threads
        )
        self._engines = [LlamaEngine.load(item, options) for item in slices]

    def _run(self, tokens: Sequence[int], position: int, logits: int) -> None:
        activation: memoryview | None = None
        for engine in self._engines:
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

    async def measure(self, settings: Settings) -> Sample:
        await trio.lowlevel.checkpoint()
        for engine in self._engines:
            engine.drop(0)
        prompt, started = settings.prompt, time.perf_counter()
        for start in range(0, len(prompt) - 1, settings.chunk):
            self._run(prompt[start : min(start + settings.chunk, len(prompt) - 1)], start, 0)
        last = self._engines[-1]
        tokens, current, ready = [], prompt[-1], time.perf_counter()
        for step in range(settings.tokens):
            self._run([current], len(prompt) - 1 + step, 1)
            current = int(last.logits(0).argmax())
            tokens.append(current)
        done = time.perf_counter()
        return Sample((len(prompt) - 1) / (ready - started), settings.tokens / (done - ready), tokens)


class Loopback:
    """The product: stages in processes of their own, stage 0 here, without HTTP."""

    def __init__(self, generator: ChainGenerator) -> None:
        self._generator = generator

    async def measure(self, settings: Settings) -> Sample:
        """The first token marks the end of prefill; it holds one decode step, which is taken out again."""
        request = GenerationRequest(prompt=settings.prompt, max_tokens=settings.tokens)
        tokens: list[int] = []
        times = [time.perf_counter()]
        async with self._generator.generate(request) as stream:
            async for token in stream:
                times.append(time.perf_counter())
                tokens.append(token)
        step = (times[-1] - times[1]) / (len(tokens) - 1)
        return Sample((len(settings.prompt) - 1) / (times[1] - times[0] - step), 1 / step, tokens)


def free_endpoints(count: int) -> list[Endpoint]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [Endpoint(*s.getsockname()) for s in sockets]
    for s in sockets:
        s.close()
    return endpoints


@contextlib.asynccontextmanager
async def stage_process(
    config: StageConfig, topology: StageTopology, folder: Path
) -> AsyncIterator[trio.Process]:
    """`skippy serve-binary` for one stage, ended with the block."""
    files = {f"{config.stage_id}.json": config, "topology.json": topology}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(to_json_value(value)))
    command = [sys.executable, "-m", "skippy.cli", "serve-binary", "--telemetry-level", "off"]
    command += ["--config", str(folder / f"{config.stage_id}.json")]
    process = await trio.lowlevel.open_process([*command, "--topology", str(folder / "topology.json")])
    try:
        yield process
    finally:
        process.terminate()
        with trio.move_on_after(5, shield=True):
            await process.wait()
        if process.returncode is None:
            process.kill()


@contextlib.asynccontextmanager
async def loopback_chain(settings: Settings) -> AsyncIterator[Loopback]:
    layers = SliceInfo.from_file(settings.model).layer_count
    ranges = plan_even(layers, settings.stages)
    endpoints = free_endpoints(settings.stages)
    topology = make_topology(ranges, endpoints, topology_id="bench", model_id="bench")
    configs = make_stage_configs(
        topology,
        run_id="bench",
        model_path=str(settings.model),
        ctx_size=CONTEXT,
        lane_count=1,
        n_threads=settings.threads,
        repack=True,
    )
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for config in configs[1:]:
            await stack.enter_async_context(stage_process(config, topology, folder))
        stage = await stack.enter_async_context(embed.open_stage(configs[0], topology))
        pool = LanePool(stage, 1, queue_limit=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            with trio.fail_after(120):
                await pool.wait_ready()
            chunks = OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_size=settings.chunk)
            yield Loopback(ChainGenerator(stage, pool, "bench", chunks))
            nursery.cancel_scope.cancel()


def spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def report(samples: dict[str, list[Sample]], settings: Settings) -> None:
    print(
        f"\n{settings.stages} stages, {settings.threads} thread(s) each, prompt {len(settings.prompt)}, "
        f"{settings.tokens} tokens, chunks of {settings.chunk}, {settings.rounds} rounds, "
        f"{os.cpu_count()} cores\n"
    )
    print("| arm | prefill tok/s | decode tok/s |")
    print("| --- | --- | --- |")
    for name, row in samples.items():
        print(f"| {name} | {spread([s.prefill for s in row], 0)} | {spread([s.decode for s in row], 1)} |")
    print("\n| ratio | prefill | decode |")
    print("| --- | --- | --- |")
    for over, under in itertools.pairwise(reversed(list(samples))):
        pairs = list(zip(samples[over], samples[under], strict=True))
        prefill = spread([a.prefill / b.prefill for a, b in pairs])
        decode = spread([a.decode / b.decode for a, b in pairs])
        print(f"| {over} / {under} | {prefill} | {decode} |")


async def run(settings: Settings) -> int:
    layers = SliceInfo.from_file(settings.model).layer_count
    parts = [ensure_slice(settings.model, r.start, r.end) for r in plan_even(layers, settings.stages)]
    async with loopback_chain(settings) as loopback:
        arms: dict[str, Callable[[Settings], Awaitable[Sample]]] = {
            "unsplit, in process": InProcess([SliceInfo.from_file(settings.model)], settings.threads).measure,
            "chain, in process": InProcess(parts, settings.threads).measure,
            "chain, loopback processes": loopback.measure,
        }
        samples: dict[str, list[Sample]] = {name: [] for name in arms}
        for number in range(settings.rounds + 1):
            order = list(arms.items())
            for name, measure in order if number % 2 else reversed(order):
                sample = await measure(settings)
                if number:
                    samples[name].append(sample)
            print(f"round {number} of {settings.rounds}", file=sys.stderr)
    texts = {name: row[0].tokens for name, row in samples.items()}
    if len({tuple(tokens) for tokens in texts.values()}) != 1:
        print(f"the arms generated different tokens: {texts}", file=sys.stderr)
        return 1
    report(samples, settings)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    for name, default in (("stages", 3), ("threads", 1), ("rounds", 7), ("prompt", 512), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk", type=int, default=256)
    args = parser.parse_args()
    model = find_model(args.model)
    prompt = np.random.default_rng(0).integers(100, 30_000, args.prompt).tolist()
    settings = Settings(model, args.stages, args.threads, args.rounds, prompt, args.tokens, args.chunk)
    return trio.run(run, settings)


if __name__ == "__main__":
    sys.exit(main())
