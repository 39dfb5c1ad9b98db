"""SIGUSR1: counts of a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from skippy.cli.statistics import answer_statistics_signal, process_statistics, stage_statistics
from skippy.frontend.lanes import LanePool
from tests.e2e.support import serve
from tests.support.cluster import toy_cluster
from tests.support.processes import Process

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 here")


async def test_every_signal_is_answered() -> None:
    answers, answered = 0, trio.Event()

    def answer() -> None:
        nonlocal answers
        answers += 1
        answered.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(answer_statistics_signal, answer)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
                await answered.wait()
                answered = trio.Event()
            nursery.cancel_scope.cancel()
    assert answers == 2


async def test_what_a_process_holds_is_counted() -> None:
    before = process_statistics()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        with socket.socket():
            thread.start()
            during = process_statistics()
            release.set()
            thread.join()
        nursery.cancel_scope.cancel()
    assert before["pid"] == during["pid"] == os.getpid()
    assert during["tasks"] == before["tasks"] + 1
    assert during["threads"] == before["threads"] + 1
    assert during["descriptors"] == before["descriptors"] + 1
    assert during["uptime_secs"] >= before["uptime_secs"]
    if sys.platform == "linux":
        assert 10_000_000 < during["resident_bytes"] < 10_000_000_000


async def test_lanes_are_counted_by_state_on_every_stage() -> None:
    with trio.fail_after(30):
        async with toy_cluster(3, lane_count=3) as cluster, trio.open_nursery() as nursery:
            pool = LanePool(cluster.first, 2)
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            await trio.testing.wait_all_tasks_blocked()
            lane = pool.take()
            assert lane is not None
            counts = [stage_statistics(stage.config.stage_id, stage) for stage in cluster.stages]
            nursery.cancel_scope.cancel()
    assert [each["lanes"] for each in counts] == [{"idle": 1, "leased": 1}, {"idle": 2}, {"idle": 2}]
    assert [each["sequences"] for each in counts] == [3, 3, 3]
    assert [each["free_sequences"] for each in counts] == [3, 3, 3]
    assert [each["stage_id"] for each in counts] == ["stage-0", "stage-1", "stage-2"]


async def test_ended_lanes_are_not_counted() -> None:
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster:
            async with trio.open_nursery() as nursery:
                pool = LanePool(cluster.first, 2)
                nursery.start_soon(pool.serve)
                await pool.wait_ready()
                nursery.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert [stage.lane_states() for stage in cluster.stages] == [{}, {}]


def test_before_the_model_is_loaded_nothing_is_known_of_lanes() -> None:
    async def counts() -> dict[str, Any]:
        return stage_statistics("stage-0", None)

    found = trio.run(counts)
    assert (found["stage_id"], found["lanes"], found["sequences"], found["free_sequences"]) == (
        "stage-0",
        {},
        None,
        None,
    )


def statistics_lines(process: Process) -> dict[str | None, dict[str, Any]]:
    entries = [json.loads(line) for line in process.errors if '"statistics"' in line]
    return {entry["stage_id"]: entry for entry in entries}


@pytest.mark.model
@pytest.mark.slow
def test_a_chain_of_processes_answers_for_itself_and_every_stage(bundled_model: Path) -> None:
    with serve(bundled_model, 3, "--lane-count", "2") as served:
        served.process.popen.send_signal(signal.SIGUSR1)
        for name in ("null", '"stage-0"', '"stage-1"', '"stage-2"'):
            served.process.wait_for(rf'"stage_id": {name}.*"statistics"|"statistics".*"stage_id": {name}', 20)
        counts = statistics_lines(served.process)
    assert counts[None]["children"] == 3
    assert counts[None]["pid"] == served.process.popen.pid
    for index in range(3):  # ready means that one lane is through; the other one may still be on its way
        lanes = counts[f"stage-{index}"]["lanes"]
        assert set(lanes) <= {"idle", "connecting"}
        assert 1 <= lanes["idle"] <= sum(lanes.values()) <= 2
    assert [counts[f"stage-{i}"]["free_sequences"] for i in range(3)] == [2] * 3
