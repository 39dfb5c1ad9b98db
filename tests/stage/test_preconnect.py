"""The spare connection to the next stage: made ahead, given away once, made again, closed with the stage."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest
import trio
import trio.testing

from skippy.config import Endpoint, StageOptions
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.lanes import LanePool
from skippy.stage import DownstreamUnavailable
from skippy.stage.dialing import Admitted
from skippy.stage.links import Link, LinkClosed, MemoryTransport
from skippy.stage.liveness import Liveness
from skippy.stage.preconnect import RETRY_SECS, WarmSlot
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_chain_over_links import BACKENDS, chain, make_backend
from tests.support.certificates import Certificates
from tests.support.scripted import ScriptedLane, scripted_peer

WARM = StageOptions(warm_preconnect=True)
REQUEST = GenerationRequest(prompt=PROMPT[:1], max_tokens=1)


@attrs.define
class Dialled:
    """Memory links to nobody in particular, newest last, and how many attempts were made."""

    near: list[Link] = attrs.field(factory=list)
    far: list[Link] = attrs.field(factory=list)
    attempts: int = 0
    fails: bool = False

    async def dial(self) -> Admitted:
        self.attempts += 1
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise DownstreamUnavailable("nobody is there")
        transport = MemoryTransport()
        listener = await transport.listen(Endpoint("127.0.0.1", 1))
        self.near.append(await transport.connect(Endpoint("127.0.0.1", 1)))
        self.far.append(await listener.accept())
        return self.near[-1], ("annex",)


@contextlib.asynccontextmanager
async def warm_slot(dialled: Dialled) -> AsyncIterator[WarmSlot]:
    slot = WarmSlot()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slot.serve, dialled.dial, Liveness(10))
            await trio.testing.wait_all_tasks_blocked()
            yield slot
            nursery.cancel_scope.cancel()


async def closed(link: Link) -> bool:
    """Whether the other side has closed."""
    try:
        return await link.receive_into(memoryview(bytearray(1))) == 0
    except LinkClosed:
        return True


async def test_a_spare_is_given_away_once_and_made_again() -> None:
    dialled = Dialled()
    async with warm_slot(dialled) as slot:
        assert await slot.take() == (dialled.near[0], ("annex",))
        assert await slot.take() is None  # the next one is being dialled
        await trio.testing.wait_all_tasks_blocked()
        assert await slot.take() == (dialled.near[1], ("annex",))
    async with trio.open_nursery() as nursery:  # whoever took it keeps it
        nursery.start_soon(dialled.near[0].send, [b"x"])
        assert not await closed(dialled.far[0])


async def test_leaving_closes_the_spare() -> None:
    dialled = Dialled()
    async with warm_slot(dialled):
        pass
    assert await closed(dialled.far[0])


async def test_a_slot_that_nobody_serves_is_empty() -> None:
    assert await WarmSlot().take() is None


@pytest.mark.parametrize("speaks", [False, True])
async def test_a_spare_that_ends_or_speaks_is_replaced(
    autojump_clock: trio.testing.MockClock, speaks: bool
) -> None:
    dialled = Dialled()
    async with warm_slot(dialled) as slot:
        if speaks:
            await dialled.far[0].send([b"x"])
        else:
            dialled.far[0].close()
        await trio.testing.wait_all_tasks_blocked()
        assert await slot.take() is None
        assert await closed(dialled.far[0])
        await trio.sleep(RETRY_SECS * 1.1)
        assert await slot.take() == (dialled.near[1], ("annex",))


async def test_attempts_that_fail_are_made_again_after_a_pause(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dialled = Dialled(fails=True)
    async with warm_slot(dialled) as slot:
        await trio.sleep(RETRY_SECS * 3.5)
        assert dialled.attempts == 4
        assert await slot.take() is None
        dialled.fails = False
        await trio.sleep(RETRY_SECS)
        assert await slot.take() is not None


async def test_a_cancelled_take_closes_what_it_took() -> None:
    dialled = Dialled()
    async with warm_slot(dialled) as slot:
        with trio.CancelScope() as scope:
            scope.cancel()
            await slot.take()
        assert scope.cancelled_caught
        assert await closed(dialled.far[0])
        await trio.testing.wait_all_tasks_blocked()
        assert await slot.take() == (dialled.near[1], ("annex",))


async def test_two_that_take_at_once_get_one_between_them() -> None:
    dialled, taken = Dialled(), list[Admitted | None]()

    async def take(slot: WarmSlot) -> None:
        taken.append(await slot.take())

    async with warm_slot(dialled) as slot, trio.open_nursery() as nursery:
        nursery.start_soon(take, slot)
        nursery.start_soon(take, slot)
    assert sorted(entry is None for entry in taken) == [False, True]


async def test_lanes_take_the_spare() -> None:
    """The first lane, and the one that replaces it, each use the connection that was there before."""
    with trio.fail_after(20):
        async with scripted_peer(WARM) as peer, trio.open_nursery() as nursery:
            pool = LanePool(peer.stage, 1)
            generator = ChainGenerator(peer.stage, pool, "toy")
            spare = await peer.accept()
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(pool.serve)
            for _ in range(3):
                lane, spare = spare, await peer.accept()
                await pool.wait_ready()
                async with trio.open_nursery() as requests:

                    async def answer(lane: ScriptedLane = lane) -> None:
                        await lane.configure()
                        await lane.predict(65)
                        await lane.stop()

                    requests.start_soon(answer)
                    assert await generate(generator, REQUEST) == [65]
                await trio.testing.wait_all_tasks_blocked(0.001)
                lane.link.close()
                while pool.ready:
                    await trio.testing.wait_all_tasks_blocked(0.001)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", BACKENDS)
async def test_a_chain_heals_with_spares_over_every_kind_of_link(
    certificates: Certificates, name: str
) -> None:
    backend = make_backend(name, certificates)
    backend = attrs.evolve(backend, options=attrs.evolve(backend.options, warm_preconnect=True))
    request = GenerationRequest(prompt=PROMPT, max_tokens=4)
    with trio.fail_after(30):
        async with chain(backend) as (cluster, cuttable):
            async with generator_over(cluster) as generator:
                for _ in range(3):
                    assert await generate(generator, request) == unsplit_tokens(PROMPT, 4)
                    cuttable.cut()  # lanes and spares alike
                    await trio.testing.wait_all_tasks_blocked(0.001)
            await wait_for_sequences(cluster)
