"""Stages that do not fit each other never exchange a frame, and say why."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageConfig, StageOptions
from skippy.engine import StageEngine
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    READY_WORD,
    ConnectionRole,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    ReplyDecoder,
    default_state,
    encode_message,
    encode_reply,
    encode_transport_auth,
)
from skippy.stage import DownstreamUnavailable, Stage, open_stage
from skippy.stage.context import HANDSHAKE_SECS
from skippy.stage.framing import receive_message, receive_reply
from skippy.stage.links import Link, MemoryTransport
from skippy.stage.refusals import Refusals
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_failures import read_to_end
from tests.support.admission import engine_admission, lane_request
from tests.support.cluster import toy_cluster, toy_config, toy_topology
from tests.support.dialing import dial_stage
from tests.support.scripted import ENDPOINTS, RANGES

PLAIN = StageOptions(allow_plain_generation_8=True)
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=4)


@contextlib.asynccontextmanager
async def chain(
    ranges: Sequence[tuple[int, int]], *, width: int = 8, **last: Any
) -> AsyncIterator[tuple[Stage, ChainGenerator]]:
    """Stages that know their neighbours alone; ``width`` and ``last`` are of the last one."""
    endpoints = [f"127.0.0.1:{20_000 + index}" for index in range(len(ranges))]
    transport = MemoryTransport()
    async with contextlib.AsyncExitStack() as stack:
        for index in reversed(range(len(ranges))):
            is_last = index == len(ranges) - 1
            config = toy_config(index, ranges, endpoints)
            topology = None
            if is_last and index > 1:  # how it finds stage 0; in its own view all layers fit
                seen = [*ranges[:-2], (ranges[-2][0], ranges[-1][0]), ranges[-1]]
                topology = toy_topology(seen, endpoints)
            if is_last:
                config = attrs.evolve(config, **last)

            def engine(config: StageConfig = config, is_last: bool = is_last) -> StageEngine:
                return ToyEngine(
                    config.layer_start,
                    config.layer_end,
                    6,
                    width=width if is_last else 8,
                    context_length=config.ctx_size,
                )

            stage = await stack.enter_async_context(
                open_stage(config, topology, StageOptions(), engine, transport=transport, inline=True)
            )
        nursery = await stack.enter_async_context(trio.open_nursery())
        pool = LanePool(stage, 1)
        nursery.start_soon(pool.serve)
        yield stage, ChainGenerator(stage, pool, "toy")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("ranges", "last", "reason"),
    [
        ([(0, 2), (3, 6)], {}, "layer_start: expected 3, found 2"),
        ([(0, 4), (3, 6)], {}, "layer_start: expected 3, found 4"),
        ([(0, 3), (3, 6)], {"run_id": "else"}, "run_id: expected else, found test"),
        ([(0, 3), (3, 6)], {"topology_id": "else"}, "topology_id: expected else, found test"),
        ([(0, 3), (3, 6)], {"model_id": "else"}, "model_id: expected else, found toy"),
        ([(0, 3), (3, 6)], {"stage_id": "else"}, "target_id: expected else, found stage-1"),
        ([(0, 3), (3, 6)], {"cache_type_k": "q8_0"}, "cache_type_k: expected q8_0, found f16"),
        ([(0, 3), (3, 6)], {"cache_type_v": "q8_0"}, "cache_type_v: expected q8_0, found f16"),
        ([(0, 3), (3, 6)], {"ctx_size": 256}, "context_length: expected 256, found 512"),
        ([(0, 3), (3, 6)], {"width": 16}, "package_id: expected sha256:"),
    ],
)
async def test_a_chain_that_does_not_fit_is_refused_with_the_reason(
    ranges: list[tuple[int, int]],
    last: dict[str, Any],
    reason: str,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Without a check the tokens would be wrong, or the frames out of step, and nobody would know."""
    async with chain(ranges, **last) as (_, generator):
        with pytest.raises(ChainUnavailable) as caught:
            await generate(generator, REQUEST)
    text = str(caught.value)
    assert text.startswith("the chain is not ready: stage at 127.0.0.1:20001 did not become ready: ")
    assert f"it refuses this stage: {reason}" in text


async def test_a_refusal_that_lasts_is_asked_for_ever_less_often_and_logged_once_on_both_sides(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times: list[float] = []
    connect = MemoryTransport.connect

    async def counted(self: MemoryTransport, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        times.append(trio.current_time())
        return await connect(self, endpoint, source_host=source_host)

    monkeypatch.setattr(MemoryTransport, "connect", counted)
    async with chain([(0, 2), (3, 6)]):
        await trio.sleep(40)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 10, 10], abs=0.01)
    said = [record.msg for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert sorted(entry["event"] for entry in said if isinstance(entry, dict)) == [
        "a connection was refused",
        "the next stage cannot be reached; trying again",
    ]


def test_a_refusal_is_news_again_once_its_host_was_admitted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for peer in ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"):
        refusals.tell(peer, "why")
    refusals.forget("10.0.0.1:3")
    for peer in ("10.0.0.1:4", "10.0.0.2:2"):
        refusals.tell(peer, "why")
    entries = [record.msg for record in caplog.records]
    assert [entry["peer"] for entry in entries if isinstance(entry, dict)] == [
        "10.0.0.1:1",
        "10.0.0.2:1",
        "10.0.0.1:4",
    ]


@pytest.mark.parametrize("broken", [2, 3])
async def test_a_refusal_further_down_is_told_up_the_chain(
    broken: int, autojump_clock: trio.testing.MockClock
) -> None:
    ranges = [(0, 1), (1, 2), (2, 4), (3, 6)] if broken == 3 else [(0, 2), (2, 3), (4, 6)]
    async with chain(ranges) as (_, generator):
        with pytest.raises(ChainUnavailable) as caught:
            await generate(generator, REQUEST)
    assert str(caught.value) == (
        "the chain is not ready: "
        + "".join(
            f"stage at 127.0.0.1:{20_000 + index} did not become ready: it refuses this stage: "
            "downstream: expected stages below that admit each other, found "
            for index in range(1, broken)
        )
        + f"stage at 127.0.0.1:{20_000 + broken} did not become ready: it refuses this stage: layer_start: "
        + ("expected 3, found 4" if broken == 3 else "expected 4, found 3")
    )


async def test_a_width_alone_is_refused_too() -> None:
    """With the same model, which no engine of ours could get wrong."""
    with trio.fail_after(20):
        async with toy_cluster(2) as cluster:
            wrong = attrs.evolve(lane_request(cluster.stages[1]), activation_width=9)
            with pytest.raises(DownstreamUnavailable, match="activation_width: expected 8, found 9"):
                await dial(cluster.transport, cluster.stages[1], wrong)
            more = attrs.evolve(lane_request(cluster.stages[1]), batch_rows=513)
            with pytest.raises(DownstreamUnavailable, match="batch_rows: expected at most 512, found 513"):
                await dial(cluster.transport, cluster.stages[1], more)


async def dial(transport: Any, stage: Stage, request: Any) -> Link:
    return await dial_stage(transport, stage.endpoint, request=request)


def bare(kind: MessageKind, **fields: Any) -> bytes:
    return b"".join(encode_message(Message(kind, default_state(kind), request_id=1, session_id=1, **fields)))


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_plain_peer_is_refused_and_the_chain_goes_on(index: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, generator_over(cluster) as generator:
            link = await dial(cluster.transport, cluster.stages[index], None)
            await link.send([bare(MessageKind.STOP)])
            assert await read_to_end(link) == b""
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 4)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_plain_peer_is_admitted_where_it_may(index: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, options=PLAIN) as cluster, generator_over(cluster) as generator:
            link = await dial(cluster.transport, cluster.stages[index], None)
            replies = ReplyDecoder()
            for _ in range(2):
                await link.send([bare(MessageKind.STOP)])
                assert await receive_reply(link, replies) == Reply.ack()
            link.close()
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 4)
            # What can be compared is compared all the same.
            wrong = attrs.evolve(lane_request(cluster.stages[index]), run_id="else")
            with pytest.raises(DownstreamUnavailable, match="run_id: expected test, found else"):
                await dial(cluster.transport, cluster.stages[index], wrong)


async def plain_last_stage(transport: MemoryTransport, stage: Stage, listener: Any) -> int:
    """A last stage that only knows the ready word: one request of one token. Returns the packets refused."""
    refused = 0
    while True:
        link = await listener.accept()
        await link.send([READY_WORD])
        first = bytearray(4)
        if await link.receive_into(memoryview(first)) and first != b"\x0e\0\0\0":
            refused += 1
            link.close()  # no kind of message that it knows
            continue
        break
    decoder = MessageDecoder(8)
    decoder.receive_data(first)
    message = await receive_message(link, decoder)
    assert message is not None
    assert message.kind is MessageKind.CONFIGURE_GENERATION
    returns = await dial(transport, stage, None)
    ids = {"request_id": message.request_id, "session_id": message.session_id}
    opening = MessageKind.PREDICTION_RETURN_OPEN
    await returns.send(encode_message(Message(opening, default_state(opening), **ids)))
    await link.send([encode_reply(Reply.ack())])
    while message is not None and message.kind is not MessageKind.STOP:
        message = await receive_message(link, decoder)
        assert message is not None
        if message.kind is MessageKind.DECODE_EMBD:
            await returns.send([encode_reply(Reply.predicted_token(65))])
        else:
            await link.send([encode_reply(Reply.ack())])
    return refused


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_last_stage_that_only_knows_the_ready_word(
    allowed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    transport = MemoryTransport()
    listener = await transport.listen(Endpoint.parse(ENDPOINTS[1]))
    options = StageOptions(allow_plain_generation_8=allowed, downstream_connect_timeout_secs=2)
    first = open_stage(
        toy_config(0, RANGES, ENDPOINTS),
        None,
        options,
        lambda: ToyEngine(0, 3, 6),
        transport=transport,
        inline=True,
    )
    refused = -1
    async with first as stage, trio.open_nursery() as nursery:

        async def peer() -> None:
            nonlocal refused
            refused = await plain_last_stage(transport, stage, listener)

        nursery.start_soon(peer)
        pool = LanePool(stage, 1)
        nursery.start_soon(pool.serve)
        generator = ChainGenerator(stage, pool, "toy")
        request = GenerationRequest(prompt=PROMPT, max_tokens=1)
        if allowed:
            assert await generate(generator, request) == [65]
            await trio.testing.wait_all_tasks_blocked()
            assert refused == 1
        else:
            with pytest.raises(ChainUnavailable, match="older or incomplete peer"):
                await generate(generator, request)
            assert refused == -1
        nursery.cancel_scope.cancel()
    listener.close()


async def test_a_connection_keeps_to_the_role_it_was_admitted_in() -> None:
    last = engine_admission(
        toy_config(2, [(0, 2), (2, 4), (4, 6)], ["127.0.0.1:1"] * 3), ToyEngine(4, 6, 6).info
    )
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster:
            returns = last.stage_zero
            assert returns is not None
            for request, kind in (
                (returns, MessageKind.STOP),
                (lane_request(cluster.first), MessageKind.PREDICTION_RETURN_OPEN),
            ):
                link = await dial(cluster.transport, cluster.first, request)
                await link.send([bare(kind)])
                assert await read_to_end(link) == b""
            for index in (1, 2):
                wrong = attrs.evolve(lane_request(cluster.stages[index]), role=ConnectionRole.RETURN)
                with pytest.raises(DownstreamUnavailable, match="role: expected lane, found return"):
                    await dial(cluster.transport, cluster.stages[index], wrong)


@pytest.mark.parametrize("index", [0, 1])
async def test_a_peer_that_does_not_ask_is_not_kept(
    index: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with toy_cluster(2, inline=True) as cluster:
        link = await dial(cluster.transport, cluster.stages[index], None)
        started = trio.current_time()
        assert await read_to_end(link) == b""
        assert trio.current_time() - started == pytest.approx(HANDSHAKE_SECS)
        await wait_for_sequences(cluster)


async def test_a_plain_lane_may_stay_idle(autojump_clock: trio.testing.MockClock) -> None:
    async with toy_cluster(2, options=PLAIN, inline=True) as cluster:
        link = await dial(cluster.transport, cluster.stages[1], None)
        await trio.sleep(100 * HANDSHAKE_SECS)
        await link.send([bare(MessageKind.STOP)])
        assert await receive_reply(link, ReplyDecoder()) == Reply.ack()


async def test_a_stranger_without_the_token_learns_nothing() -> None:
    options = StageOptions(link_token="s3cret")
    with trio.fail_after(20):
        async with toy_cluster(2, options=options) as cluster:
            link = await cluster.transport.connect(cluster.stages[1].endpoint)
            await link.send([bare(MessageKind.STOP)])
            assert await read_to_end(link) == b""


async def test_the_log_speaks_of_tokens_only_where_they_are_at_fault(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that has shown the token and asks for something else is told that alone."""
    async with toy_cluster(2, options=StageOptions(link_token="s3cret"), inline=True) as cluster:
        link = await cluster.transport.connect(cluster.stages[1].endpoint)
        await link.send([encode_transport_auth(b"s3cret") + b"nonsense"])
        await read_to_end(link)
    (entry,) = (record.msg for record in caplog.records if record.levelname == "WARNING")
    assert isinstance(entry, dict)
    assert (
        entry["reason"] == "older or incomplete peer: it sent no admission packet, but starts with 6e6f6e73"
    )


async def test_the_log_says_once_that_a_token_is_wrong_or_missing(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    options = StageOptions(link_token="s3cret")
    async with toy_cluster(2, options=options, inline=True) as cluster:
        for shown in (b"wrong", b"other", None, None):
            link = await cluster.transport.connect(cluster.stages[1].endpoint)
            if shown is not None:
                await link.send([encode_transport_auth(shown)])
            assert await read_to_end(link) == b""
    same = "; all stages need the same token (--link-token-file)"
    entries = [record.msg for record in caplog.records if record.levelname == "WARNING"]
    assert [entry["reason"] for entry in entries if isinstance(entry, dict)] == [
        "wrong transport token" + same,
        "showed no link token" + same,
    ]
