"""What breaks one lane stays in that lane."""

from __future__ import annotations

import socket
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageOptions
from skippy.engine import EngineError
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationError, GenerationRequest, InvalidSampling
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    READY_WORD,
    DialerHandshake,
    Message,
    MessageDecoder,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyDecoder,
    ReplyKind,
    SamplingConfig,
    default_state,
    encode_message,
    encode_reply,
)
from skippy.stage import DownstreamUnavailable, StageStartError, open_stage
from skippy.stage.context import HANDSHAKE_SECS
from skippy.stage.dialing import DialWatch
from skippy.stage.framing import receive_reply
from skippy.stage.links import Link, LinkClosed, MemoryTransport, TcpTransport
from tests.stage.test_chain import (
    PROMPT,
    exhaust,
    generate,
    generator_over,
    unsplit_tokens,
    wait_for_sequences,
)
from tests.support.admission import admit_peer, engine_admission
from tests.support.cluster import toy_cluster, toy_config
from tests.support.dialing import dial_lane, dial_stage
from tests.support.scripted import scripted_peer

REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=8)


@pytest.mark.parametrize("broken", [0, 1, 2])
async def test_an_engine_failure_ends_one_request_and_the_chain_goes_on(broken: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3) as cluster, generator_over(cluster, lanes=2) as generator:
            async with generator.generate(REQUEST) as bystander:
                tokens = [await bystander.__anext__()]
                async with generator.generate(REQUEST) as stream:
                    await stream.__anext__()
                    cluster.engines[broken].fail_next = EngineError("out of luck")
                    with pytest.raises(GenerationError):
                        await exhaust(stream)
                tokens += [token async for token in bystander]
            assert tokens == unsplit_tokens(PROMPT, 8)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("broken", [1, 2])
async def test_a_fault_in_our_last_words_stays_in_its_connection(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    with trio.fail_after(20):
        async with (
            toy_cluster(3) as cluster,
            generator_over(cluster, replay_on_stage_loss=False) as generator,
        ):
            with monkeypatch.context() as patch:
                patch.setattr("skippy.stage.upstream._say_last", fail)
                cluster.engines[broken].fail_next = EngineError("out of luck")
                with pytest.raises(GenerationError):
                    await generate(generator, REQUEST)
                await wait_for_sequences(cluster)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_a_refused_setting_is_reported_as_such_on_a_chain_of_one() -> None:
    bad = GenerationRequest(
        prompt=PROMPT, max_tokens=2, sampling=SamplingConfig(flags=1, samplers=("nonsense",))
    )
    with trio.fail_after(20):
        async with toy_cluster(1) as cluster, generator_over(cluster) as generator:
            with pytest.raises(InvalidSampling, match="nonsense"):
                await generate(generator, bad)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)


async def test_a_lost_link_fails_the_request_and_lanes_are_replaced() -> None:
    transport = CuttableTransport()
    with trio.fail_after(30):
        async with (
            toy_cluster(3, transport=transport) as cluster,
            generator_over(cluster, replay_on_stage_loss=False) as generator,
        ):
            async with generator.generate(REQUEST) as stream:
                await stream.__anext__()
                transport.cut()
                with pytest.raises(ChainUnavailable):
                    await exhaust(stream)
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            await wait_for_sequences(cluster)


async def test_requests_say_which_stage_is_missing(autojump_clock: trio.testing.MockClock) -> None:
    options = StageOptions(downstream_connect_timeout_secs=5)
    async with toy_cluster(3, options=options, inline=True) as cluster:
        cluster.stages[1].context.transport._listeners.clear()  # type: ignore[attr-defined]
        pool = LanePool(cluster.first, 1)
        generator = ChainGenerator(cluster.first, pool, "toy")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            with pytest.raises(ChainUnavailable, match="not ready"):
                await generate(generator, REQUEST)
            await trio.sleep(6)
            assert not pool.ready
            with pytest.raises(ChainUnavailable, match=r"127\.0\.0\.1:20001 did not become ready: nothing"):
                await generate(generator, REQUEST)
            nursery.cancel_scope.cancel()


async def test_the_first_failure_of_a_dial_is_told_at_once(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for all lanes and attempts, and long before the dial gives up."""
    async with toy_cluster(2, inline=True) as cluster:
        listeners = cluster.transport._listeners  # type: ignore[attr-defined]
        away = listeners.copy()
        listeners.clear()
        pool = LanePool(cluster.first, 4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            await trio.sleep(5)
            told = "the chain is not ready: stage at 127.0.0.1:20001 did not become ready: nothing listens"
            assert pool.unready is not None
            assert pool.unready.startswith(told)
            listeners.update(away)
            await pool.wait_ready()
            assert pool.unready is None
            nursery.cancel_scope.cancel()
    [warning] = [record.msg for record in caplog.records if record.levelname == "WARNING"]
    assert isinstance(warning, dict)
    assert warning["endpoint"] == "127.0.0.1:20001"
    assert warning["reason"].startswith("nothing listens")


def test_a_reason_is_logged_again_only_when_it_is_new(caplog: pytest.LogCaptureFixture) -> None:
    watch, endpoint = DialWatch(), Endpoint("10.0.0.9", 1)
    for reason in ("asleep", "asleep", "away", "away"):
        watch.waits(endpoint, "it still loads")
        watch.failed(endpoint, reason)
    assert watch.trouble == "stage at 10.0.0.9:1 did not become ready: away"
    watch.succeeded()
    assert watch.trouble is None
    watch.failed(endpoint, "away")
    logged = [record.msg for record in caplog.records]
    assert [log["reason"] for log in logged if isinstance(log, dict)] == ["asleep", "away", "away"]


async def test_dialing_names_the_endpoint_and_the_reason(autojump_clock: trio.testing.MockClock) -> None:
    started = trio.current_time()
    with pytest.raises(DownstreamUnavailable, match=r"10\.0\.0\.9:1 did not become ready within 7 s"):
        await dial_stage(MemoryTransport(), Endpoint("10.0.0.9", 1), timeout_secs=7)
    assert trio.current_time() - started == pytest.approx(7)


@pytest.mark.parametrize("stages", [2, 3])
async def test_link_tokens_are_asked_for_and_compared(stages: int) -> None:
    options = StageOptions(link_token="s3cret")
    with trio.fail_after(20):
        async with toy_cluster(stages, options=options) as cluster, generator_over(cluster) as generator:
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            for token in (None, b"wrong"):
                with pytest.raises(DownstreamUnavailable):
                    await dial_stage(
                        cluster.transport, cluster.stages[-1].endpoint, token=token, timeout_secs=0.2
                    )
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)


async def test_an_idle_lane_does_not_outlive_the_chain_below_it() -> None:
    ranges, transport = [(0, 2), (2, 4), (4, 6)], MemoryTransport()
    endpoints = [f"127.0.0.1:{20_000 + index}" for index in range(3)]
    with trio.fail_after(20):
        below = await transport.listen(Endpoint.parse(endpoints[2]))
        config = toy_config(1, ranges, endpoints)
        middle = open_stage(config, None, StageOptions(), lambda: ToyEngine(2, 4, 6), transport=transport)
        async with middle as stage, trio.open_nursery() as nursery:

            async def accept_and_close() -> None:
                link = await below.accept()
                last = engine_admission(toy_config(2, ranges, endpoints), ToyEngine(4, 6, 6).info)
                await admit_peer(link, last.loaded)
                await trio.testing.wait_all_tasks_blocked()
                link.close()

            nursery.start_soon(accept_and_close)
            lane = await dial_lane(stage)
            assert await read_to_end(lane) == b""
        below.close()


async def test_stage_zero_does_not_keep_connections_that_say_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with toy_cluster(2, inline=True) as cluster:
        for index, kept in ((0, False), (1, True)):
            link = await dial_lane(cluster.stages[index])
            with trio.move_on_after(HANDSHAKE_SECS + 1) as scope:
                assert await read_to_end(link) == b""
            assert scope.cancelled_caught is kept


def test_a_token_that_nobody_asks_for_is_called_by_its_name() -> None:
    decoder = MessageDecoder(0)
    decoder.receive_data(DialerHandshake(b"s3cret").data_to_send())
    with pytest.raises(RemoteProtocolError, match="the peer shows a link token, but this side asks for none"):
        decoder.next_message()


def bare(kind: MessageKind, **fields: Any) -> bytes:
    return b"".join(encode_message(Message(kind, default_state(kind), request_id=1, session_id=1, **fields)))


GARBAGE = {
    "not a frame": b"GET / HTTP/1.1\r\n\r\n",
    "unknown kind": (99).to_bytes(4, "little") + bytes(68),
    "half a frame": (1).to_bytes(4, "little") + bytes(20),
    "decode first": bare(MessageKind.DECODE_EMBD, token_count=1, pos_start=9, tokens=(1,)),
    "return stream that nobody waits for": bare(MessageKind.PREDICTION_RETURN_OPEN),
    "state import": bare(MessageKind.STATE_IMPORT, token_count=3, raw_bytes=b"abc"),
    "gap": bare(MessageKind.PREFILL_EMBD, token_count=1, pos_start=9, tokens=(1,)),
    "counts that disagree": bare(MessageKind.PREFILL_EMBD, token_count=3, tokens=(1,)),
    "no such token": bare(MessageKind.PREFILL_EMBD, token_count=1, tokens=(999_999,)),
}
PREFILLS = {"gap", "counts that disagree", "no such token"}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("target", [0, 1, 2])
async def test_garbage_closes_its_own_connection_only(name: str, target: int) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, transport=TcpTransport()) as cluster, generator_over(cluster) as generator:
            async with generator.generate(REQUEST) as stream:
                tokens = [await stream.__anext__()]
                link = await dial_lane(cluster.stages[target])
                await link.send([GARBAGE[name]])
                if name == "half a frame":
                    link.close()
                else:
                    # A prefill chunk is acknowledged when it is picked up, before anyone looks inside.
                    # Later stages refuse these before that, as frames that come from no stage.
                    early = encode_reply(Reply.ack()) if name in PREFILLS and target == 0 else b""
                    assert await read_to_end(link) == early
                tokens += [token async for token in stream]
            assert tokens == unsplit_tokens(PROMPT, 8)


@pytest.mark.parametrize("stages", [1, 3])
async def test_a_driver_over_the_wire_gets_predictions_on_its_lane(stages: int) -> None:
    """Stage 0 also serves a driver that speaks the stage protocol: ACKs and predictions, in order."""

    def message(kind: MessageKind, pos: int = 0, tokens: tuple[int, ...] = (), step: int = -1) -> bytes:
        state = default_state(kind)
        if tokens:
            state = attrs.evolve(state, current_token=tokens[-1], decode_step=step)
        return b"".join(
            encode_message(
                Message(
                    kind,
                    state,
                    pos_start=pos,
                    token_count=len(tokens),
                    tokens=tokens,
                    request_id=3,
                    session_id=4,
                )
            )
        )

    expected = unsplit_tokens(PROMPT, 3)
    with trio.fail_after(20):
        async with toy_cluster(stages, transport=TcpTransport()) as cluster:
            link = await dial_lane(cluster.first)
            replies = ReplyDecoder()
            for _ in range(2):
                frames = [message(MessageKind.CONFIGURE_GENERATION)]
                frames.append(message(MessageKind.PREFILL_EMBD, 0, tuple(PROMPT[:20])))
                frames.append(message(MessageKind.PREFILL_EMBD, 20, tuple(PROMPT[20:-1])))
                for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                    frames.append(message(MessageKind.DECODE_EMBD, len(PROMPT) - 1 + step, (token,), step))
                frames.append(message(MessageKind.STOP))
                await link.send(frames)
                got = [await receive_reply(link, replies) for _ in frames]
                kinds = [reply.kind for reply in got if reply is not None]
                assert kinds == [ReplyKind.ACK] * 3 + [ReplyKind.PREDICTED_TOKEN] * 3 + [ReplyKind.ACK]
                assert [reply.predicted for reply in got[3:6] if reply is not None] == expected
            link.close()
            await wait_for_sequences(cluster)


async def test_a_last_stage_must_know_stage_zero_and_a_middle_one_its_downstream() -> None:
    for index, (start, end), missing in ((2, (4, 6), "stage 0"), (1, (2, 4), "downstream")):
        config = toy_config(index, [(0, 2), (2, 4), (4, 6)], ["", "", ""])
        with pytest.raises(StageStartError, match=missing), trio.fail_after(5):
            async with open_stage(
                config,
                None,
                StageOptions(),
                lambda s=start, e=end: ToyEngine(s, e, 6),
                transport=MemoryTransport(),
            ):
                pass


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            await TcpTransport().listen(Endpoint("127.0.0.1", port))


class CuttableTransport(MemoryTransport):
    """Remembers its links and can cut them all."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        link = await super().connect(endpoint, source_host=source_host)
        self.links.append(link)
        return link

    def cut(self) -> None:
        for link in self.links:
            link.close()
        self.links.clear()


async def read_to_end(link: Link) -> bytes:
    """What still comes; a reset counts as an end."""
    data = b""
    buffer = bytearray(1024)
    while True:
        try:
            count = await link.receive_into(memoryview(buffer))
        except LinkClosed:
            return data
        if count == 0:
            return data
        data += buffer[:count]


async def test_a_stage_that_is_ready_and_answers_nothing_is_dialled_anew(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It need not be waited for as one that loads is: whoever is ready has nothing else to do."""
    async with (
        scripted_peer(StageOptions(peer_timeout_secs=3), inline=True) as peer,
        trio.open_nursery() as nursery,
    ):
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        link = await peer.listener.accept()
        await trio.sleep(20)  # it may load for as long as it likes
        await link.send([READY_WORD])
        began = trio.current_time()
        with trio.fail_after(10):
            await peer.accept()
            await pool.wait_ready()
        assert trio.current_time() - began == pytest.approx(3, abs=0.2)
        nursery.cancel_scope.cancel()
