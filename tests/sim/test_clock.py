"""Virtual time goes on to what is due next, whoever waits for it, and to nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import trio

from skippy.sim.clock import Alarm, SimClock


@pytest.fixture
def sim_clock() -> SimClock:
    return SimClock()


async def test_calls_and_deadlines_come_in_the_order_of_their_times(sim_clock: SimClock) -> None:
    happened: list[tuple[float, str]] = []

    def note(text: str) -> Callable[[], None]:
        return lambda: happened.append((trio.current_time(), text))

    sim_clock.call_at(3, note("third"))
    sim_clock.call_at(1, note("first"))
    sim_clock.call_at(1, note("first, too"))
    await trio.sleep(2)
    note("deadline")()
    await trio.sleep(2)
    assert happened == [(1, "first"), (1, "first, too"), (2, "deadline"), (3, "third")]


async def test_a_call_wakes_who_is_parked(sim_clock: SimClock) -> None:
    lot = trio.lowlevel.ParkingLot()
    sim_clock.call_at(5, lot.unpark_all)
    await lot.park()
    assert trio.current_time() == 5


async def test_an_alarm_rings_at_the_earliest_of_its_times_and_is_set_anew(sim_clock: SimClock) -> None:
    rang: list[float] = []
    alarm = Alarm(sim_clock, lambda: rang.append(trio.current_time()))
    for due in (4, 2, 3, math.inf):
        alarm.set(due)
    await trio.sleep(2.5)
    assert rang == [2]
    alarm.set(4)
    await trio.sleep(10)
    assert rang == [2, 4]
