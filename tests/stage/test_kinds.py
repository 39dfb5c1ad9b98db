"""Every kind of message is carried out, or refused by its name."""

from __future__ import annotations

import attrs
import pytest
import trio

from skippy.protocol import Message, MessageKind, Reply, ReplyKind, ReplyStats, default_state, encode_message
from skippy.stage import Lane, LaneLost, PendingReply
from skippy.stage.links import MemoryTransport, TcpTransport
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
LAST = len(PROMPT) - 1
MISS = Reply.ack(ReplyStats(kv_lookup_misses=1))

all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


async def generates(driver: Driver, count: int = 3) -> None:
    """The driver's request, from its start, gives what the unsplit engine does; then it stops."""
    expected = unsplit_tokens(PROMPT, count)
    await driver.start(PROMPT)
    for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
        assert await driver.decode(LAST + step, token) == expected[step]
    assert await driver.ask(K.STOP) == Reply.ack()


@all_chains
@pytest.mark.parametrize("transport", [MemoryTransport, TcpTransport])
async def test_one_token_kinds_decode_alike(
    stages: int, transport: type[MemoryTransport] | type[TcpTransport]
) -> None:
    """Light context and readout: the same tokens, in turns, under their own phase and flags."""
    expected = unsplit_tokens(PROMPT, 9)
    kinds = [K.DECODE_LIGHT_CTX, K.DECODE_READOUT, K.DECODE_EMBD] * 3
    with trio.fail_after(20):
        async with toy_cluster(stages, transport=transport()) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            for step, (kind, token) in enumerate(zip(kinds, [PROMPT[-1], *expected], strict=False)):
                assert await driver.decode(LAST + step, token, kind) == expected[step]
            assert await driver.ask(K.STOP) == Reply.ack()
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("field", [{"phase": 2}, {"flags": 0}])
async def test_light_context_keeps_its_own_header(field: dict[str, int]) -> None:
    with trio.fail_after(20):
        async with toy_cluster(2) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPT)
            header = attrs.evolve(default_state(K.DECODE_LIGHT_CTX), current_token=PROMPT[-1], **field)
            message = Message(K.DECODE_LIGHT_CTX, header, LAST, 1, driver.request_id, driver.request_id + 1)
            await driver.link.send(encode_message(message))
            assert await driver.ended()
            await wait_for_sequences(cluster)


@all_chains
@pytest.mark.parametrize("kind", [K.PROBE_PREFILL, K.RESTORE_PREFILL, K.TRY_RESTORE_PREFILL])
async def test_a_prefix_that_nobody_has(stages: int, kind: MessageKind) -> None:
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as driver:
            driver.prompt_tokens = len(PROMPT) - 1
            assert await driver.ask(kind, 0, PROMPT[:-1]) == MISS
            await generates(driver)
            await wait_for_sequences(cluster)


@all_chains
@pytest.mark.parametrize("configured", [True, False])
async def test_a_fused_restore_of_a_prefix_that_nobody_has(stages: int, configured: bool) -> None:
    """The answer is that of a prediction which did not happen; the same request then prefills on its lane."""
    with trio.fail_after(20):
        async with toy_cluster(stages, lane_count=1) as cluster, driver_of(cluster) as driver:
            for request_id in (3, 11):
                driver.request_id = request_id
                if configured:
                    assert await driver.ask(K.CONFIGURE_GENERATION) == Reply.ack()
                missed = await driver.ask(
                    K.TRY_RESTORE_PREFILL_DECODE,
                    LAST,
                    PROMPT,
                    token_count=1,
                    current_token=PROMPT[-1],
                    decode_step=0,
                )
                assert missed == MISS
                await generates(driver)
            assert [engine.decodes for engine in cluster.engines] == [2 * 4] * stages
            await wait_for_sequences(cluster)


@pytest.mark.parametrize(
    ("kind", "count", "tokens"),
    [
        (K.PROBE_PREFILL, 3, 2),
        (K.RESTORE_PREFILL, 1, 2),
        (K.TRY_RESTORE_PREFILL, 0, 1),
        (K.TRY_RESTORE_PREFILL_DECODE, 1, 1),
        (K.TRY_RESTORE_PREFILL_DECODE, 2, 2),
        (K.TRY_RESTORE_PREFILL_DECODE, 0, 2),
    ],
)
async def test_a_prefix_whose_counts_disagree_ends_the_lane(
    kind: MessageKind, count: int, tokens: int
) -> None:
    with trio.fail_after(20):
        async with toy_cluster(1) as cluster, driver_of(cluster) as driver:
            await driver.send(kind, 0, PROMPT[:tokens], token_count=count)
            assert await driver.ended()
            await wait_for_sequences(cluster)


class Sink:
    async def put(self, reply: PendingReply) -> None:
        raise AssertionError("nothing is owed")


async def refusal(cluster: Cluster, message: Message) -> str:
    """Why a lane of stage 0 does not take a message."""
    lane = Lane(cluster.first.context, Sink())
    async with trio.open_nursery() as nursery:
        await nursery.start(lane.run)
        with pytest.raises(LaneLost) as caught:
            await lane.handle(message)
    return str(caught.value)


@all_chains
@pytest.mark.parametrize("kind", [K.STATE_IMPORT, K.STATE_EXPORT])
async def test_session_state_does_not_travel(stages: int, kind: MessageKind) -> None:
    message = Message(kind, default_state(kind), request_id=3, session_id=4)
    with trio.fail_after(20):
        async with toy_cluster(stages) as cluster:
            expected = f"{kind.name} does not fit: no stage takes or gives session state"
            assert await refusal(cluster, message) == expected
            async with driver_of(cluster) as driver:
                await driver.link.send(encode_message(message))
                assert await driver.ended()
            async with driver_of(cluster) as driver:
                await generates(driver)
            await wait_for_sequences(cluster)


async def test_session_state_is_not_even_received() -> None:
    """The announcement is enough: nothing of it is waited for."""
    message = Message(
        K.STATE_IMPORT, default_state(K.STATE_IMPORT), token_count=1000, raw_bytes=bytes(1000), request_id=3
    )
    (frame,) = encode_message(message)[:1]
    with trio.fail_after(20):
        async with toy_cluster(1) as cluster, driver_of(cluster) as driver:
            await driver.link.send([memoryview(bytes(frame))[:72]])
            assert await driver.ended()


async def test_positions_of_their_own_are_refused() -> None:
    message = Message(
        K.PREFILL_EMBD,
        default_state(K.PREFILL_EMBD),
        token_count=1,
        tokens=(65,),
        positions=(0, 0, 0, 0),
        request_id=3,
        session_id=4,
    )
    with trio.fail_after(20):
        async with toy_cluster(1) as cluster:
            assert "PREFILL_EMBD brings 4 positions of its own" in await refusal(cluster, message)


async def test_what_a_stage_tells_of_stale_frames() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    with trio.fail_after(20):
        async with (
            trio.open_nursery() as nursery,
            toy_cluster(2, telemetry=telemetry) as cluster,
            driver_of(cluster) as driver,
        ):
            await nursery.start(telemetry.serve)
            await driver.start(PROMPT)
            driver.generation = 1
            await driver.decode(LAST, PROMPT[-1])
            driver.generation = 0
            for kind in (K.DECODE_EMBD, K.PREFILL_EMBD, K.TRY_RESTORE_PREFILL_DECODE):
                tokens = [1, 2] if kind is K.TRY_RESTORE_PREFILL_DECODE else [1]
                await driver.ask(kind, 0, tokens, token_count=1)
            assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            nursery.cancel_scope.cancel()
    timings = [event for event in sink.events if event.name == names.STAGE_BINARY_MESSAGE_TIMING]
    stale = [event.attributes["message_kind"] for event in timings if event.attributes.get("stale")]
    assert sorted(stale) == [
        "DECODE_EMBD",
        "DECODE_EMBD",
        "PREFILL_EMBD",
        "PREFILL_EMBD",
        "TRY_RESTORE_PREFILL_DECODE",
    ]
    stops = [event for event in sink.events if event.name == names.STAGE_BINARY_SESSION_STOP]
    assert [event.attributes["stale_frames"] for event in stops] == [3, 2], "stage 0 misses by itself"
