"""What the soak takes for a leak, and how its clients tell what became of their requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import attrs
import pytest
import trio

from bench.soak import MIB
from bench.soak_clients import Habit, Outcome, Target, one_request
from bench.soak_run import Soak
from bench.soak_server import Sample, Server

IDLE = Sample(
    at=0,
    name="stage-1",
    pid=7,
    lanes={"idle": 4},
    sequences=4,
    free_sequences=4,
    tasks=50,
    threads=4,
    descriptors=20,
    resident=100 * MIB,
    rest=True,
)


async def soak_of(*samples: Sample) -> Soak:
    soak = Soak(cast(Server, None), Target("", 0, ""), secs=60, requests=1, kill_every=0, seed=0)
    for sample in samples:
        soak.samples.append(sample)
        soak._pids[sample.name] = sample.pid
    return soak


def at_rest(**changes: Any) -> list[Sample]:
    """Three rests, the last of which is different."""
    return [*(attrs.evolve(IDLE, at=at) for at in (0, 10)), attrs.evolve(IDLE, at=60, **changes)]


@pytest.mark.parametrize(
    ("changes", "leaks"),
    [
        ({}, []),
        ({"tasks": 49, "descriptors": 18}, []),
        ({"tasks": 52}, ["stage-1: 2 tasks more than at its first rest"]),
        ({"threads": 5}, ["stage-1: 1 threads more than at its first rest"]),
        ({"descriptors": 21}, ["stage-1: 1 descriptors more than at its first rest"]),
        ({"free_sequences": 3}, ["stage-1: lanes {'idle': 4}, 3 of 4 sequences free"]),
        (
            {"lanes": {"idle": 3, "suspect": 1}},
            ["stage-1: lanes {'idle': 3, 'suspect': 1}, 4 of 4 sequences free"],
        ),
    ],
)
async def test_what_is_left_at_the_last_rest_is_a_leak(changes: Any, leaks: list[str]) -> None:
    soak = await soak_of(*at_rest(**changes))
    assert list(soak.leaks()) == leaks


def resident(*mib: float, pid: int = 7, every: float = 60) -> list[Sample]:
    return [attrs.evolve(IDLE, at=every * (i + 1), resident=int(m * MIB), pid=pid) for i, m in enumerate(mib)]


async def test_memory_is_held_against_what_it_was_after_the_first_third() -> None:
    flat = await soak_of(*resident(50, 90, 100, 100, 100, 100, 100, 101, 101, 101.5))
    assert list(flat.leaks()) == []
    growing = await soak_of(*resident(50, 90, 99, 100, 100, 100, 100, 101, 102, 104))
    assert list(growing.leaks()) == ["stage-1: memory has grown by 4.0 % since the first third"]


async def test_memory_of_a_short_run_is_not_judged() -> None:
    soak = await soak_of(*resident(50, 90, 99, 100, 100, 100, 100, 101, 102, 104, every=29))
    assert soak.growth("stage-1") is None
    assert list(soak.leaks()) == []


async def test_memory_of_a_process_that_is_younger_is_not_judged() -> None:
    samples = [*resident(50, 50, 50, 50), *(attrs.evolve(s, at=s.at + 240) for s in resident(60, 70, pid=8))]
    soak = await soak_of(*samples)
    assert soak.growth("stage-1") is None
    assert list(soak.leaks()) == []


def answer(*events: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(b"data: " + event.encode() + b"\n\n" for event in events)


REFUSAL = b'HTTP/1.1 503 X\r\nContent-Length: 12\r\n\r\n{"error":{}}'


@pytest.mark.parametrize(
    ("habit", "said", "result"),
    [
        (Habit.READ, [answer('{"choices":[]}', "[DONE]")], "answer"),
        (Habit.READ, [answer('{"error":{}}', "[DONE]")], "error"),
        (Habit.READ, [answer('{"choices":[]}')], "broken"),
        (Habit.READ, [REFUSAL], "refused"),
        (Habit.READ, [b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\noops"], "broken"),
        (Habit.READ, [], "broken"),
        (Habit.LEAVE, [answer(*['{"choices":[]}'] * 9)], "left"),
        (Habit.RESET, [answer(*['{"choices":[]}'] * 9)], "left"),
        (Habit.HALF_CLOSE, [answer('{"choices":[]}', "[DONE]")], "answer"),
        (Habit.HALF_CLOSE, [], "broken"),
        (Habit.CUT_REQUEST, [], "left"),
    ],
)
async def test_clients_tell_what_became_of_their_requests(
    habit: Habit, said: Sequence[bytes], result: str
) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        got = b""
        while habit is not Habit.CUT_REQUEST and b"}" not in got:
            got += await stream.receive_some(65536)
        for data in said:
            await stream.send_all(data)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            target = Target("127.0.0.1", listener.socket.getsockname()[1], "m")
            outcome = await one_request(target, habit, random.Random(1))
            nursery.cancel_scope.cancel()
    assert outcome == Outcome(habit, result, outcome.detail)
