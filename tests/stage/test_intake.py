"""What a stage refuses before it executes anything."""

from __future__ import annotations

import contextlib
import functools

import attrs
import pytest
import trio
import trio.testing

from skippy.config import PeerConfig, StageOptions
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.protocol import Message, MessageKind, RemoteProtocolError, default_state, encode_message
from skippy.stage import open_stage
from skippy.stage.intake import MAX_WINDOW_TOKENS, check_data
from skippy.stage.links import MemoryTransport, TcpTransport
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_failures import read_to_end
from tests.support.cluster import toy_cluster, toy_config, toy_topology
from tests.support.dialing import dial_lane

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=3)


def frame(kind: MessageKind, source: int, count: int = 1) -> Message:
    state = attrs.evolve(default_state(kind), source_stage_index=source)
    return Message(kind, state, token_count=count, request_id=1, session_id=1)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frames_of_the_stage_before_and_of_no_other(stage: int) -> None:
    for source in range(-1, 5):
        message = frame(MessageKind.PREFILL_EMBD, source, count=8)
        if source == stage - 1:
            check_data(message, stage, max_batch=8)
        else:
            with pytest.raises(RemoteProtocolError, match=rf"stage {stage} takes frames of"):
                check_data(message, stage, max_batch=8)


def test_not_more_tokens_than_an_engine_call_takes() -> None:
    with pytest.raises(RemoteProtocolError, match=r"9 tokens; stage 1 takes at most 8 .*n_batch"):
        check_data(frame(MessageKind.PREFILL_EMBD, 0, count=9), 1, max_batch=8)


def test_not_more_tokens_than_are_verified_at_once() -> None:
    check_data(frame(MessageKind.VERIFY_WINDOW, 0, count=MAX_WINDOW_TOKENS), 1, max_batch=512)
    check_data(frame(MessageKind.PREFILL_EMBD, 0, count=MAX_WINDOW_TOKENS + 1), 1, max_batch=512)
    with pytest.raises(RemoteProtocolError, match="VERIFY_WINDOW has 65 tokens; at most 64 are verified"):
        check_data(frame(MessageKind.VERIFY_WINDOW, 0, count=MAX_WINDOW_TOKENS + 1), 1, max_batch=512)


async def test_a_count_that_no_machine_could_hold_costs_its_own_connection_only() -> None:
    with trio.fail_after(20):
        async with toy_cluster(2, transport=TcpTransport()) as cluster, generator_over(cluster) as generator:
            link = await dial_lane(cluster.first)
            await link.send(encode_message(frame(MessageKind.PREFILL_EMBD, -1, count=2**31 - 1)))
            assert await read_to_end(link) == b""
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 3)
            await wait_for_sequences(cluster)


async def test_a_chain_that_skips_a_stage_gives_an_error_and_no_tokens(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The sizes all fit, so without a check the tokens would be wrong and nobody would know."""
    ranges = [(0, 2), (2, 4), (4, 6)]
    endpoints = [f"127.0.0.1:{20_000 + index}" for index in range(3)]
    topology, transport = toy_topology(ranges, endpoints), MemoryTransport()
    async with contextlib.AsyncExitStack() as stack:
        for index in (2, 0):
            config = toy_config(index, ranges, endpoints)
            if index == 0:
                skipping = PeerConfig(stage_id="stage-1", stage_index=1, endpoint=endpoints[2])
                config = attrs.evolve(config, downstream=skipping)
            start, end = ranges[index]
            first = await stack.enter_async_context(
                open_stage(
                    config,
                    topology,
                    StageOptions(),
                    functools.partial(ToyEngine, start, end, 6),
                    transport=transport,
                    inline=True,
                )
            )
        nursery = await stack.enter_async_context(trio.open_nursery())
        pool = LanePool(first, 1)
        nursery.start_soon(pool.serve)
        with pytest.raises(ChainUnavailable):
            await generate(ChainGenerator(first, pool, "toy"), REQUEST)
        nursery.cancel_scope.cancel()


async def test_lanes_at_the_limit_and_one_connection_more() -> None:
    """A chain with all the lanes there may be has room for one more, or a lost lane could not come back."""
    with trio.fail_after(60):
        async with (
            toy_cluster(2, lane_count=256) as cluster,
            generator_over(cluster, lanes=256) as generator,
        ):
            while cluster.first.context.connection_numbers() < 256:
                await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked()
            link = await dial_lane(cluster.stages[1])
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 3)
            link.close()
