"""The background writer: one place, nothing waits for it, everything is told how it ended."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from skippy.kv.blocks import BlockStore, StateRef
from skippy.stage.kv_writer import KvWriter


class Gate:
    """A store that takes until it is opened, and remembers the threads it ran in."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.threads: list[threading.Thread] = []
        self._open = threading.Event()
        self._token = trio.lowlevel.current_trio_token()

    def store(self) -> str:
        self.threads.append(threading.current_thread())
        self._token.run_sync_soon(self.begun.set)
        assert self._open.wait(20)
        return "stored"

    def open(self) -> None:
        self._open.set()


async def test_a_state_is_stored_in_another_thread_and_its_owner_told(nursery: trio.Nursery) -> None:
    writer, store = KvWriter(), BlockStore(100, block_bytes=4)
    nursery.start_soon(writer.run)
    told: list[StateRef | None] = []
    over = trio.Event()
    used: list[threading.Thread] = []

    def put() -> StateRef | None:
        used.append(threading.current_thread())
        return store.put(b"aaaabbbb")

    def done(ref: StateRef | None) -> None:
        told.append(ref)
        over.set()

    place = writer.reserve()
    assert place is not None
    place.fill(put, done)
    with trio.fail_after(20):
        await over.wait()
    (ref,) = told
    assert ref is not None
    assert store.get(ref) == [b"aaaa", b"bbbb"]
    assert used != [threading.current_thread()]
    assert (writer.stored, writer.dropped, writer.failed) == (1, 0, 0)


async def test_one_is_under_way_and_one_waits_and_the_third_is_dropped(nursery: trio.Nursery) -> None:
    writer, gate = KvWriter(), Gate()
    nursery.start_soon(writer.run)
    told: list[tuple[str, str | None]] = []
    over = trio.Event()
    first = writer.reserve()
    assert first is not None
    assert not writer.free
    assert writer.reserve() is None  # reserved, though nothing is there yet
    first.fill(gate.store, lambda result: told.append(("first", result)))
    assert writer.free  # whether the idle writer has begun or not
    with trio.fail_after(20):
        await gate.begun.wait()
        assert writer.free
        second = writer.reserve()
        assert second is not None
        assert writer.reserve() is None
        second.fill(lambda: "2", lambda result: (told.append(("second", result)), over.set()))
        assert writer.reserve() is None
        assert told == []
        gate.open()
        await over.wait()
    assert told == [("first", "stored"), ("second", "2")]
    assert (writer.stored, writer.dropped) == (2, 3)


async def test_a_place_given_up_is_free_again(nursery: trio.Nursery) -> None:
    writer = KvWriter()
    nursery.start_soon(writer.run)
    place = writer.reserve()
    assert place is not None
    place.give_up()
    assert writer.free
    with pytest.raises(AssertionError, match="a place is used once"):
        place.give_up()
    assert writer.free
    assert writer.dropped == 0


async def test_a_store_that_raises_is_told_and_the_next_is_stored(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    writer = KvWriter()
    nursery.start_soon(writer.run)

    async def store_once(store: type | str) -> object:
        place, over = writer.reserve(), trio.Event()
        told: list[object] = []
        assert place is not None

        def call() -> object:
            if isinstance(store, str):
                return store
            raise store("broken")

        place.fill(call, lambda result: (told.append(result), over.set()))
        with trio.fail_after(20):
            await over.wait()
        return told[0]

    assert await store_once(MemoryError) is None
    assert await store_once("good") == "good"
    assert "a state could not be stored" in caplog.text
    assert (writer.stored, writer.failed) == (1, 1)


async def test_cancelled_it_waits_for_nothing_and_tells_both_owners() -> None:
    writer, gate = KvWriter(), Gate()
    told: list[tuple[str, object]] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            first = writer.reserve()
            assert first is not None
            first.fill(gate.store, lambda result: told.append(("first", result)))
            await gate.begun.wait()
            second = writer.reserve()
            assert second is not None
            second.fill(lambda: "2", lambda result: told.append(("second", result)))
            nursery.cancel_scope.cancel()
        assert told == [("first", None), ("second", None)]
        assert not writer.free
        assert writer.reserve() is None
        gate.open()  # and the thread ends
    assert writer.stored == 0


async def test_a_place_filled_after_the_end_is_told() -> None:
    writer = KvWriter()
    place = writer.reserve()
    assert place is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    told: list[object] = []
    place.fill(lambda: "late", told.append)
    assert told == [None]


async def test_under_a_virtual_clock_it_runs_in_the_event_loop(nursery: trio.Nursery) -> None:
    writer = KvWriter(in_thread=False)
    nursery.start_soon(writer.run)
    used: list[threading.Thread] = []
    told: list[object] = []
    place = writer.reserve()
    assert place is not None
    place.fill(lambda: used.append(threading.current_thread()), told.append)
    assert used == []
    await trio.testing.wait_all_tasks_blocked()
    assert used == [threading.current_thread()]
    assert told == [None]
    assert writer.stored == 1


async def test_short_calls_come_after_what_waits(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    writer = KvWriter()
    calls: list[str] = []
    over = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def last() -> None:
        calls.append("last")
        token.run_sync_soon(over.set)

    def broken() -> None:
        raise OSError("broken")

    writer.post(lambda: calls.append("first"))
    writer.post(broken)
    writer.post(last)
    place = writer.reserve()
    assert place is not None
    place.fill(lambda: calls.append("stored"), lambda _: None)
    nursery.start_soon(writer.run)
    with trio.fail_after(20):
        await over.wait()
        assert await writer.run_sync(lambda: 5) == 5
    assert calls == ["stored", "first", "last"]
    assert (writer.stored, writer.failed) == (1, 0)
    assert "broken" in caplog.text
