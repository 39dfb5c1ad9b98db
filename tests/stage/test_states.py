"""Exported states: sequences that had to go come back, from memory or from disk, and nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import trio
import trio.testing

from skippy.config import ConfigError
from skippy.engine import EngineError
from skippy.engine.toy import ToyEngine
from skippy.kv.durable import DurableStore
from skippy.protocol import MessageKind
from skippy.stage.kv_writer import KvWriter
from skippy.stage.states import StateTier
from tests.stage.test_chain import unsplit_tokens, wait_for_sequences
from tests.support.cached import Answer, cache_of, cached_cluster, complete, counters
from tests.support.cluster import Cluster
from tests.support.driver import Driver, driver_of

PROMPTS = [[*f"{n} different prompt about {n}".encode()] for n in range(6)]
LAST = len(PROMPTS[0]) - 1

both = pytest.mark.parametrize("stages", [1, 3])
ONE: dict[str, Any] = {"lane_count": 1, "inline": True}
"""A single sequence per stage: each request evicts what the one before has left."""


def tier(cluster: Cluster, index: int = 0) -> StateTier:
    states = cache_of(cluster, index).states
    assert states is not None
    return states


def written(root: Path) -> list[Path]:
    """Files of states, the unfinished ones too."""
    return [*root.glob("*/states/*"), *root.glob("*/states/.*")]


async def ask(driver: Driver, prompt: Sequence[int], restored: int, count: int = 4, **keys: Any) -> Answer:
    """A request that must restore so much, and be right; what it leaves is stored before this returns."""
    answer = await complete(driver, prompt, count, **keys)
    await trio.testing.wait_all_tasks_blocked()
    assert answer.tokens == unsplit_tokens(prompt, count)
    assert answer.restored == restored
    return answer


@both
async def test_a_sequence_that_had_to_go_comes_back_from_memory(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, 0)
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, LAST, 7)
            longer = [*PROMPTS[0], *unsplit_tokens(PROMPTS[0], 4)[:3], 9, 9]
            await ask(driver, longer, LAST + 4)
            assert [each.imports for each in counters(cluster)] == [4] * stages
            await wait_for_sequences(cluster)


@both
async def test_states_stay_within_their_budget_and_go_one_by_one(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)
            await ask(driver, PROMPTS[1], 0)
            sizes = [tier(cluster, index).blocks.used_bytes for index in range(stages)]
        assert min(sizes) > 0
        room = {"max_bytes": max(sizes) * 2 + max(sizes) // 2}
        async with cached_cluster(stages, kv=room, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS:
                await ask(driver, prompt, 0)
            for index in range(stages):
                states, stats = tier(cluster, index), cache_of(cluster, index).index.stats()
                assert 0 < states.blocks.used_bytes <= room["max_bytes"]
                assert states.blocks.stats().states == stats.states == 2 + (sizes[index] < max(sizes))
                assert stats.state_bytes == states.blocks.stats().logical_bytes
            await ask(driver, PROMPTS[4], LAST)
            await ask(driver, PROMPTS[0], 0)


async def test_a_state_too_large_for_the_budget_evicts_nothing() -> None:
    with trio.fail_after(20):
        async with cached_cluster(1, kv={"max_bytes": 2000}, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0][:6], 0, 1)
            await ask(driver, PROMPTS[1] * 4, 0)
            await ask(driver, PROMPTS[2], 0)
            stats = tier(cluster).blocks.stats()
            assert stats.states == 1
            await ask(driver, PROMPTS[0][:6], 5)


@both
async def test_a_state_that_cannot_be_imported_is_forgotten_and_the_request_goes_cold(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)
            await ask(driver, PROMPTS[1], 0)

            def refuse(*_: object) -> None:
                raise EngineError("not today")

            monkeypatch.setattr(cluster.engines[-1], "import_state", refuse)
            await ask(driver, PROMPTS[0], 0)
            assert counters(cluster)[-1].errors == 1
            monkeypatch.undo()
            await ask(driver, PROMPTS[1], LAST)
            await ask(driver, PROMPTS[0], LAST)
            await wait_for_sequences(cluster)


async def test_a_busy_writer_drops_states_and_delays_nobody() -> None:
    with trio.fail_after(20):
        async with cached_cluster(1, **ONE) as cluster, driver_of(cluster) as driver:
            writer = tier(cluster).writer
            place = writer.reserve()
            assert place is not None
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, 0)
            assert writer.dropped == 2
            assert tier(cluster).blocks.used_bytes == 0
            place.give_up()
            await ask(driver, PROMPTS[0], 0)
            await ask(driver, PROMPTS[2], LAST)


@both
async def test_what_is_kept_on_disk_survives_the_process(stages: int, tmp_path: Path) -> None:
    kv = {"directory": str(tmp_path)}
    with trio.fail_after(30):
        async with cached_cluster(stages, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS[:2]:
                await ask(driver, prompt, 0)
            await ask(driver, PROMPTS[0], LAST)
            await ask(driver, PROMPTS[0], 0, namespace="ab")
        assert len(os.listdir(tmp_path)) == stages
        async with cached_cluster(stages, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            assert [each.imports for each in counters(cluster)] == [0] * stages
            await ask(driver, PROMPTS[1], LAST)
            await ask(driver, PROMPTS[0], LAST, namespace="ab")
            await ask(driver, PROMPTS[2], 0)
            await ask(driver, PROMPTS[1], 0, namespace="ab")
            assert [each.imports for each in counters(cluster)] == [2] * stages
        other = {**ONE, "ctx_size": 500}  # another identity
        async with cached_cluster(stages, kv=kv, **other) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)


async def test_a_damaged_file_is_a_miss_on_one_stage_and_so_for_all(tmp_path: Path) -> None:
    kv = {"directory": str(tmp_path)}
    with trio.fail_after(30):
        async with cached_cluster(3, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS[:2]:
                await ask(driver, prompt, 0)
            durable = tier(cluster, 1).durable
            assert durable is not None
            folder = durable.path / "states"
        for file in folder.iterdir():
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        async with cached_cluster(3, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)
            assert [each.errors for each in counters(cluster)] == [0, 1, 0]
            await ask(driver, PROMPTS[1], 0)
            durable = tier(cluster, 1).durable
            assert durable is not None
            assert durable.stats().corrupt == 2
            await ask(driver, PROMPTS[0], LAST)
            await wait_for_sequences(cluster)


async def test_files_that_had_to_go_are_in_no_entry(tmp_path: Path) -> None:
    kv = {"directory": str(tmp_path), "directory_max_bytes": 10_000}
    with trio.fail_after(30):
        async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            for prompt in PROMPTS:
                await ask(driver, prompt, 0)
            durable, stats = tier(cluster).durable, cache_of(cluster, 0).index.stats()
            assert durable is not None
            assert durable.stats().evicted > 0
            assert durable.stats().files == stats.states == len(os.listdir(durable.path / "states"))


async def test_dropped_entries_take_their_states_along(tmp_path: Path) -> None:
    for kv in ({}, {"directory": str(tmp_path)}):
        with trio.fail_after(30):
            async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
                for prompt in PROMPTS[:3]:
                    await ask(driver, prompt, 0)
                cache, states = cache_of(cluster, 0), tier(cluster)
                for entry in cache.index.entries():
                    cache.forget(entry)
                await trio.testing.wait_all_tasks_blocked()
                assert states.blocks.used_bytes == 0
                assert states.durable is None or os.listdir(states.durable.path / "states") == []
                await ask(driver, PROMPTS[0], 0)
                await wait_for_sequences(cluster)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("whole", [False, True])
async def test_what_is_forgotten_while_it_is_stored_does_not_come_back(
    on_disk: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a drop of the namespace, when the entry itself may be gone already, or as an entry that is wrong."""
    kv = {"directory": str(tmp_path)} if on_disk else {}
    gate = trio.Event()

    async def late(self: KvWriter, call: Callable[[], object]) -> object:
        await gate.wait()
        return call()

    with trio.fail_after(30):
        async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            monkeypatch.setattr(KvWriter, "run_sync", late)
            await ask(driver, PROMPTS[0], 0)
            cache, states = cache_of(cluster, 0), tier(cluster)
            if whole:
                await ask(driver, PROMPTS[1], 0)  # evicts it
                cache.forget_all("all")
            else:
                (entry,) = cache.index.entries()
                states.export(entry)  # with a directory it was when it was kept
                cache.forget(entry)
            gate.set()
            await trio.testing.wait_all_tasks_blocked()
            assert cache.index.entries() == []
            assert states.blocks.used_bytes == 0
            assert states.durable is None or os.listdir(states.durable.path / "states") == []
            await ask(driver, PROMPTS[0], 0)
            await wait_for_sequences(cluster)


async def test_a_running_session_leaves_nothing_of_an_entry_that_was_forgotten() -> None:
    with trio.fail_after(30):
        async with cached_cluster(1, lane_count=2, inline=True) as cluster, driver_of(cluster) as driver:
            await driver.start(PROMPTS[0])
            cache = cache_of(cluster, 0)
            (entry,) = cache.index.entries()
            assert entry.live
            cache.forget_all("all")
            await driver.ask(MessageKind.STOP)
            assert cache.index.entries() == []
            await wait_for_sequences(cluster)


async def test_a_directory_that_is_in_use_fails_the_start(tmp_path: Path) -> None:
    kv = {"directory": str(tmp_path)}
    with trio.fail_after(30):
        async with cached_cluster(1, kv=kv, **ONE):
            with pytest.raises(ConfigError, match="is in use by process"):
                async with cached_cluster(1, kv=kv, **ONE):
                    pass
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="is not a folder"):
            async with cached_cluster(1, kv={"directory": str(tmp_path / "file")}, **ONE):
                pass


async def test_in_threads_as_well(tmp_path: Path) -> None:
    """As a stage runs: the engine, the writer and the event loop each in a thread of their own."""
    kv = {"directory": str(tmp_path)}
    with trio.fail_after(30):
        async with cached_cluster(2, kv=kv, lane_count=1) as cluster, driver_of(cluster) as driver:
            assert (await complete(driver, PROMPTS[0], 4)).restored == 0
        async with cached_cluster(2, kv=kv, lane_count=1) as cluster, driver_of(cluster) as driver:
            for index in range(2):
                durable: DurableStore | None = tier(cluster, index).durable
                assert durable is not None
                assert (durable.stats().corrupt, durable.stats().unreadable) == (0, 0)
            answer = await complete(driver, PROMPTS[0], 8)
            assert answer == Answer(LAST, unsplit_tokens(PROMPTS[0], 8))


@both
async def test_a_stage_that_ends_writes_what_it_keeps(stages: int, tmp_path: Path) -> None:
    """Also what the writer had no place for, and what it was to remove."""
    kv = {"directory": str(tmp_path)}
    four: dict[str, Any] = {"lane_count": 4, "inline": True}
    with trio.fail_after(30):
        async with cached_cluster(stages, kv=kv, **four) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[3], 0)
            states = [tier(cluster, index) for index in range(stages)]
            places = [each.writer.reserve() for each in states]
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, 0)
            for index in range(stages):
                index_of = cache_of(cluster, index).index
                (old,) = [e for e in index_of.entries() if e.tokens[: LAST + 1].tolist() == PROMPTS[3]]
                cache_of(cluster, index).forget(old)
            for place in places:
                assert place is not None
                place.give_up()
        assert len(written(tmp_path)) == 3 * stages
        async with cached_cluster(stages, kv=kv, **four) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[3], 0)
            for prompt in PROMPTS[:3]:
                await ask(driver, prompt, LAST)


class Unwilling(ToyEngine):
    """Never comes to an end with exporting."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.asked, self.ending = threading.Event(), threading.Event()

    def export_state(self, sequence: int, length: int) -> memoryview:
        self.asked.set()
        assert self.ending.wait(20)
        return super().export_state(sequence, length)

    def abort(self) -> None:
        self.ending.set()


@pytest.mark.parametrize("ending_secs", [-1.0, 0.05])
async def test_what_is_not_written_in_time_is_not_there_at_all(ending_secs: float, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"kv": {"directory": str(tmp_path)}, "lane_count": 1}
    with trio.fail_after(30):
        slow = cached_cluster(1, make_engine=Unwilling, ending_secs=ending_secs, **keys)
        async with slow as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPTS[0], 4)
        assert written(tmp_path) == []
        async with cached_cluster(1, **keys) as cluster, driver_of(cluster) as driver:
            assert (await complete(driver, PROMPTS[0], 4)).restored == 0


class Windowed(ToyEngine):
    """Sequences can be shortened, but not those that were imported: their state is one whole."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._info = attrs.evolve(self._info, can_trim_state=False)


class Recurrent(ToyEngine):
    """Sequences cannot be shortened at all."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._info = attrs.evolve(self._info, can_trim=False, can_trim_state=False)


async def test_states_that_cannot_be_shortened_are_not_kept_for_what_serves_any_prefix() -> None:
    with trio.fail_after(20):
        async with (
            cached_cluster(2, make_engine=Windowed, **ONE) as cluster,
            driver_of(cluster) as driver,
        ):
            for prompt in PROMPTS[:2]:
                await ask(driver, prompt, 0)
            await ask(driver, PROMPTS[1], LAST)
            await ask(driver, PROMPTS[0], 0)
            assert tier(cluster).writer.stored == 0


@both
async def test_recurrent_state_comes_back_for_what_goes_on_from_all_of_it(stages: int) -> None:
    with trio.fail_after(20):
        async with (
            cached_cluster(stages, make_engine=Recurrent, **ONE) as cluster,
            driver_of(cluster) as driver,
        ):
            for prompt in PROMPTS[:2]:
                await ask(driver, prompt, 0)
            turn = [*PROMPTS[0], *unsplit_tokens(PROMPTS[0], 4)[:3], *b"and now"]
            await ask(driver, turn, LAST + 4)
            assert [each.imports for each in counters(cluster)] == [1] * stages
            await ask(driver, PROMPTS[0][:20], 0)
            await wait_for_sequences(cluster)


async def test_without_a_budget_memory_is_bounded_all_the_same() -> None:
    async with cached_cluster(1, **ONE) as cluster:
        whole = psutil.virtual_memory().total
        assert 0.9 < tier(cluster).blocks.max_bytes * 16 / whole <= 1.1
