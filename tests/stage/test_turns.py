"""Workers that read and handle in turns."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from skippy.stage.turns import take_turns


class Source:
    """Gives the numbers 1 … count, then None; counts what it gave."""

    def __init__(self, count: int) -> None:
        self._numbers: Iterator[int] = iter(range(1, count + 1))
        self._busy = False
        self.given = 0

    async def read(self) -> int | None:
        assert not self._busy, "read by two workers at once"
        self._busy = True
        await trio.lowlevel.checkpoint()
        self._busy = False
        self.given += 1
        return next(self._numbers, None)


async def wait_for_ever(*_: object) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_items_are_handled_one_at_a_time_and_in_order(ahead: int) -> None:
    source, seen, busy = Source(50), [], False

    async def handle(item: int) -> None:
        nonlocal busy
        assert not busy, "handled by two workers at once"
        busy = True
        for _ in range(item % 4):
            await trio.lowlevel.checkpoint()
        busy = False
        seen.append(item)

    with trio.fail_after(10):
        await take_turns(source.read, handle, first=0, ahead=ahead)
    assert seen == list(range(51))


async def test_a_slow_handler_bounds_what_is_read_ahead() -> None:
    source = Source(50)
    with trio.move_on_after(10) as scope:
        async with trio.open_nursery() as nursery:
            run = functools.partial(take_turns, source.read, wait_for_ever, first=0, ahead=3)
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            assert source.given == 3
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught


async def test_an_item_that_was_read_meets_no_task_switch() -> None:
    events: list[str] = []

    async def read() -> int | None:
        await trio.lowlevel.checkpoint()
        if events.count("read") == 5:
            return None
        events.append("read")
        return 1

    async def handle(item: int) -> None:
        events.append("handle")

    with trio.fail_after(10):
        await take_turns(read, handle, first=0, ahead=2)
    assert events == ["handle", *["read", "handle"] * 5]


@pytest.mark.parametrize("broken", ["read", "handle"])
async def test_an_exception_ends_the_other_side(broken: str) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    with trio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        await take_turns(
            fail if broken == "read" else wait_for_ever,
            fail if broken == "handle" else wait_for_ever,
            first=0,
            ahead=2,
        )
    assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize("ahead", [1, 3])
async def test_what_needs_no_waiting_is_handled_by_the_worker_that_reads(ahead: int) -> None:
    """Every third item takes the other way; the order stays, and whoever reads goes on reading."""
    source, seen = Source(50), []
    tasks: dict[int, object] = {}

    def handle_now(item: int) -> bool:
        tasks[item] = trio.lowlevel.current_task()
        if item % 3 == 0:
            return False
        seen.append(item)
        return True

    async def handle(item: int) -> None:
        seen.append(item)

    with trio.fail_after(10):
        await take_turns(source.read, handle, first=0, ahead=ahead, handle_now=handle_now)
    assert seen == list(range(51))
    # Whoever handles an item at once reads the next one too.
    pairs = [(n, n + 1) for n in tasks if n % 3 and n + 1 in tasks]
    assert pairs
    assert all(tasks[one] is tasks[other] for one, other in pairs)


async def test_nothing_overtakes_an_item_that_is_waited_for() -> None:
    seen: list[int] = []
    gate = trio.Event()

    async def handle(item: int) -> None:
        await gate.wait()
        seen.append(item)

    def handle_now(item: int) -> bool:
        seen.append(item)
        return True

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            run = functools.partial(take_turns, first=0, ahead=3, handle_now=handle_now)
            nursery.start_soon(run, Source(9).read, handle)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == []
            gate.set()
    assert seen == list(range(10))
