"""Calls from another thread: none is lost, none comes twice, and in order."""

from __future__ import annotations

import functools
import threading

import pytest
import trio

from skippy.stage.doorbell import Doorbell


async def test_calls_of_a_busy_thread_come_in_order() -> None:
    doorbell, count = Doorbell(), 20_000
    got: list[int] = []
    done = trio.Event()

    def take(number: int) -> None:
        got.append(number)
        if number == count - 1:
            done.set()

    def ring() -> None:
        for number in range(count):
            doorbell.leave(functools.partial(take, number))
            if number % 3:
                doorbell.ring()
        doorbell.ring()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doorbell.answer)
            await trio.to_thread.run_sync(ring)
            await done.wait()
            nursery.cancel_scope.cancel()
    doorbell.close()
    assert got == list(range(count))


async def test_a_thread_that_waits_for_each_answer_gets_one() -> None:
    doorbell = Doorbell()
    answered = threading.Semaphore(0)

    def ring() -> None:
        for _ in range(2_000):
            doorbell.leave(answered.release)
            doorbell.ring()
            assert answered.acquire(timeout=10)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doorbell.answer)
            await trio.to_thread.run_sync(ring)
            nursery.cancel_scope.cancel()
    doorbell.close()


async def test_what_a_call_raises_is_raised_where_it_is_answered() -> None:
    doorbell = Doorbell()
    doorbell.leave(lambda: int("no number"))
    doorbell.ring()
    with trio.fail_after(5), pytest.raises(ValueError, match="no number"):
        await doorbell.answer()
    doorbell.close()


async def test_closing_runs_what_is_there_and_nothing_after_it() -> None:
    doorbell = Doorbell()
    got: list[int] = []
    doorbell.leave(lambda: got.append(1))
    doorbell.close()
    doorbell.leave(lambda: got.append(2))
    doorbell.ring()
    assert got == [1]
