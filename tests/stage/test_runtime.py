"""The runtime thread: order, results, and what cancellation leaves behind."""

from __future__ import annotations

import contextlib
import threading
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.stage.iterations import Iterations
from skippy.stage.queues import PendingReply, SendQueue
from skippy.stage.runtime import InlineRuntime, Runtime, open_runtime_thread
from skippy.stage.scheduler import open_scheduler
from skippy.stage.waves import WaveQueue
from skippy.stage.work import After, Settle, Work


async def test_calls_run_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            for number in range(5):
                runtime.post(lambda n=number: seen.append((n, threading.get_ident())))
            assert await runtime.run(lambda: "result") == "result"
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


async def test_exceptions_come_back_and_the_thread_goes_on() -> None:
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            with pytest.raises(ZeroDivisionError):
                await runtime.run(lambda: 1 // 0)
            runtime.post(lambda: 1 // 0)
            assert await runtime.run(lambda: 2) == 2


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    ran: list[str] = []
    gate = threading.Event()
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runtime.run, gate.wait)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(runtime.run, lambda: ran.append("cancelled"))
                await trio.testing.wait_all_tasks_blocked()
                runtime.post(lambda: ran.append("posted"))
                nursery.cancel_scope.cancel()
            gate.set()
            await runtime.run(lambda: ran.append("later"))
    assert ran == ["posted", "later"]


async def test_leaving_runs_what_was_posted() -> None:
    ran: list[int] = []
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            runtime.post(lambda: ran.append(1))
            runtime.post(lambda: ran.append(2))
    assert ran == [1, 2]


async def test_a_failed_post_does_not_reach_its_poster() -> None:
    runtime = InlineRuntime()
    runtime.post(lambda: 1 // 0)
    assert await runtime.run(lambda: 2) == 2


async def test_an_engine_whose_load_was_cancelled_is_closed() -> None:
    gate, begun = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()
    closed: list[bool] = []

    class Slow(ToyEngine):
        def close(self) -> None:
            super().close()
            closed.append(True)

    def load() -> Slow:
        trio.from_thread.run_sync(begun.set, trio_token=token)
        gate.wait()
        return Slow()

    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            async with trio.open_nursery() as nursery:

                async def open_and_wait() -> None:
                    async with open_scheduler(load, runtime):
                        await trio.sleep_forever()

                nursery.start_soon(open_and_wait)
                await begun.wait()
                nursery.cancel_scope.cancel()
            gate.set()
    assert closed == [True]


@pytest.mark.parametrize("where", ["step", "add"])
async def test_a_fault_of_this_program_ends_the_block_and_is_raised(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    iterations = toy_iterations()
    monkeypatch.setattr(iterations, where, Mock(side_effect=AssertionError("a bug")))

    async def use() -> None:
        async with open_runtime_thread() as runtime:
            await runtime.run(lambda: runtime.attach(iterations))
            runtime.submit(row(lambda _: None))
            try:
                await trio.sleep_forever()
            finally:
                assert runtime.broken
                runtime.post(lambda: None)  # as leaving the block does; it comes to nothing

    with trio.fail_after(2), pytest.raises(AssertionError, match="a bug"):
        await use()


async def test_sessions_get_sequences_side_by_side() -> None:
    """So that one ubatch of a split cache can hold their rows."""
    with trio.fail_after(10):
        async with open_scheduler(lambda: ToyEngine(max_sequences=4), InlineRuntime()) as scheduler:
            assert [await scheduler.acquire_sequence() for _ in range(4)] == [0, 1, 2, 3]
            for sequence in (2, 0, 1):
                scheduler.release_sequence(sequence)
            assert [await scheduler.acquire_sequence() for _ in range(3)] == [2, 1, 0]  # beside 3
            for sequence in (0, 2):
                scheduler.keep_sequence(sequence)  # nobody's any more
            scheduler.release_sequence(3)
            assert await scheduler.acquire_sequence() == 3  # 1 has no neighbour that is free
            scheduler.release_sequence(1)
            scheduler.use_kept(0)
            assert await scheduler.acquire_sequence(1) == 1
            scheduler.release_sequence(1)
            assert await scheduler.acquire_sequence() == 1


def toy_iterations(engine: ToyEngine | None = None) -> Iterations:
    return Iterations(engine or ToyEngine(), WaveQueue())


def row(settle: Settle, after: After = lambda *_: False, sequence: int = 0) -> Work:
    """The first row of a sequence."""
    segment = Segment(sequence=sequence, position=0, count=1, tokens=[65], logits=1)
    return Work(segment, None, after, settle=settle, decodes=True)


async def test_a_work_with_nothing_urgent_is_settled_when_somebody_asks() -> None:
    settled: list[Exception | None] = []
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            await runtime.run(lambda: runtime.attach(toy_iterations()))
            over = threading.Event()
            runtime.submit(work := row(settled.append))
            runtime.submit(row(lambda _: None, lambda *_: over.set() or False, sequence=1))
            await trio.to_thread.run_sync(over.wait)
            assert settled == []  # it is over, and nothing was urgent
            assert work.settle()
            assert work.settle()
            await work.wait()
    assert settled == [None]


async def test_a_work_that_is_not_over_is_waited_for() -> None:
    settled: list[Exception | None] = []
    gate = threading.Event()
    with trio.fail_after(10):
        async with open_runtime_thread() as runtime:
            await runtime.run(lambda: runtime.attach(toy_iterations()))
            runtime.submit(work := row(settled.append, lambda *_: not gate.wait()))
            assert not work.settle()
            with trio.move_on_after(0) as scope:
                await work.wait()
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work.wait)
                await trio.testing.wait_all_tasks_blocked()
                gate.set()
    assert settled == [None]


@pytest.mark.parametrize("inline", [True, False])
async def test_an_urgent_or_failed_work_settles_by_itself(inline: bool) -> None:
    settled: list[Exception | None] = []
    both = trio.Event()

    def settle(error: Exception | None) -> None:
        settled.append(error)
        if len(settled) == 2:
            both.set()

    def fail(*_: object) -> bool:
        raise ZeroDivisionError

    with trio.fail_after(10):
        async with contextlib.AsyncExitStack() as stack:
            runtime: Runtime = InlineRuntime()
            if not inline:
                runtime = await stack.enter_async_context(open_runtime_thread())
            await runtime.run(lambda: runtime.attach(toy_iterations()))
            runtime.submit(row(settle, lambda *_: True))
            runtime.submit(failed := row(settle, fail, sequence=1))
            await both.wait()
            await failed.wait()
    assert settled[0] is None
    assert isinstance(settled[1], ZeroDivisionError)
    assert len(settled) == 2


async def test_send_queue_is_bounded_and_flushes() -> None:
    queue: SendQueue[int] = SendQueue(2)
    taken: list[int] = []

    async def drain() -> None:
        while True:
            taken.append(await queue.get())

    with trio.fail_after(10):
        queue.put(1)
        queue.put(2)
        with trio.move_on_after(0) as scope:
            await queue.wait_room()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            await queue.wait_room()
            queue.put(3)
            await queue.wait_flushed()
            assert taken == [1, 2, 3]
            nursery.cancel_scope.cancel()


async def test_a_failed_reply_raises_for_every_waiter_and_a_set_one_stays() -> None:
    from skippy.protocol import Reply
    from skippy.stage import LaneLost

    lost = PendingReply()
    lost.fail(LaneLost("gone"))
    for _ in range(2):
        with pytest.raises(LaneLost, match="gone"):
            await lost.wait()
    kept = PendingReply(Reply.ack())
    kept.fail(LaneLost("gone"))
    assert await kept.wait() == Reply.ack()
