"""The chain of toy stages: same tokens as the unsplit engine, and lanes that come back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
import trio.testing

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ContextLengthExceeded, GenerationRequest, TokenStream
from skippy.frontend.lanes import LanePool
from skippy.protocol import SamplingConfig
from tests.support.cluster import LAYERS, Cluster, fixed_chunks, toy_cluster

PROMPT = [256, *b"the quick brown fox jumps over the lazy dog"]


def unsplit_tokens(prompt: list[int], count: int, sampling: SamplingConfig | None = None) -> list[int]:
    engine = ToyEngine(0, LAYERS, LAYERS)
    sampler = engine.new_sampler(sampling)
    sampler.accept(prompt[:-1])
    if len(prompt) > 1:
        engine.decode([Segment(0, 0, len(prompt) - 1, tokens=prompt[:-1])])
    tokens, current = [], prompt[-1]
    for step in range(count):
        sampler.accept([current])
        engine.decode([Segment(0, len(prompt) - 1 + step, 1, tokens=[current], logits=1)])
        current = sampler.sample(engine.logits(0), step)
        tokens.append(current)
    return tokens


@contextlib.asynccontextmanager
async def generator_over(
    cluster: Cluster, lanes: int = 2, chunk: int = 7, **options: Any
) -> AsyncIterator[ChainGenerator]:
    pool = LanePool(cluster.first, lanes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.serve)
        await pool.wait_ready()
        yield ChainGenerator(cluster.first, pool, "toy", fixed_chunks(chunk, **options))
        nursery.cancel_scope.cancel()


async def exhaust(stream: TokenStream) -> None:
    """Read to the end: tokens may be there already when a stage fails."""
    async for _ in stream:
        pass


async def generate(generator: ChainGenerator, request: GenerationRequest) -> list[int]:
    async with generator.generate(request) as stream:
        return [token async for token in stream]


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
async def test_chain_generates_what_the_unsplit_engine_does(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, generator_over(cluster) as generator:
            tokens = await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=20))
    assert tokens == unsplit_tokens(PROMPT, 20)


async def test_two_clients_at_once_get_what_each_would_get_alone() -> None:
    seeded = SamplingConfig(flags=1, seed=11, temperature=0.9, top_k=40)
    other = [256, *b"another prompt, of another length"]
    results: dict[str, list[int]] = {}

    async def client(name: str, request: GenerationRequest) -> None:
        results[name] = await generate(generator, request)

    with trio.fail_after(20):
        async with (
            toy_cluster(3) as cluster,
            generator_over(cluster, lanes=2) as generator,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(client, "greedy", GenerationRequest(prompt=other, max_tokens=30))
            nursery.start_soon(
                client, "seeded", GenerationRequest(prompt=PROMPT, max_tokens=30, sampling=seeded)
            )
    assert results["greedy"] == unsplit_tokens(other, 30)
    assert results["seeded"] == unsplit_tokens(PROMPT, 30, seeded)
    assert results["seeded"] != unsplit_tokens(PROMPT, 30)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_one_lane_serves_many_requests_and_no_sequence_leaks(stages: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages, lane_count=1) as cluster:
            async with generator_over(cluster, lanes=1) as generator:
                for count in (1, 3, 5):
                    prompt = PROMPT[:count]
                    tokens = await generate(generator, GenerationRequest(prompt=prompt, max_tokens=4))
                    assert tokens == unsplit_tokens(prompt, 4)
                lane_numbers = cluster.first.context.connection_numbers()
            await wait_for_sequences(cluster)
    # One number per lane (1 at stage 0) was used, and this call took the next: the lane was never replaced.
    assert lane_numbers == 2


@pytest.mark.parametrize("taken", [0, 1, 4])
async def test_leaving_early_frees_the_lane_and_the_next_request_works(taken: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, lane_count=1) as cluster, generator_over(cluster, lanes=1) as generator:
            for _ in range(3):
                async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=50)) as stream:
                    for _ in range(taken):
                        await stream.__anext__()
            tokens = await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=6))
            lane_numbers = cluster.first.context.connection_numbers()
    assert tokens == unsplit_tokens(PROMPT, 6)
    assert lane_numbers == 2


async def test_leaving_costs_at_most_the_decode_step_that_is_under_way() -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, lane_count=1) as cluster, generator_over(cluster, lanes=1) as generator:
            third = trio.Event()

            async def read() -> None:
                async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=400)) as stream:
                    async for _ in stream:
                        if stream.generated == 3:
                            third.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await third.wait()
                before = cluster.engines[-1].decodes
                nursery.cancel_scope.cancel()
            # On the only lane, so the other request is over; one decode step, for there is no prefill.
            await generate(generator, GenerationRequest(prompt=PROMPT[:1], max_tokens=1))
            assert cluster.engines[-1].decodes - before <= 1 + 1


async def test_cancelling_at_any_checkpoint_leaves_the_lane_usable() -> None:
    """Cancel a generation after 0, 1, 2 … scheduling steps, on one lane, and use the lane again."""
    expected = unsplit_tokens(PROMPT, 3)
    with trio.fail_after(60):
        async with toy_cluster(3, lane_count=1, inline=True) as cluster:
            async with generator_over(cluster, lanes=1) as generator:
                for steps in range(0, 120, 3):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(
                            generate, generator, GenerationRequest(prompt=PROMPT, max_tokens=9)
                        )
                        for _ in range(steps):
                            await trio.lowlevel.checkpoint()
                        nursery.cancel_scope.cancel()
                    tokens = await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=3))
                    assert tokens == expected, f"after a cancellation at step {steps}"
            await wait_for_sequences(cluster)


async def test_prompt_and_answer_may_fill_the_context_and_not_more() -> None:
    with trio.fail_after(20):
        async with toy_cluster(2, ctx_size=32) as cluster, generator_over(cluster) as generator:
            async with generator.generate(GenerationRequest(prompt=PROMPT[:30], max_tokens=99)) as stream:
                tokens = [token async for token in stream]
                assert stream.finish_reason == "length"
            assert len(tokens) == 2
            with pytest.raises(ContextLengthExceeded, match="32"):
                await generate(generator, GenerationRequest(prompt=PROMPT[:32], max_tokens=1))


async def test_an_end_of_generation_token_finishes_unless_ignored() -> None:
    make = functools.partial(ToyEngine, end_at=len(PROMPT) + 4)
    ignoring = SamplingConfig(flags=1, temperature=0.0, ignore_eos=True)
    with trio.fail_after(20):
        async with toy_cluster(3, make_engine=make) as cluster, generator_over(cluster) as generator:
            async with generator.generate(GenerationRequest(prompt=PROMPT, max_tokens=20)) as stream:
                tokens = [token async for token in stream]
                assert stream.finish_reason == "stop"
            assert tokens == unsplit_tokens(PROMPT, 5)
            request = GenerationRequest(prompt=PROMPT, max_tokens=20, sampling=ignoring)
            assert len(await generate(generator, request)) == 20


async def wait_for_sequences(cluster: Cluster) -> None:
    """Wait until every stage has all its sequences back."""
    total = [stage.info.max_sequences for stage in cluster.stages]
    while cluster.free_sequences != total:
        await trio.testing.wait_all_tasks_blocked(0.001)
