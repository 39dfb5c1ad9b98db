"""Whatever becomes of a link or the peer behind it costs one lane, and not for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import attrs
import pytest
import trio
import trio.testing

from skippy.config import StageOptions
from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import ChainUnavailable
from skippy.frontend.lanes import LanePool
from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    AnnexedReplyDecoder,
    FailureCode,
    MessageKind,
    ReplyDecoder,
    ReplyKind,
    RequestFailure,
)
from skippy.stage.links import LinkClosed
from skippy.stage.liveness import TICK_SECS
from tests.stage.test_chain import PROMPT, exhaust, generate, unsplit_tokens, wait_for_sequences
from tests.stage.test_chain_over_links import REQUEST
from tests.support.cluster import NO_REPLAY, Cluster, fixed_chunks, toy_cluster
from tests.support.dialing import dial_lane
from tests.support.driver import Driver, dial_driver
from tests.support.scripted import scripted_peer
from tests.support.wires import BYTE_SECS, Wire, WireTransport

TIMEOUT = 5.0
OPTIONS = StageOptions(peer_timeout_secs=TIMEOUT)
DEADLINE = TIMEOUT + 1
AT_ONCE = ["reset", "half-close", "garbage up", "garbage down"]
FAULTS = ["stall", "mute", "deaf", "slow up", "slow down", *AT_ONCE]
CHUNKS = {"prefill_chunk_policy": "fixed", "prefill_chunk_size": 7}
PLACES = ["0-1", "1-2", "returns"]


class Chain:
    """Three toy stages over wires, and drivers in front of the first."""

    def __init__(self, cluster: Cluster, transport: WireTransport) -> None:
        self.cluster = cluster
        self.transport = transport

    @contextlib.asynccontextmanager
    async def driver(self) -> AsyncIterator[tuple[Driver, dict[str, Wire]]]:
        """A driver with a prefilled lane, and the wires of that lane."""
        wires = self.transport.wires
        async with dial_driver(self.cluster.first) as driver:
            await driver.start(PROMPT)
            yield driver, {"0-1": wires[1][-1], "1-2": wires[2][-1], "returns": wires[0][-1]}


@contextlib.asynccontextmanager
async def open_chain() -> AsyncIterator[Chain]:
    transport = WireTransport()
    with trio.fail_after(20_000):
        async with toy_cluster(3, transport=transport, inline=True, options=OPTIONS) as cluster:
            yield Chain(cluster, transport)


async def steps(driver: Driver, count: int, token: int = PROMPT[-1], at: int = 0) -> list[int]:
    """Decode ``count`` tokens, the first from ``token``, as step ``at``."""
    tokens = []
    for index in range(at, at + count):
        token = await driver.decode(len(PROMPT) - 1 + index, token)
        tokens.append(token)
    return tokens


async def wait_lost(driver: Driver) -> None:
    """Read until stage 0 has closed the lane."""
    with contextlib.suppress(LinkClosed):
        while not await driver.ended():
            pass


@pytest.mark.parametrize(
    ("fault", "place"),
    [(fault, place) for fault in FAULTS for place in PLACES if (fault, place) != ("slow up", "returns")],
)
async def test_a_fault_in_the_middle_of_an_answer(
    autojump_clock: trio.testing.MockClock, fault: str, place: str
) -> None:
    expected = unsplit_tokens(PROMPT, 6)
    async with open_chain() as chain, chain.driver() as (bystander, _):
        tokens = await steps(bystander, 2)
        async with chain.driver() as (victim, wires):
            assert await steps(victim, 2) == expected[:2]
            wires[place].break_it(fault)
            began = trio.current_time()
            with contextlib.suppress(LinkClosed):
                if fault == "slow up" and place != "returns":  # where tokens do not pass
                    await victim.send(MessageKind.TRIM_SESSION, token_count=1)
                else:
                    await victim.send(MessageKind.DECODE_EMBD, len(PROMPT) + 1, [expected[1]], decode_step=2)
            await wait_lost(victim)
            first_byte = BYTE_SECS if fault.startswith("slow") else 0
            assert trio.current_time() - began <= DEADLINE + first_byte
        tokens += await steps(bystander, 2, tokens[-1], 2)
        await trio.sleep(10 * TIMEOUT)
        assert chain.cluster.free_sequences == [3, 3, 3]
        tokens += await steps(bystander, 2, tokens[-1], 4)
        assert tokens == expected
        async with chain.driver() as (other, _):
            assert await steps(other, 6) == expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_hears_that_a_stage_was_lost(
    autojump_clock: trio.testing.MockClock, fault: str, place: str, tokens: int
) -> None:
    """ChainUnavailable is status 503 before the first token, and afterwards an error in the stream."""
    if fault in ("mute", "slow up", "garbage up") and (tokens or place == "returns"):
        return  # nothing comes up there that the request waits for
    async with open_chain() as chain, trio.open_nursery() as nursery:
        pool = LanePool(chain.cluster.first, 1)
        nursery.start_soon(pool.serve)
        await pool.wait_ready()
        generator = ChainGenerator(chain.cluster.first, pool, "toy", attrs.evolve(NO_REPLAY, **CHUNKS))
        assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)  # opens the return stream
        async with generator.generate(REQUEST) as stream:
            for _ in range(tokens):
                await stream.__anext__()
            chain.transport.wires[(1, 2, 0)[PLACES.index(place)]][-1].break_it(fault)
            began = trio.current_time()
            with pytest.raises(ChainUnavailable, match="a stage of the chain was lost"):
                await exhaust(stream)
            assert trio.current_time() - began <= DEADLINE
        assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
        await wait_for_sequences(chain.cluster)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", PLACES[:2])
@pytest.mark.parametrize("fault", [*FAULTS[:3], *AT_ONCE])
async def test_a_fault_on_an_idle_lane(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture, fault: str, place: str
) -> None:
    """Lanes that were never used, too, are found to be dead, and replaced."""
    async with open_chain() as chain, trio.open_nursery() as nursery:
        pool = LanePool(chain.cluster.first, 2)
        nursery.start_soon(pool.serve)
        await trio.sleep(10 * TIMEOUT)
        wires = chain.transport.wires[1 + PLACES.index(place)]
        assert len(wires) == 2
        wires[0].break_it(fault)
        await trio.sleep(DEADLINE + TIMEOUT / 2)  # also until the next heartbeat
        assert len(wires) == 3
        assert [str(record.msg).count("idle lane was lost") for record in caplog.records] == [1]
        generator = ChainGenerator(chain.cluster.first, pool, "toy", fixed_chunks(7))
        for _ in range(3):
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
        await wait_for_sequences(chain.cluster)
        nursery.cancel_scope.cancel()


async def test_nothing_is_lost_while_nothing_is_wrong(autojump_clock: trio.testing.MockClock) -> None:
    """Twenty minutes of idling, with return streams and without, and a request that pauses."""
    async with open_chain() as chain, chain.driver() as (driver, _):
        tokens = await steps(driver, 3)
        pool = LanePool(chain.cluster.first, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            generator = ChainGenerator(chain.cluster.first, pool, "toy", fixed_chunks(7))
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            for _ in range(2):
                await trio.sleep(590)
                tokens += await steps(driver, 1, tokens[-1], len(tokens))
            assert await generate(generator, REQUEST) == unsplit_tokens(PROMPT, 8)
            assert tokens == unsplit_tokens(PROMPT, 5)
            assert [len(chain.transport.wires[target]) for target in range(3)] == [4, 3, 3]
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("place", "peer"), [("0-1", 20_001), ("1-2", 20_002)])
async def test_the_reason_names_the_link_that_was_lost(
    autojump_clock: trio.testing.MockClock, place: str, peer: int
) -> None:
    """Whichever link it was, whoever asked stage 0 hears of it."""
    async with open_chain() as chain:
        first = chain.cluster.first
        link = await dial_lane(first, ANNEX_EXTENSION)
        decoder = AnnexedReplyDecoder()
        driver = Driver(link, first, replies=decoder)
        await driver.start(PROMPT)
        chain.transport.wires[peer - 20_000][-1].break_it("stall")
        assert await driver.ended()
        assert trio.current_time() <= DEADLINE
        reason = f"127.0.0.1:{peer} sent nothing for 5 s (--peer-timeout-secs)"
        assert decoder.failure == RequestFailure(3, FailureCode.LANE_LOST, reason)


async def test_a_driver_is_not_late_while_nobody_reads_what_it_sends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its lane through the chain is being made, which takes as long as the next stage loads."""
    async with scripted_peer(OPTIONS, inline=True) as peer:
        link = await dial_lane(peer.stage, LIVENESS_EXTENSION)
        driver = Driver(link, peer.stage, replies=ReplyDecoder(heartbeats=True))
        await driver.send(MessageKind.PREFILL_EMBD, 0, [1])
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                await trio.sleep(5 * TIMEOUT)
                lane = await peer.accept()
                await lane.receive(MessageKind.PREFILL_EMBD)

            nursery.start_soon(accept)
            assert (await driver.reply()).kind is ReplyKind.ACK
        began = trio.current_time()  # and from now on it is expected
        assert began >= 5 * TIMEOUT
        await wait_lost(driver)
        assert TIMEOUT - 1 <= trio.current_time() - began <= DEADLINE


class GatedEngine(ToyEngine):
    """A native call lasts until its gate is open."""

    gates: dict[int, threading.Event]

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        gate = self.gates.get(self.info.layer_start)
        if gate is not None:
            assert gate.wait(60)
        super().decode(segments, output)


@pytest.mark.parametrize("busy", [0, 2, 4])
async def test_a_busy_engine_is_no_dead_stage(mock_clock: trio.testing.MockClock, busy: int) -> None:
    """A native call that lasts for many timeouts: the heartbeats come from the event loop."""
    gate = threading.Event()
    gate.set()
    GatedEngine.gates = {busy: gate}
    async with (
        toy_cluster(3, options=OPTIONS, transport=WireTransport(), make_engine=GatedEngine) as cluster,
        dial_driver(cluster.first) as driver,
        trio.open_nursery() as nursery,
    ):
        await driver.start(PROMPT)
        tokens = await steps(driver, 1)
        gate.clear()

        async def go_on() -> None:
            tokens.extend(await steps(driver, 3, tokens[-1], 1))

        nursery.start_soon(go_on)
        for _ in range(int(8 * TIMEOUT / TICK_SECS)):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(TICK_SECS)
        assert len(tokens) == 1
        gate.set()
        while len(tokens) < 4:
            await trio.testing.wait_all_tasks_blocked()
        assert tokens == unsplit_tokens(PROMPT, 4)
