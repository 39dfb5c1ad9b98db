"""Why a connection ends is heard, also where the links break in an order that makes it hard to hear."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, WireConditions
from skippy.engine import EngineError
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable, GenerationRequest, InvalidSampling
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    ANNEX_EXTENSION,
    AnnexedReplyDecoder,
    Buffer,
    DialerHandshake,
    FailureCode,
    Message,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    RequestFailure,
    SamplingConfig,
    default_state,
    encode_annex,
    encode_message,
)
from skippy.stage import upstream
from skippy.stage.context import LAST_WORDS_SECS, REASON_SECS
from skippy.stage.framing import receive_reply
from skippy.stage.links import ConditionedTransport, Link, LinkClosed, MemoryTransport, TcpTransport
from tests.stage.test_failures import read_to_end
from tests.support.admission import lane_request
from tests.support.cluster import NO_REPLAY, Cluster, toy_cluster
from tests.support.dialing import dial_lane
from tests.support.scripted import ScriptedPeer, scripted_peer

PROMPT = [256, *b"hello"]
REQUEST = GenerationRequest(prompt=PROMPT, max_tokens=2)
REASON = encode_annex(ReplyAnnex(failure=RequestFailure(1, FailureCode.SETTINGS_REFUSED, "no such sampler")))
FREE_PORTS = ["127.0.0.1:0", "127.0.0.1:0"]


class DeafLink(Link):
    """From frame number ``broken_from`` on, sending fails in the way that ``way`` names; receiving goes on.

    So a reset looks that the sender notices before the reader has read what came ahead of it.
    """

    def __init__(self, inner: Link, way: str, broken_from: int, noticed: trio.Event) -> None:
        self._inner = inner
        self._way = way
        self._left = broken_from
        self._noticed = noticed
        self._token = trio.lowlevel.current_trio_token()

    @property
    def peer(self) -> str:
        return self._inner.peer

    @property
    def sends_from_any_thread(self) -> bool:
        return self._way == "engine thread"

    async def send(self, buffers: Sequence[Buffer]) -> None:
        self._check(buffers)
        await self._inner.send(buffers)

    def send_nowait(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        if self._way == "writer task":
            return [memoryview(buffer).cast("B") for buffer in buffers]
        self._check(buffers)
        return self._inner.send_nowait(buffers)

    def _check(self, buffers: Sequence[Buffer]) -> None:
        self._left -= bool(sum(memoryview(buffer).nbytes for buffer in buffers))
        if self._left < 0:
            self._token.run_sync_soon(self._noticed.set)
            raise LinkClosed("sending failed: Broken pipe")

    async def receive_into(self, buffer: memoryview) -> int:
        return await self._inner.receive_into(buffer)

    def close(self) -> None:
        self._inner.close()


class DeafTransport(TcpTransport):
    """Dials links that work for the admission packet, ConfigureGeneration and ``frames`` more."""

    def __init__(self, way: str, frames: int) -> None:
        super().__init__()
        self._way = way
        self._frames = frames
        self.noticed = trio.Event()

    async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
        inner = await super().connect(endpoint, source_host=source_host)
        return DeafLink(inner, self._way, 2 + self._frames, self.noticed)


async def ask(peer: ScriptedPeer, pool: LanePool) -> None:
    generator = ChainGenerator(peer.stage, pool, "toy", NO_REPLAY)
    async with generator.generate(REQUEST) as stream:
        await stream.__anext__()


@pytest.mark.parametrize(
    ("way", "frames"),
    [("event loop", 0), ("event loop", 1), ("engine thread", 1), ("writer task", 0), ("writer task", 1)],
)
async def test_a_reason_that_is_read_after_sending_has_failed(way: str, frames: int) -> None:
    """Frame 0 is the prompt's chunk, frame 1 the first decode step."""
    transport = DeafTransport(way, frames)
    with trio.fail_after(20):
        async with (
            scripted_peer(transport=transport, endpoints=FREE_PORTS) as peer,
            trio.open_nursery() as nursery,
        ):
            pool = LanePool(peer.stage, 1)
            nursery.start_soon(pool.serve)
            lane = await peer.accept()

            async def tell() -> None:
                await transport.noticed.wait()
                await trio.testing.wait_all_tasks_blocked()
                await lane.link.send([REASON])

            nursery.start_soon(tell)
            with pytest.raises(InvalidSampling, match="no such sampler"):
                await ask(peer, pool)
            nursery.cancel_scope.cancel()


async def test_a_reason_that_is_read_after_the_return_stream_has_ended() -> None:
    with trio.fail_after(20):
        async with (
            scripted_peer(transport=TcpTransport(), endpoints=FREE_PORTS) as peer,
            trio.open_nursery() as nursery,
        ):
            pool = LanePool(peer.stage, 1)
            nursery.start_soon(pool.serve)
            lane = await peer.accept()

            async def tell() -> None:
                await lane.configure()
                await lane.receive(MessageKind.PREFILL_EMBD)
                await lane.acknowledge()
                await lane.receive(MessageKind.DECODE_EMBD)
                assert lane.returns is not None
                lane.returns.close()
                await trio.testing.wait_all_tasks_blocked()
                await lane.link.send([REASON])

            nursery.start_soon(tell)
            with pytest.raises(InvalidSampling, match="no such sampler"):
                await ask(peer, pool)
            nursery.cancel_scope.cancel()


async def test_a_reason_that_never_comes_is_not_waited_for_long(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Deaf(MemoryTransport):
        async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
            inner = await super().connect(endpoint, source_host=source_host)
            return DeafLink(inner, "event loop", 2, trio.Event())

    async with scripted_peer(inline=True, transport=Deaf()) as peer, trio.open_nursery() as nursery:
        pool = LanePool(peer.stage, 1)
        nursery.start_soon(pool.serve)
        await peer.accept()
        started = trio.current_time()
        with pytest.raises(ChainUnavailable, match="Broken pipe"):
            await ask(peer, pool)
        assert trio.current_time() - started == pytest.approx(REASON_SECS)
        nursery.cancel_scope.cancel()


async def test_a_conditioned_link_that_takes_nothing_more_is_read_to_its_end() -> None:
    class Deaf(MemoryTransport):
        async def connect(self, endpoint: Endpoint, *, source_host: str | None = None) -> Link:
            inner = await super().connect(endpoint, source_host=source_host)
            return DeafLink(inner, "event loop", 0, noticed)

    noticed = trio.Event()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            transport = ConditionedTransport(Deaf(), WireConditions(), nursery)
            listener = await transport.listen(Endpoint("127.0.0.1", 1))
            near = await transport.connect(listener.endpoint)
            far = await listener.accept()
            await near.send([b"x"])
            await noticed.wait()
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(LinkClosed, match="Broken pipe"):
                near.send_nowait([b"x"])
            nursery.start_soon(far.send, [b"why"])
            assert await near.receive_into(memoryview(bytearray(3))) == 3
            near.close()
            nursery.cancel_scope.cancel()


def chunk(positions: int = 0) -> list[Buffer]:
    """A prompt's chunk of one token, and 4 bytes on the wire for each position."""
    kind = MessageKind.PREFILL_EMBD
    return encode_message(
        Message(
            kind,
            default_state(kind),
            request_id=7,
            session_id=8,
            token_count=1,
            tokens=(1,),
            positions=range(positions),
        )
    )


@pytest.fixture
def much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take more than a second for megabytes."""
    monkeypatch.setattr(upstream, "LAST_WORDS_SECS", 15.0)


async def test_a_reason_survives_what_the_stage_has_not_read(much_time: None) -> None:
    """Far more than the system buffers, all of it sent before the reason is read."""
    with trio.fail_after(20):
        async with toy_cluster(1, transport=TcpTransport()) as cluster:
            cluster.engines[0].fail_next = EngineError("out of luck")
            link = await dial_lane(cluster.first, ANNEX_EXTENSION)
            await link.send(chunk())
            await link.send(chunk(1_000_000) * 6)
            decoder = AnnexedReplyDecoder()
            assert await receive_reply(link, decoder) == Reply.ack()
            assert await receive_reply(link, decoder) is None
            assert decoder.failure == RequestFailure(7, FailureCode.FAILED, "out of luck")
            link.close()


async def test_a_refusal_survives_what_the_stage_has_not_read(much_time: None) -> None:
    with trio.fail_after(20):
        async with toy_cluster(1, transport=TcpTransport()) as cluster:
            link = await cluster.transport.connect(cluster.first.endpoint)
            handshake = DialerHandshake(None, attrs.evolve(lane_request(cluster.first), run_id="else"))
            assert handshake.data_to_send() == b""
            word = bytearray(4)
            handshake.receive_data(word[: await link.receive_into(memoryview(word))])
            await link.send([handshake.data_to_send(), bytes(24_000_000)])
            answer = bytearray(4096)
            with pytest.raises(RemoteProtocolError, match="run_id: expected test, found else"):
                handshake.receive_data(answer[: await link.receive_into(memoryview(answer))])
            link.close()


async def refused_link(cluster: Cluster) -> Link:
    """A connection that has been told why it fails."""
    link = await dial_lane(cluster.first, ANNEX_EXTENSION)
    kind, bad = MessageKind.CONFIGURE_GENERATION, SamplingConfig(flags=1, samplers=("nonsense",))
    await link.send(
        encode_message(Message(kind, default_state(kind), request_id=7, session_id=8, sampling=bad))
    )
    decoder = AnnexedReplyDecoder()
    assert await receive_reply(link, decoder) is None
    assert decoder.failure is not None
    return link


async def test_who_stays_after_the_reason_is_not_kept(autojump_clock: trio.testing.MockClock) -> None:
    async with toy_cluster(1, inline=True) as cluster:
        link = await refused_link(cluster)
        started = trio.current_time()
        assert await read_to_end(link) == b""
        assert trio.current_time() - started == pytest.approx(LAST_WORDS_SECS)


async def test_who_sends_on_after_the_reason_is_not_listened_to_for_ever(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_DROPPED_BYTES", 100_000)
    async with toy_cluster(1, inline=True) as cluster:
        link = await refused_link(cluster)
        started = trio.current_time()
        await link.send([bytes(60_000)])
        await link.send([bytes(60_000)])
        with pytest.raises(LinkClosed):
            await link.send([bytes(60_000)])
        assert trio.current_time() == started
