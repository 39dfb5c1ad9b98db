"""Stale frames: never executed, answered in their turn, and the request goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from skippy.config import StageOptions
from skippy.protocol import (
    READY_WORD,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    ReplyKind,
)
from skippy.stage import StageError
from skippy.stage.framing import receive_message
from skippy.stage.links import Link, TcpTransport
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import Driver, dial_driver, driver_of, unmeasured
from tests.support.scripted import scripted_peer

K = MessageKind
LAST = len(PROMPT) - 1
WRONG = 33
NO_TOKEN = Reply(ReplyKind.PREDICTED_TOKEN, -1)

all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


def decodes(cluster: Cluster) -> list[int]:
    return [engine.decodes for engine in cluster.engines]


async def finish(driver: Driver, cluster: Cluster) -> None:
    """The lane is whole: it stops, and serves another request."""
    assert await driver.ask(K.STOP) == Reply.ack()
    driver.request_id, driver.generation = 77, 0
    await driver.start(PROMPT)
    assert await driver.decode(LAST, PROMPT[-1]) == unsplit_tokens(PROMPT, 1)[0]
    assert await driver.ask(K.STOP) == Reply.ack()
    await wait_for_sequences(cluster)


@all_chains
async def test_while_prefilling(stages: int) -> None:
    """More of them than there is credit, and of every kind; none makes the connection decode."""
    expected = unsplit_tokens(PROMPT, 2)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            driver.prompt_tokens, driver.generation = len(PROMPT), 5
            await driver.ask(K.CONFIGURE_GENERATION)
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:20])
            driver.generation = 4
            for position in (0, 20, 21, 300, 7, 20):
                await driver.send(K.PREFILL_EMBD, position, [WRONG] * 3)
            await driver.send(K.PREFILL_FINAL_EMBD, 20, [WRONG])
            await driver.send(K.DECODE_EMBD, 20, [WRONG], decode_step=9)
            await driver.send(K.DECODE_LIGHT_CTX, 20, [WRONG])
            await driver.send(K.DECODE_READOUT, 20, [WRONG])
            await driver.send(K.DECODE_REPLAY_EMBD, 20, [WRONG])
            await driver.send(K.DECODE_REPLAY_FINAL_EMBD, 20, [WRONG])
            await driver.verify(9, 20, [WRONG] * 2)
            await driver.send(K.TRY_RESTORE_PREFILL_DECODE, 20, [WRONG] * 2, token_count=1)
            driver.generation = 5
            await driver.send(K.PREFILL_EMBD, 20, PROMPT[20:-1])
            replies = [await driver.reply() for _ in range(15)]
            assert replies[:6] == [Reply.ack()] * 6
            assert replies[6:10] == [NO_TOKEN] * 4
            assert replies[10:12] == [Reply.ack(), NO_TOKEN]
            assert replies[12] == Reply(ReplyKind.PREDICTED_TOKENS, 0, (), window_id=9)
            assert replies[13].kind is ReplyKind.ACK
            assert replies[13].stats.kv_lookup_misses == 1
            assert replies[14] == Reply.ack()
            assert await driver.decode(LAST, PROMPT[-1]) == expected[0]
            assert await driver.decode(LAST + 1, expected[0]) == expected[1]
            assert decodes(cluster) == [4] * stages, "two chunks and two steps"
            await finish(driver, cluster)


@all_chains
async def test_while_decoding(stages: int) -> None:
    """Also kinds that nobody may send any more: they are of the time when one might."""
    expected = unsplit_tokens(PROMPT, 4)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            assert await driver.decode(LAST, PROMPT[-1]) == expected[0]
            driver.generation = 1
            assert await driver.decode(LAST + 1, expected[0]) == expected[1]
            before = decodes(cluster)
            driver.generation = 0
            assert await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:9]) == Reply.ack()
            assert await driver.ask(K.PREFILL_FINAL_EMBD, 0, PROMPT[:9]) == NO_TOKEN
            assert await driver.ask(K.DECODE_EMBD, LAST + 2, [WRONG]) == NO_TOKEN
            missed = await driver.ask(K.TRY_RESTORE_PREFILL_DECODE, 1, [WRONG] * 2, token_count=1)
            assert missed.stats.kv_lookup_misses == 1
            assert decodes(cluster) == before
            driver.generation = 1
            assert await driver.decode(LAST + 2, expected[1]) == expected[2]
            assert await driver.decode(LAST + 3, expected[2]) == expected[3]
            await finish(driver, cluster)


@all_chains
async def test_a_rewind_in_a_higher_generation_and_what_comes_late_after_it(stages: int) -> None:
    expected = unsplit_tokens(PROMPT, 3)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            assert await driver.decode(LAST, WRONG) != expected[0]
            driver.generation = 1
            assert await driver.ask(K.TRIM_SESSION, token_count=10) == Reply.ack()
            assert await driver.ask(K.DECODE_REPLAY_EMBD, 10, PROMPT[10:-1]) == Reply.ack()
            driver.generation = 0
            assert await driver.ask(K.DECODE_EMBD, LAST + 1, [WRONG]) == NO_TOKEN
            driver.generation = 1
            assert await driver.decode(LAST, PROMPT[-1]) == expected[0]
            assert await driver.decode(LAST + 1, expected[0]) == expected[1]
            await finish(driver, cluster)


@all_chains
async def test_frames_without_rows_are_skipped_whatever_the_epoch(stages: int) -> None:
    """As from a stage that has skipped them; with tokens all the same they are wrong."""
    expected = unsplit_tokens(PROMPT, 2)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            assert await driver.ask(K.PREFILL_EMBD, 3) == Reply.ack()
            assert await driver.ask(K.DECODE_EMBD, LAST, current_token=WRONG) == NO_TOKEN
            assert decodes(cluster) == [1] * stages
            assert await driver.decode(LAST, PROMPT[-1]) == expected[0]
            await driver.send(K.DECODE_EMBD, LAST + 1, [WRONG], token_count=0)
            assert await driver.ended()
            await wait_for_sequences(cluster)


async def test_a_frame_without_rows_needs_a_request() -> None:
    with trio.fail_after(20):
        async with toy_cluster(2) as cluster, driver_of(cluster) as driver:
            await driver.send(K.DECODE_EMBD, 0)
            assert await driver.ended()
            await wait_for_sequences(cluster)


@attrs.define
class Returned:
    """A waiter for the return stream of a request that the test drives past stage 0."""

    replies: list[Reply] = attrs.field(factory=list)
    arrived: trio.Event = attrs.field(factory=trio.Event)

    def open_relay(self, link: Link, decoder: ReplyDecoder) -> None:
        """Nothing follows by itself here."""

    def deliver_prediction(self, reply: Reply, annex: ReplyAnnex | None) -> None:
        self.replies.append(reply)
        self.arrived.set()

    def bind_return(self, opening: Message, scope: trio.CancelScope, *, plain: bool) -> None:
        pass

    def fail_return(self, failure: StageError) -> None:
        pass

    async def take(self) -> Reply:
        await self.arrived.wait()
        self.arrived = trio.Event()
        return unmeasured(self.replies.pop())


@contextlib.asynccontextmanager
async def later_stage(cluster: Cluster, index: int) -> AsyncIterator[tuple[Driver, Returned]]:
    """The test as the stage before ``index``, and as what waits at stage 0."""
    returned = Returned()
    async with driver_of(cluster, index) as driver:
        ids = (driver.request_id, driver.request_id + 1)
        cluster.first.context.hub.expect(*ids, returned)
        yield driver, returned


ROW = b"\0" * 32


@pytest.mark.parametrize("index", [1, 2])
async def test_what_an_earlier_stage_has_skipped(index: int) -> None:
    """A later stage, whose own epoch would let it run, does not run it either, and answers on its way."""
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, later_stage(cluster, index) as (driver, returned):
            source = {"source_stage_index": index - 1}
            await driver.ask(K.CONFIGURE_GENERATION)
            assert await driver.ask(K.PREFILL_EMBD, 0, [65], activation=ROW, **source) == Reply.ack()
            for _ in range(9):  # more than there is credit for
                assert await driver.ask(K.PREFILL_EMBD, 0, **source) == Reply.ack()
            assert await driver.ask(K.DECODE_REPLAY_EMBD, 0, **source) == Reply.ack()
            await driver.send(K.DECODE_EMBD, 1, **source)
            assert await returned.take() == NO_TOKEN
            await driver.send(K.VERIFY_WINDOW, 1, seq_id=6, **source)
            assert await returned.take() == Reply(ReplyKind.PREDICTED_TOKENS, window_id=6)
            assert decodes(cluster) == [0] * index + [1] * (3 - index)
            await driver.send(K.DECODE_EMBD, 1, [66], activation=ROW, **source)
            assert (await returned.take()).predicted > 0
            assert decodes(cluster) == [0] * index + [2] * (3 - index)
            assert await driver.ask(K.STOP) == Reply.ack()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("configured", [True, False])
async def test_a_fused_restore_that_misses_behind_stage_zero(index: int, configured: bool) -> None:
    """The final stage says so on the return stream, which it opens for that; then the request may prefill."""
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, later_stage(cluster, index) as (driver, returned):
            source = {"source_stage_index": index - 1}
            if configured:
                await driver.ask(K.CONFIGURE_GENERATION)
            await driver.send(
                K.TRY_RESTORE_PREFILL_DECODE, 2, [65, 66, 67], token_count=1, activation=ROW, **source
            )
            missed = await returned.take()
            assert (missed.kind, missed.stats.kv_lookup_misses) == (ReplyKind.ACK, 1)
            assert sum(decodes(cluster)) == 0
            assert await driver.ask(K.PREFILL_EMBD, 0, [65], activation=ROW, **source) == Reply.ack()
            await driver.send(K.DECODE_EMBD, 1, [66], activation=ROW, **source)
            assert (await returned.take()).predicted > 0
            assert await driver.ask(K.STOP) == Reply.ack()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [1, 2])
async def test_towards_a_plain_peer_a_stale_frame_ends_the_lane(stages: int) -> None:
    options = StageOptions(allow_plain_generation_8=True)
    with trio.fail_after(20):
        async with (
            toy_cluster(stages, options=options, transport=TcpTransport()) as cluster,
            driver_of(cluster, plain=True) as driver,
        ):
            await driver.start(PROMPT)
            driver.generation = 1
            assert await driver.decode(LAST, PROMPT[-1]) == unsplit_tokens(PROMPT, 1)[0]
            driver.generation = 0
            await driver.send(K.DECODE_EMBD, LAST + 1, [WRONG])
            assert await driver.ended()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("kind", [K.PREFILL_EMBD, K.DECODE_REPLAY_EMBD, K.DECODE_EMBD])
async def test_a_plain_stage_below_gets_no_frame_without_rows(kind: MessageKind) -> None:
    options = StageOptions(allow_plain_generation_8=True)
    with trio.fail_after(20):
        async with scripted_peer(options) as peer, dial_driver(peer.stage) as driver:
            driver.generation = 1
            await driver.send(K.PREFILL_EMBD, 0, [65])
            below = await peer.listener.accept()
            await below.send([READY_WORD])
            below.close()  # it does not know what an admission request is
            below = await peer.listener.accept()
            await below.send([READY_WORD])
            decoder = MessageDecoder(peer.stage.info.output_width)
            first = await receive_message(below, decoder)
            assert first is not None
            assert first.kind is K.PREFILL_EMBD
            driver.generation = 0
            await driver.send(kind, 0, [65])
            while not await driver.ended():
                pass  # acknowledged before anyone looked inside
            assert await receive_message(below, decoder) is None
