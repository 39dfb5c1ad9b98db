"""A prompt on its way into the chain: how it is cut, and what the stages say of it teaches the next one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio

from skippy.config import OpenAIOptions
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.stage.clock import measured_on
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import generate, unsplit_tokens
from tests.stage.test_statistics import COSTS, Work
from tests.support.cluster import toy_cluster

PROMPT = [256, *b"a prompt of forty tokens and the last one"[:40]]
OPTIONS = OpenAIOptions(
    prefill_chunk_size=10, prefill_adaptive_start=10, prefill_adaptive_step=5, prefill_adaptive_max=20
)


@contextlib.asynccontextmanager
async def observed_chain(
    stages: int,
    options: OpenAIOptions,
    costs: Sequence[int] = COSTS,
    **cluster_options: Any,
) -> AsyncIterator[tuple[ChainGenerator, MemorySink, trio.Nursery]]:
    """A chain whose clock only computing moves on, with an endpoint of one lane, and its trace points."""
    work, sink = Work(), MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    with measured_on(work.seconds), trio.fail_after(20):
        async with (
            trio.open_nursery() as nursery,
            toy_cluster(stages, inline=True, telemetry=telemetry, **cluster_options) as cluster,
        ):
            await nursery.start(telemetry.serve)
            for engine, cost in zip(cluster.engines, costs, strict=False):
                work.slow_down(engine, cost)
            pool = LanePool(cluster.first, 1)
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            yield ChainGenerator(cluster.first, pool, "toy", options), sink, nursery
            nursery.cancel_scope.cancel()


def attributes(sink: MemorySink, name: str) -> list[dict[str, Any]]:
    return [dict(event.attributes) for event in sink.events if event.name == name]


async def ask(generator: ChainGenerator, count: int) -> None:
    """``count`` requests; the lane is idle again, and all is learnt, when the one after the last begins."""
    for _ in range(count):
        assert await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=3)) == unsplit_tokens(
            PROMPT, 3
        )
    await generate(generator, GenerationRequest(prompt=PROMPT[:1], max_tokens=1))


@pytest.mark.parametrize(("stages", "slowest"), [(2, 1), (3, 1)])
async def test_what_one_request_teaches_cuts_the_next(stages: int, slowest: int) -> None:
    # The slowest stage takes 0.7 ms a chunk, in which nothing is exposed, so only the ramp is seen at first.
    async with observed_chain(stages, OPTIONS) as (generator, sink, nursery):
        await ask(generator, 2)
        nursery.cancel_scope.cancel()
    chunks = attributes(sink, names.STAGE_OPENAI_PREFILL_CHUNK)
    total, first = 0, []
    for chunk in chunks:
        assert chunk["stage0_compute_ms"] == COSTS[0] / 1000
        assert chunk["pos_start"] == total
        total = (total + chunk["token_count"]) % (len(PROMPT) - 1)
        if chunk["seq_id"] == 0:
            first.append(chunk["token_count"])
    assert first == [10, 15]
    learnt = attributes(sink, names.STAGE_OPENAI_PREFILL_CALIBRATION)
    assert [event["stage"] for event in learnt] == [slowest] * 2
    assert [event["observations"] for event in learnt] == [1, 2]
    assert learnt[0]["bottleneck_ms"] == COSTS[slowest] / 1000
    assert learnt[0]["ms_per_token"] == pytest.approx(0.7 / learnt[0]["token_count"])
    prefills = attributes(sink, names.STAGE_OPENAI_PREFILL)
    assert [event["estimate_ms_per_token"] for event in prefills] == [
        0.0,
        learnt[0]["ms_per_token"],
        learnt[1]["ms_per_token"],
    ]
    assert prefills[0]["prefill_token_count"] == len(PROMPT) - 1
    assert prefills[0]["prefill_chunk_policy"] == "adaptive-ramp"
    assert prefills[0]["prefill_chunk_tokens_min"] <= 10 <= prefills[0]["prefill_chunk_tokens_max"] <= 20


async def test_a_slow_stage_holds_chunks_at_their_start() -> None:
    slow = [1000, 900_000, 1000]
    async with observed_chain(3, OPTIONS, slow) as (generator, sink, nursery):
        await ask(generator, 2)
        nursery.cancel_scope.cancel()
    cut = [chunk["token_count"] for chunk in attributes(sink, names.STAGE_OPENAI_PREFILL_CHUNK)]
    assert cut == [10, 15, 15, *[10] * 4]


async def test_a_chain_of_one_learns_too_but_does_not_ramp() -> None:
    async with observed_chain(1, OPTIONS) as (generator, sink, nursery):
        await ask(generator, 2)
        nursery.cancel_scope.cancel()
    assert [c["token_count"] for c in attributes(sink, names.STAGE_OPENAI_PREFILL_CHUNK)] == [40, 40]
    learnt = attributes(sink, names.STAGE_OPENAI_PREFILL_CALIBRATION)
    assert [event["stage"] for event in learnt] == [0, 0]
    assert learnt[1]["bottleneck_ms"] == COSTS[0] / 1000


async def test_a_chunk_is_never_more_than_the_engine_takes() -> None:
    options = OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_schedule=(7, 600))
    make = functools.partial(ToyEngine, max_batch=300)
    async with observed_chain(2, options, make_engine=make) as (generator, sink, nursery):
        request = GenerationRequest(prompt=[65] * 511, max_tokens=1)
        await generate(generator, request)
        nursery.cancel_scope.cancel()
    assert [c["token_count"] for c in attributes(sink, names.STAGE_OPENAI_PREFILL_CHUNK)] == [7, 300, 203]
