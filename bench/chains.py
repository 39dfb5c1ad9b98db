"""Chains of stage processes with stage 0 in this process, driven without HTTP.

As a program, one stage of such a chain: ``python -m bench.chains``, its settings as a line of standard input.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from skippy import embed
from skippy.config import (
    Endpoint,
    OpenAIOptions,
    StageConfig,
    StageOptions,
    StageTopology,
    WireConditions,
    from_json_value,
    to_json_value,
)
from skippy.engine import StageEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.models import SliceInfo, ensure_slice
from skippy.stage.links import TcpTransport, Transport
from skippy.telemetry import NULL_TELEMETRY, Telemetry
from skippy.topology import make_stage_configs, make_topology, plan_even

from .ports import reserve_port
from .slow_links import SlowTransport
from .wire_engine import WireEngine

READY_SECS = 120


@attrs.frozen(kw_only=True)
class ChainSpec:
    """A chain to measure.

    Attributes:
        model: None takes an engine that computes nothing, with rows ``width`` f32 wide.
        wire: what every link between stages is made worse by, in both directions.
        chunk: prompt tokens per prefill frame.
    """

    stages: int
    model: Path | None = None
    threads: int = 1
    lanes: int = 1
    context: int = 2048
    chunk: int = 256
    width: int = 4096
    wire: WireConditions | None = None

    @property
    def layers(self) -> int:
        return self.stages if self.model is None else SliceInfo.from_file(self.model).layer_count


@attrs.frozen
class Timed:
    """What a generation gave: its tokens, when it was asked for, and when each token was there."""

    tokens: list[int]
    started: float
    times: list[float]

    @property
    def gaps(self) -> list[float]:
        """Seconds between the tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class RunningChain:
    """The product without HTTP: stages in processes of their own, stage 0 here."""

    def __init__(self, spec: ChainSpec, generator: ChainGenerator) -> None:
        self.spec = spec
        self._generator = generator

    async def generate(self, prompt: Sequence[int], tokens: int) -> Timed:
        """One greedy generation."""
        request = GenerationRequest(prompt=list(prompt), max_tokens=tokens)
        taken: list[int] = []
        times: list[float] = []
        started = time.perf_counter()
        async with self._generator.generate(request) as stream:
            async for token in stream:
                times.append(time.perf_counter())
                taken.append(token)
        return Timed(taken, started, times)

    async def generate_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timed]:
        """One generation per prompt, all at once; in the order of the prompts."""
        results: dict[int, Timed] = {}

        async def one(index: int, prompt: Sequence[int]) -> None:
            results[index] = await self.generate(prompt, tokens)

        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                nursery.start_soon(one, index, prompt)
        return [results[index] for index in range(len(prompts))]


def free_endpoints(count: int) -> list[Endpoint]:
    return [Endpoint("127.0.0.1", reserve_port()) for _ in range(count)]


def make_engine(config: StageConfig, *, layers: int, width: int) -> StageEngine:
    return WireEngine(
        config.layer_start,
        config.layer_end,
        layers,
        width=width,
        context_length=config.ctx_size,
        max_sequences=config.lane_count,
        max_batch=config.n_batch or 512,
    )


@contextlib.asynccontextmanager
async def open_stage(
    config: StageConfig, topology: StageTopology, spec: ChainSpec, telemetry: Telemetry = NULL_TELEMETRY
) -> AsyncIterator[embed.Stage]:
    """One stage of the chain, in this process."""
    factory = None
    if spec.model is None:
        factory = functools.partial(make_engine, layers=spec.layers, width=spec.width)
    async with trio.open_nursery() as nursery:
        transport: Transport | None = None
        if spec.wire is not None:
            transport = SlowTransport(TcpTransport(), spec.wire, nursery)
        options = StageOptions(telemetry_level="off")
        async with embed.open_stage(
            config,
            topology,
            options,
            engine_factory=factory,
            transport=transport,
            telemetry=telemetry,
        ) as stage:
            yield stage
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def open_chain(spec: ChainSpec) -> AsyncIterator[RunningChain]:
    """The chain, ready, for the length of the block."""
    async with open_lanes(spec) as (stage, pool):
        chunks = OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_size=spec.chunk)
        yield RunningChain(spec, ChainGenerator(stage, pool, "bench", chunks))


@contextlib.asynccontextmanager
async def open_lanes(
    spec: ChainSpec, telemetry: Telemetry = NULL_TELEMETRY
) -> AsyncIterator[tuple[embed.Stage, LanePool]]:
    """Stage 0 of the chain, with its lanes connected, for the length of the block.

    Args:
        telemetry: of stage 0.
    """
    ranges = plan_even(spec.layers, spec.stages)
    if spec.model is not None:
        for part in ranges:
            ensure_slice(spec.model, part.start, part.end)
    topology = make_topology(ranges, free_endpoints(spec.stages), topology_id="bench", model_id="bench")
    configs = make_stage_configs(
        topology,
        run_id="bench",
        model_path=str(spec.model or "none.gguf"),
        ctx_size=spec.context,
        lane_count=spec.lanes,
        n_threads=spec.threads,
        repack=True,
    )
    async with contextlib.AsyncExitStack() as stack:
        for config in configs[1:]:
            await stack.enter_async_context(_stage_process(config, topology, spec))
        stage = await stack.enter_async_context(open_stage(configs[0], topology, spec, telemetry))
        pool = LanePool(stage, spec.lanes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            with trio.fail_after(READY_SECS):
                await pool.wait_ready()
            yield stage, pool
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _stage_process(
    config: StageConfig, topology: StageTopology, spec: ChainSpec
) -> AsyncIterator[None]:
    """A stage in a process of its own, ended with the block."""
    settings = {
        "config": to_json_value(config),
        "topology": to_json_value(topology),
        "spec": attrs.asdict(spec) | {"model": None if spec.model is None else str(spec.model)},
    }
    process = await trio.lowlevel.open_process([sys.executable, "-m", "bench.chains"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        await process.stdin.send_all(json.dumps(settings).encode() + b"\n")
        yield
    finally:
        with trio.move_on_after(5, shield=True):
            await process.stdin.aclose()
            await process.wait()
        if process.returncode is None:
            process.kill()


def read_spec(values: dict[str, Any]) -> ChainSpec:
    model, wire = values.pop("model"), values.pop("wire")
    return ChainSpec(
        **values,
        model=None if model is None else Path(model),
        wire=None if wire is None else WireConditions(**wire),
    )


async def serve_stage(line: bytes) -> None:
    """Be the stage that ``line`` describes until standard input ends."""
    settings = json.loads(line)
    config = from_json_value(settings["config"], StageConfig)
    topology = from_json_value(settings["topology"], StageTopology)
    async with open_stage(config, topology, read_spec(settings["spec"])):
        await trio.to_thread.run_sync(sys.stdin.buffer.read)


def main() -> None:
    trio.run(serve_stage, sys.stdin.buffer.readline())


if __name__ == "__main__":
    main()
