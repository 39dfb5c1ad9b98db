"""Peers that do what no peer of ours does, to stages in this process: nothing stays behind, not one task.

``tests/e2e/test_hostile.py`` does the same to real processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import attrs
import pytest
import trio
import trio.testing

from skippy.config import StageOptions
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable
from skippy.frontend.lanes import LanePool
from skippy.protocol import Buffer, Message, MessageKind, ReplyDecoder, ReplyKind, default_state, encode_frame
from skippy.stage.framing import ACCEPT_SECS, FRAME_SECS, PART_BYTES, receive_reply, send_frame
from skippy.stage.links import Link, LinkClosed
from skippy.stage.links.memory import MemoryLink
from skippy.stage.liveness import IDLE_SECS
from skippy.stage.writer import LinkWriter
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_chain_over_links import REQUEST
from tests.stage.test_lane_ends import check_serves
from tests.support.admission import lane_request
from tests.support.attacks import run_attacks, vectors
from tests.support.cluster import NO_REPLAY, Cluster, toy_cluster
from tests.support.dialing import dial_lane
from tests.support.hostile import Target, besieged
from tests.support.scripted import scripted_peer

WIDTH = 8


@pytest.mark.slow
async def test_attacks_leave_no_task_sequence_or_memory() -> None:
    options = StageOptions(link_token="secret")

    async def answers_on_both_lanes() -> list[list[int]]:
        answers: list[list[int]] = []

        async def ask() -> None:
            answers.append(await generate(generator, REQUEST))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        return answers

    right = unsplit_tokens(PROMPT, 8)
    with trio.fail_after(240):
        async with (
            toy_cluster(3, scheme="tcp", options=options, lane_count=8) as cluster,
            generator_over(cluster, lanes=2) as generator,
        ):
            assert await answers_on_both_lanes() == [right, right]
            await trio.testing.wait_all_tasks_blocked(0.05)
            tasks = trio.lowlevel.current_statistics().tasks_living
            for stage in cluster.stages:
                target = Target(stage.endpoint.host, stage.endpoint.port, b"secret", lane_request(stage))
                async with besieged(target, strangers=20):
                    await run_attacks(target)
                    assert await answers_on_both_lanes() == [right, right]
            await wait_for_sequences(cluster)
            while trio.lowlevel.current_statistics().tasks_living > tasks:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert [stage.context.frame_budget.used for stage in cluster.stages] == [0, 0, 0]
            assert await answers_on_both_lanes() == [right, right]


@pytest.mark.parametrize("on", ["lane", "return stream"])
async def test_malformed_replies_cost_their_request_and_nothing_else(
    on: str, autojump_clock: trio.testing.MockClock
) -> None:
    """A last stage that answers with each malformed golden vector, and closes the connection."""
    async with scripted_peer(inline=True) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        generator = ChainGenerator(peer.stage, pool, "toy", NO_REPLAY)

        async def answer(data: bytes) -> None:
            lane = await peer.accept()
            if on == "lane":
                await lane.receive(MessageKind.CONFIGURE_GENERATION)
                target = lane.link
            else:
                await lane.configure()
                assert lane.returns is not None
                target = lane.returns
            with contextlib.suppress(LinkClosed):
                await target.send([data])
            lane.link.close()
            target.close()

        for name, data in vectors("reply"):
            nursery.start_soon(answer, data)
            with pytest.raises(ChainUnavailable) as caught:
                await generate(generator, REQUEST)
            assert str(caught.value), name
        await check_serves(peer, pool)
        nursery.cancel_scope.cancel()


def frame(kind: MessageKind, position: int = 0, count: int = 0) -> Message:
    """For the second of two toy stages."""
    state = attrs.evolve(default_state(kind), source_stage_index=0 if count else -1)
    return Message(
        kind,
        state,
        pos_start=position,
        token_count=count,
        tokens=tuple(range(count)),
        activation=bytes(count * WIDTH * 4),
        request_id=3,
        session_id=4,
    )


@contextlib.asynccontextmanager
async def lane_into_the_last() -> AsyncIterator[tuple[Cluster, Link]]:
    """The last of two toy stages with a prefilled lane, whose Ack is not read yet."""
    async with toy_cluster(2, inline=True, lane_count=1) as cluster:
        last = cluster.stages[1]
        link = await dial_lane(last)
        await link.send(encode_frame(frame(MessageKind.PREFILL_EMBD, 0, 4), WIDTH))
        yield cluster, link
        link.close()


async def acknowledged(link: Link, decoder: ReplyDecoder) -> None:
    reply = await receive_reply(link, decoder)
    assert reply is not None
    assert reply.kind is ReplyKind.ACK


async def test_a_live_request_that_falls_silent_gives_its_sequence_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with lane_into_the_last() as (cluster, link):
        await acknowledged(link, ReplyDecoder())
        start = trio.current_time()
        assert cluster.free_sequences == [1, 0]
        with contextlib.suppress(LinkClosed):
            assert await link.receive_into(memoryview(bytearray(1))) == 0
        assert trio.current_time() - start == pytest.approx(IDLE_SECS, abs=1)
        assert cluster.free_sequences == [1, 1]


async def test_a_lane_may_be_silent_between_requests(autojump_clock: trio.testing.MockClock) -> None:
    async with lane_into_the_last() as (cluster, link):
        decoder = ReplyDecoder()
        await acknowledged(link, decoder)
        for _ in range(2):
            await link.send(encode_frame(frame(MessageKind.STOP), WIDTH))
            await acknowledged(link, decoder)
            assert cluster.free_sequences == [1, 1]
            await trio.sleep(10 * IDLE_SECS)
            for position in (0, 4):
                await link.send(encode_frame(frame(MessageKind.PREFILL_EMBD, position, 4), WIDTH))
                await acknowledged(link, decoder)
                await trio.sleep(IDLE_SECS - 1)


async def test_a_peer_that_reads_no_replies_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    """A send on a memory link waits until the peer reads."""
    async with lane_into_the_last() as (cluster, link):
        start = trio.current_time()
        await trio.sleep(FRAME_SECS - 1)
        assert cluster.free_sequences == [1, 0]
        await trio.sleep(2)
        assert cluster.free_sequences == [1, 1]
        assert trio.current_time() - start < IDLE_SECS
        with pytest.raises(LinkClosed):
            await link.send([b"x"])


async def test_a_peer_that_takes_no_frames_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    ours, _theirs = trio.testing.lockstep_stream_pair()
    writer = LinkWriter(MemoryLink(ours, "peer"), capacity=1)
    writer.put([b"frame"])
    start = trio.current_time()
    with pytest.raises(LinkClosed, match="peer did not take a frame within 300 s"):
        await writer.run()
    assert trio.current_time() - start == pytest.approx(ACCEPT_SECS)


class MeteredLink(MemoryLink):
    """Takes each send of bytes in a time of its own."""

    def __init__(self, secs: float) -> None:
        super().__init__(trio.testing.memory_stream_pair()[0], "peer")
        self.secs = secs
        self.sizes: list[int] = []

    async def send(self, buffers: Sequence[Buffer]) -> None:
        self.sizes.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        await trio.sleep(self.secs)


async def test_a_large_frame_may_take_as_long_as_it_is_taken_bit_by_bit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A link of 0.3 Mbit/s takes 22 MB in ten minutes, which no part of them exceeds."""
    link = MeteredLink(ACCEPT_SECS - 1)
    await send_frame(link, [bytes(100), memoryview(bytes(2 * PART_BYTES + 7))], ACCEPT_SECS)
    assert link.sizes == [100, PART_BYTES, PART_BYTES, 7]
    link = MeteredLink(ACCEPT_SECS + 1)
    with pytest.raises(LinkClosed, match="peer did not take a frame within 300 s"):
        await send_frame(link, [bytes(PART_BYTES), b"x"], ACCEPT_SECS)
    link = MeteredLink(1)
    await send_frame(link, [bytes(100), bytes(PART_BYTES - 100)], ACCEPT_SECS)
    assert link.sizes == [PART_BYTES]
