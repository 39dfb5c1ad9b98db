"""The conditioned wire, to the microsecond, under a virtual clock."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
import trio
import trio.testing

from skippy.config import Endpoint, WireConditions
from skippy.stage.links import ConditionedTransport, Link, LinkClosed, MemoryTransport, TcpTransport
from skippy.stage.links.conditioned import MAX_HELD_BYTES, FrameTimes


@contextlib.asynccontextmanager
async def linked(conditions: WireConditions) -> AsyncIterator[tuple[Link, Link]]:
    async with trio.open_nursery() as nursery:
        transport = ConditionedTransport(MemoryTransport(), conditions, nursery)
        listener = await transport.listen(Endpoint("127.0.0.1", 1))
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()
        yield near, far
        near.close()
        nursery.cancel_scope.cancel()


async def arrivals(far: Link, sizes: Sequence[int]) -> list[float]:
    """When the last byte of each frame is there, in milliseconds from now."""
    start = trio.current_time()
    times = []
    for size in sizes:
        left = size
        while left:
            left -= await far.receive_into(memoryview(bytearray(left)))
        times.append(round((trio.current_time() - start) * 1000, 3))
    return times


async def test_delays_overlap_and_bandwidth_adds_up(autojump_clock: trio.testing.MockClock) -> None:
    async with linked(WireConditions(delay_ms=50, mbps=8)) as (near, far):
        # 8 Mbit/s are 1000 bytes per millisecond.
        for _ in range(3):
            assert near.send_nowait([bytes(400), bytes(600)]) == []
        assert await arrivals(far, [1000] * 3) == [51, 52, 53]
        # Handed over 20 ms apart: each takes its own 50 ms, no more.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_spaced, near)
            assert await arrivals(far, [1000] * 3) == [51, 71, 91]


async def test_a_frame_that_takes_long_arrives_bit_by_bit(autojump_clock: trio.testing.MockClock) -> None:
    """8 s at 1 Mbit/s: something comes each second, and the last of it when the frame is due."""
    async with linked(WireConditions(delay_ms=50, mbps=1)) as (near, far):
        assert near.send_nowait([bytes(600_000), b"\1" * 400_000]) == []
        assert await arrivals(far, [125_000] * 8) == [1050 + 1000 * second for second in range(8)]
        near.send_nowait([b"next"])
        assert await arrivals(far, [4]) == [50.032]


async def send_spaced(link: Link) -> None:
    for _ in range(3):
        await link.send([bytes(1000)])
        await trio.sleep(0.02)


async def test_what_is_received_is_not_delayed(autojump_clock: trio.testing.MockClock) -> None:
    async with linked(WireConditions(delay_ms=50)) as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(far.send, [b"x"])
        assert await arrivals(near, [1]) == [0]


async def test_a_sender_of_too_much_waits(autojump_clock: trio.testing.MockClock) -> None:
    async with linked(WireConditions(delay_ms=1000)) as (near, far), trio.open_nursery() as nursery:
        assert near.send_nowait([bytes(MAX_HELD_BYTES)]) == []
        assert near.send_nowait([b"more"]) == [b"more"]
        nursery.start_soon(near.send, [b"more"])
        await trio.testing.wait_all_tasks_blocked()
        assert await arrivals(far, [MAX_HELD_BYTES, 4]) == [1000, 2000]


async def test_frames_under_way_are_lost_with_the_link(autojump_clock: trio.testing.MockClock) -> None:
    async with linked(WireConditions(delay_ms=1000)) as (near, far):
        await near.send([b"lost"])
        await trio.sleep(0.5)
        near.close()
        assert await far.receive_into(memoryview(bytearray(4))) == 0
        with pytest.raises(LinkClosed, match="closed"):
            near.send_nowait([b"x"])


def draw(conditions: WireConditions, stream: int, frames: int = 2000, size: int = 1) -> list[float]:
    """How long each frame takes when they are handed over hours apart."""
    times = FrameTimes(conditions, stream)
    return [times.arrival(hour * 10_000.0, size) - hour * 10_000.0 for hour in range(frames)]


def test_jitter_is_exponential_and_belongs_to_the_link() -> None:
    conditions = WireConditions(delay_ms=10, jitter_ms=4)
    first = draw(conditions, 0)
    assert min(first) >= 0.010
    mean = sum(first) / len(first)
    assert mean == pytest.approx(0.014, rel=0.05)
    above_mean = sum(time > 0.014 for time in first) / len(first)
    assert above_mean == pytest.approx(0.368, abs=0.03)  # 1/e
    assert draw(conditions, 0) == first
    assert draw(conditions, 1) != first


def test_stalls_come_as_often_as_asked_for_and_hold_up_what_follows() -> None:
    times = draw(WireConditions(stall_ms=100, stall_probability=0.25), 3)
    assert {round(time, 3) for time in times} == {0.0, 0.1}
    assert sum(time > 0.05 for time in times) / len(times) == pytest.approx(0.25, abs=0.03)
    always = FrameTimes(WireConditions(stall_ms=100, stall_probability=1), 0)
    assert [always.arrival(0.0, 1) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_each_part_takes_an_hour_at_most() -> None:
    assert draw(WireConditions(mbps=1e-300), 0, 1, 2**40) == [3600]
    assert draw(WireConditions(mbps=5e-324), 0, 1, 2**40) == [3600]
    assert max(draw(WireConditions(jitter_ms=3_600_000), 0, 50)) == pytest.approx(3600)


def test_frames_never_overtake_each_other() -> None:
    times = FrameTimes(WireConditions(jitter_ms=50), 7)
    arrived = [times.arrival(number * 0.001, 100) for number in range(200)]
    assert arrived == sorted(arrived)


async def test_the_engines_thread_sends_and_receives_too() -> None:
    """Over TCP: frames sent in turn by two threads keep their order, and what comes shows on the socket."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            transport = ConditionedTransport(TcpTransport(), WireConditions(delay_ms=1), nursery)
            listener = await transport.listen(Endpoint("127.0.0.1", 0))
            near = await transport.connect(listener.endpoint)
            far = await listener.accept()
            assert near.sends_from_any_thread
            for number in range(0, 20, 2):
                assert await trio.to_thread.run_sync(near.send_nowait, [bytes([number])]) == []
                assert near.send_nowait([bytes([number + 1])]) == []
            received = bytearray(20)
            count = 0
            while count < 20:
                count += await far.receive_into(memoryview(received)[count:])
            assert received == bytes(range(20))
            await far.send([b"back"])
            assert near.descriptor is not None
            await trio.lowlevel.wait_readable(near.descriptor)
            buffer = memoryview(bytearray(9))
            assert await trio.to_thread.run_sync(near.receive_nowait, buffer) == 4
            for end in (near, far, listener):
                end.close()
            nursery.cancel_scope.cancel()
