"""Links that fail as they are told: what each fault does to both sides, and when."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from skippy.config import Endpoint
from skippy.sim.clock import SimClock
from skippy.sim.faults import PERFECT, Conditions, Direction, Fault, FaultKind, LinkFault, LinkName
from skippy.sim.network import SimLink, SimNetwork, Wire
from skippy.stage.links import Link, LinkClosed

NAME = LinkName("stage-0", "stage-1", 0)
ENDPOINT = Endpoint("sim", 1)


@pytest.fixture
def sim_clock() -> SimClock:
    return SimClock()


@attrs.frozen
class Linked:
    """A link of a network: the side that dialled, and the one that was dialled."""

    network: SimNetwork
    near: Link
    far: Link

    @property
    def wire(self) -> Wire:
        return self.network.wires[NAME]


@contextlib.asynccontextmanager
async def linked(
    *faults: Fault, conditions: Conditions = PERFECT, direction: Direction = Direction.FORWARD
) -> AsyncIterator[Linked]:
    """With ``faults`` of its first link."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, SimClock)
    faulty = [LinkFault(NAME, direction, fault) for fault in faults]
    network = SimNetwork(7, conditions, faulty, clock=clock)
    listener = await network.of("stage-1").listen(ENDPOINT)
    near = await network.of("stage-0").connect(ENDPOINT)
    far = await listener.accept()
    try:
        yield Linked(network, near, far)
    finally:
        for thing in (near, far, listener):
            thing.close()
        assert not network.wires


async def read(link: Link, count: int) -> bytes:
    """Exactly so many bytes."""
    data = bytearray()
    while len(data) < count:
        buffer = bytearray(count - len(data))
        size = await link.receive_into(memoryview(buffer))
        assert size, f"the stream ended after {bytes(data)!r}"
        data += buffer[:size]
    return bytes(data)


async def at_end(link: Link) -> bool:
    return await link.receive_into(memoryview(bytearray(9))) == 0


async def is_broken(link: Link) -> bool:
    try:
        await link.receive_into(memoryview(bytearray(9)))
    except LinkClosed:
        return True
    return False


async def hears_nothing(link: Link) -> bool:
    with trio.move_on_after(1000) as scope:
        await link.receive_into(memoryview(bytearray(9)))
    return scope.cancelled_caught


async def test_a_reset_breaks_both_sides_behind_the_bytes_before_it(
    sim_clock: SimClock,
) -> None:
    async with linked(Fault(FaultKind.RESET, frame=1, byte=2)) as link:
        await link.far.send([b"back"])
        await link.near.send([b"one", b"!"])
        await link.near.send([b"second"])  # who sends is not told by the call that meets the fault
        assert await read(link.far, 6) == b"one!se"
        assert await is_broken(link.far)
        assert await read(link.near, 4) == b"back"
        assert await is_broken(link.near)
        for side in (link.near, link.far):
            with pytest.raises(LinkClosed, match="reset"):
                await side.send([b"x"])


async def test_a_frame_that_is_shorter_has_its_fault_at_its_end(
    sim_clock: SimClock,
) -> None:
    async with linked(Fault(FaultKind.CLOSE, frame=0, byte=100)) as link:
        await link.near.send([b"whole"])
        assert await read(link.far, 5) == b"whole"
        assert await at_end(link.far)
        assert await at_end(link.near)
        with pytest.raises(LinkClosed):
            await link.near.send([b"x"])


async def test_half_closed_the_other_direction_goes_on(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.HALF_CLOSE, byte=4)) as link:
        await link.near.send([b"seen, and not"])
        await link.near.send([b"lost"])
        assert await read(link.far, 4) == b"seen"
        assert await at_end(link.far)
        await link.far.send([b"still here"])
        assert await read(link.near, 10) == b"still here"


async def test_a_stall_takes_what_there_is_room_for(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.STALL, frame=1), conditions=Conditions(capacity=10)) as link:
        await link.near.send([b"first"])
        assert await read(link.far, 5) == b"first"
        await link.near.send([b"second"])
        assert await hears_nothing(link.far)
        with trio.move_on_after(50) as scope:
            await link.near.send([b"more than fits"])
        assert scope.cancelled_caught
        link.near.close()
        assert await hears_nothing(link.far)  # nor of the end


async def test_a_stall_may_end(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.STALL, frame=0, secs=30)) as link:
        start = trio.current_time()
        await link.near.send([b"late"])
        assert await read(link.far, 4) == b"late"
        assert trio.current_time() - start == pytest.approx(30)


async def test_a_trickle_is_one_byte_at_a_time(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.TRICKLE, byte=2, secs=3)) as link:
        start = trio.current_time()
        await link.near.send([b"go slowly"])
        assert await read(link.far, 9) == b"go slowly"
        assert trio.current_time() - start == pytest.approx(8 * 3)


async def test_bytes_are_corrupted_across_frames(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.CORRUPT, byte=2, length=3, mask=0x01)) as link:
        await link.near.send([b"aaa"])
        await link.near.send([b"aaaa"])
        assert await read(link.far, 7) == b"aa```aa"


async def test_a_lie_replaces_its_frame(sim_clock: SimClock) -> None:
    fault = Fault(FaultKind.LIE, frame=1, rewrite=lambda data: data[::-1] + b"!")
    async with linked(fault) as link:
        for text in (b"one", b"two", b"three"):
            await link.near.send([text])
        assert await read(link.far, 12) == b"oneowt!three"


async def test_faults_are_of_one_direction_and_one_link(sim_clock: SimClock) -> None:
    async with linked(Fault(FaultKind.RESET, frame=0), direction=Direction.BACK) as link:
        await link.near.send([b"fine"])
        assert await read(link.far, 4) == b"fine"
        await link.far.send([b"not"])
        assert await is_broken(link.near)
        second = await link.network.of("stage-0").connect(ENDPOINT)
        assert [name.number for name in link.network.wires] == [0, 1]
        second.close()


async def test_several_faults_in_the_order_of_their_bytes(sim_clock: SimClock) -> None:
    faults = [Fault(FaultKind.HALF_CLOSE, frame=0, byte=5), Fault(FaultKind.CORRUPT, byte=1, mask=0x20)]
    async with linked(*faults) as link:
        await link.near.send([b"abcdefg"])
        assert await read(link.far, 5) == b"aBcde"
        assert await at_end(link.far)


async def test_latency_and_bandwidth(sim_clock: SimClock) -> None:
    async with linked(conditions=Conditions(latency=0.5, bandwidth=10)) as link:
        start = trio.current_time()
        await link.near.send([bytes(10)])
        await link.near.send([bytes(20)])
        await read(link.far, 10)
        assert trio.current_time() - start == pytest.approx(1.5)
        await read(link.far, 20)
        assert trio.current_time() - start == pytest.approx(3.5)


async def test_slices_and_partial_sends_lose_nothing(sim_clock: SimClock) -> None:
    data = bytes(range(256)) * 4
    async with linked(conditions=Conditions(slices=7, partial=0.5, capacity=100)) as link:

        async def send() -> None:
            for start in range(0, len(data), 64):
                if rest := link.near.send_nowait([data[start : start + 64]]):
                    await link.near.send(rest)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await read(link.far, len(data)) == data
        assert link.wire.pipes[Direction.FORWARD].frames == 16


async def test_closing_before_reading_is_a_reset(sim_clock: SimClock) -> None:
    async with linked(conditions=Conditions(latency=1)) as link:
        await link.near.send([b"nobody reads this"])
        await trio.sleep(2)
        await link.far.send([b"under way"])
        link.far.close()
        assert await is_broken(link.near)


async def test_a_crashed_party_is_noticed_and_a_vanished_one_is_not(
    sim_clock: SimClock,
) -> None:
    async with linked() as link:
        link.network.crash("stage-1")
        assert await is_broken(link.near)
    async with linked(conditions=Conditions(latency=1)) as link:
        await link.far.send([b"never arrives"])
        link.network.vanish("stage-1")
        assert await hears_nothing(link.near)
        with trio.move_on_after(100) as scope:
            await link.network.of("stage-0").connect(ENDPOINT)
        assert scope.cancelled_caught
        link.network.return_of("stage-1")
        assert await is_broken(link.near)
        (await link.network.of("stage-0").connect(ENDPOINT)).close()


async def test_faults_may_begin_at_a_time(sim_clock: SimClock) -> None:
    async with linked() as link:
        link.wire.strike(Direction.BACK, Fault(FaultKind.HALF_CLOSE))
        assert await at_end(link.near)
        link.wire.strike(Direction.FORWARD, Fault(FaultKind.RESET))
        assert await is_broken(link.far)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"kind": FaultKind.LIE, "frame": 1}, "rewrite"),
        ({"kind": FaultKind.LIE, "rewrite": bytes}, "frame"),
        ({"kind": FaultKind.TRICKLE}, "secs"),
        ({"kind": FaultKind.STALL, "rewrite": bytes}, "rewrite"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(keys: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Fault(**keys)  # type: ignore[arg-type]


def test_faults_read_as_text() -> None:
    fault = LinkFault(NAME, Direction.BACK, Fault(FaultKind.STALL, frame=3, byte=2, secs=math.inf))
    assert str(fault) == "stage-0>stage-1#0 back: stall inf s at frame 3 byte 2"


async def test_it_sends_as_tcp_does_from_any_thread(sim_clock: SimClock) -> None:
    async with linked() as link:
        assert isinstance(link.near, SimLink)
        assert link.near.sends_from_any_thread
        assert link.near.send_nowait([b"ab", b"c"]) == []
        buffer = memoryview(bytearray(2))
        assert (link.far.receive_nowait(buffer), bytes(buffer)) == (2, b"ab")
        assert link.far.receive_nowait(buffer) == 1
        assert link.far.receive_nowait(buffer) is None
