"""The admission gate over a pool of toy lanes, under a virtual clock."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import OpenAIOptions
from skippy.frontend.admission import RECONNECT_WAIT_SECS, AdmissionGate
from skippy.frontend.generation import (
    ChainUnavailable,
    ContextLengthExceeded,
    GenerationError,
    TooManyRequests,
    WorkTimedOut,
)
from skippy.frontend.lanes import LanePool, PooledLane
from skippy.stage import LaneLost
from skippy.telemetry import NULL_TELEMETRY, Level, MemorySink, Telemetry, names
from tests.support.cluster import toy_cluster


@attrs.define
class Clients:
    """Requests to a gate, and what became of them, in order.

    Attributes:
        admitted: names of requests, in the order in which they got their lanes.
        refused: names and errors of the others.
    """

    gate: AdmissionGate
    nursery: trio.Nursery
    admitted: list[str] = attrs.field(factory=list)
    refused: dict[str, GenerationError] = attrs.field(factory=dict)

    async def run(self, name: str, prompt: int, answer: int, secs: float, *, promised: bool = False) -> None:
        """A generation that takes ``secs`` for its prompt, and as many for its answer."""
        try:
            admission = await self.gate.acquire(prompt, answer, promised=promised)
            with admission.running() as lane:
                self.admitted.append(name)
                await self._prefill(lane, secs)
                lane.token_received()
                for _ in range(answer - 1):
                    await trio.sleep(secs / (answer - 1))
                    lane.token_received()
        except GenerationError as error:
            self.refused[name] = error

    async def _prefill(self, lane: PooledLane, secs: float) -> None:
        """In chunks of 30 s."""
        end = trio.current_time() + secs
        while trio.current_time() < end:
            await trio.sleep_until(min(end, trio.current_time() + 30))
            assert lane.work is not None
            lane.work.renew()

    async def ask(
        self, name: str, prompt: int = 10, answer: int = 10, secs: float = 1.0, *, promised: bool = False
    ) -> trio.CancelScope:
        """Start a request and wait until it has got as far as it can; the scope ends it."""
        leaving = trio.CancelScope()

        async def client() -> None:
            with leaving:
                await self.run(name, prompt, answer, secs, promised=promised)

        self.nursery.start_soon(client)
        await trio.testing.wait_all_tasks_blocked()
        return leaving


@contextlib.asynccontextmanager
async def gate_over(
    lanes: int = 1,
    kv_tokens: int = 1000,
    telemetry: Telemetry = NULL_TELEMETRY,
    **options: Any,
) -> AsyncIterator[Clients]:
    """A gate with its lanes connected; leaving waits for all requests, and checks that nothing leaked."""
    async with toy_cluster(1, lane_count=lanes, inline=True) as cluster:
        pool = LanePool(cluster.first, lanes)
        gate = AdmissionGate(pool, kv_tokens, OpenAIOptions(**options), telemetry)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as clients:
                yield Clients(gate, clients)
            await trio.testing.wait_all_tasks_blocked()
            assert gate.reserved_tokens == 0
            assert gate.queue_depth == 0
            taken = []
            while (lane := pool.take()) is not None:
                taken.append(lane)
            assert len(taken) == lanes
            nursery.cancel_scope.cancel()


async def test_lanes_are_given_in_order_of_arrival(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over() as clients:
        await clients.ask("running")
        for number in range(10):
            await clients.ask(str(number))
        leaving = await clients.ask("leaving")
        await clients.ask("10")
        leaving.cancel()
    assert clients.admitted == ["running", *(str(number) for number in range(11))]


async def test_a_lane_that_becomes_free_goes_to_who_waits_not_to_who_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with gate_over() as clients:
        await clients.ask("running")
        await clients.ask("waiting")
        await trio.sleep_until(trio.current_time() + 2)  # "running" ends at the same moment
        await clients.ask("late")
    assert clients.admitted == ["running", "waiting", "late"]


async def test_a_full_queue(autojump_clock: trio.testing.MockClock) -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.serve)
        async with gate_over(lanes=2, generation_queue_capacity=3, telemetry=telemetry) as clients:
            for name in "abcdefg":
                await clients.ask(name)
        nursery.cancel_scope.cancel()
    assert sorted(clients.refused) == ["f", "g"]
    error = clients.refused["f"]
    assert isinstance(error, TooManyRequests)
    assert str(error) == "requests that run: 2, that wait: 3; there is room for no more; try again in 1 s"
    assert (error.status, error.code, error.retry_after_secs) == (429, "rate_limit_exceeded", 1)
    rejected = [event.attributes for event in sink.events if event.name.endswith("admission_rejected")]
    assert (
        rejected
        == [{"reason": "queue_full", "queue_depth": 3, "queue_capacity": 3, "predicted_wait_secs": None}] * 2
    )
    admitted = [
        event.attributes
        for event in sink.events
        if event.name == names.STAGE_OPENAI_GENERATION_ADMIT and "error" not in event.attributes
    ]
    assert sorted(one["queue_depth"] for one in admitted) == [0, 0, 0, 1, 2]
    assert [one["reserved_kv_tokens"] for one in admitted[:2]] == [20, 40]
    assert {one["queue_capacity"] for one in admitted} == {3}


async def test_prompts_in_the_making_wait_too(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(lanes=1, generation_queue_capacity=2) as clients:
        gate = clients.gate
        with gate.preparing(), gate.preparing(), gate.preparing():  # one of them may run at once
            assert gate.queue_depth == 3
            with pytest.raises(TooManyRequests), gate.preparing():
                pass
        await clients.ask("runs")
        with gate.preparing(), gate.preparing():
            await clients.ask("too many")
            with pytest.raises(TooManyRequests), gate.preparing():
                pass
        await clients.ask("waits")
    assert (clients.admitted, list(clients.refused)) == (["runs", "waits"], ["too many"])


@pytest.mark.parametrize(("limit", "ended"), [(0.0, []), (5.0, ["third", "second"]), (9.0, ["third"])])
async def test_the_real_wait_is_bounded(
    autojump_clock: trio.testing.MockClock, limit: float, ended: list[str]
) -> None:
    """Nothing has finished yet, so nothing is predicted; the first two take 8 s each."""
    async with gate_over(generation_admission_timeout_secs=limit) as clients:
        started = trio.current_time()
        for name in ("first", "second", "third"):
            await clients.ask(name, secs=4)
        if ended:
            await trio.sleep_until(started + limit + 0.1)
            await clients.ask("late", secs=0)
    assert sorted(clients.refused) == sorted(ended)
    for error in clients.refused.values():
        assert f"no lane became free within {limit:g} s" in str(error)
        assert error.retry_after_secs is not None
        assert error.retry_after_secs >= 1


async def test_an_answer_that_has_begun_is_not_refused(autojump_clock: trio.testing.MockClock) -> None:
    """Its further choices wait behind a queue that is full, longer than may be predicted and than one may."""
    limits = {"generation_queue_capacity": 1, "generation_admission_timeout_secs": 5}
    async with gate_over(**limits) as clients:
        await clients.run("learn", prompt=10, answer=10, secs=4)
        await clients.ask("runs", secs=3)
        await clients.ask("further", promised=True)
        await clients.ask("full")
        await clients.ask("further still", promised=True)
    assert clients.admitted == ["learn", "runs", "further", "further still"]
    assert list(clients.refused) == ["full"]


async def test_the_predicted_wait_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(lanes=2, generation_admission_timeout_secs=10, kv_tokens=10_000) as clients:
        # 1 s for 100 prompt tokens, then 1 s for 20 tokens: 10 ms and 50 ms per token.
        await clients.run("learn", prompt=100, answer=21, secs=1)
        assert clients.gate.predicted_wait_secs == 0
        await clients.ask("a", prompt=100, answer=21, secs=4)
        await clients.ask("b", prompt=500, answer=21, secs=4)
        wait = clients.gate.predicted_wait_secs
        assert wait == pytest.approx((600 * 0.010 + 42 * 0.050) / 2)
        await clients.ask("c", prompt=1190, answer=1)
        assert clients.gate.predicted_wait_secs == pytest.approx(10.025)
        await clients.ask("d")
        # Retry-After says when the queue will be done with, not the limit.
        assert clients.refused["d"].retry_after_secs == 11
        assert "the wait would be about 10 s, and may be 10 s" in str(clients.refused["d"])
        # What runs counts less the further it is.
        await trio.sleep(7.7)  # 19 of 21 tokens
        assert clients.gate.predicted_wait_secs == pytest.approx((1190 * 0.010 + (2 + 2 + 1) * 0.050) / 2)
        await clients.ask("e")
    assert sorted(clients.admitted) == ["a", "b", "c", "e", "learn"]


async def test_cache_positions_and_lane_together_or_neither(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(lanes=3, kv_tokens=100) as clients:
        await clients.ask("a", prompt=50, answer=10, secs=1)
        await clients.ask("b", prompt=30, answer=20, secs=1)  # a lane is idle, but 40 positions are left
        assert clients.gate.reserved_tokens == 60
        await clients.ask("c", prompt=20, answer=20, secs=5)  # fits: overtakes
        await clients.ask("d", prompt=40, answer=20)
        assert clients.gate.reserved_tokens == 100
    assert clients.admitted == ["a", "c", "b", "d"]


async def test_the_oldest_gets_the_pool_after_32_passes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with gate_over(lanes=2, kv_tokens=100, generation_queue_capacity=100) as clients:
        await clients.ask("holds", prompt=50, answer=10, secs=1000)
        await clients.ask("large", prompt=50, answer=10, secs=1)
        for number in range(40):
            await clients.ask(str(number), prompt=5, answer=5, secs=1)
    large = clients.admitted.index("large")
    assert clients.admitted == ["holds", *map(str, range(32)), "large", *map(str, range(32, 40))]
    assert large == 33


async def test_a_request_that_leaves_lets_those_behind_it_go(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(lanes=2, kv_tokens=100, generation_queue_capacity=100) as clients:
        holds = await clients.ask("holds", prompt=50, answer=10, secs=1000)
        large = await clients.ask("large", prompt=50, answer=10, secs=1)
        for number in range(33):
            await clients.ask(str(number), prompt=5, answer=5, secs=1)
        await trio.sleep(100)
        assert len(clients.admitted) == 33
        large.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert clients.admitted[-1] == "32"
        holds.cancel()


async def test_what_can_never_fit_fails_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(lanes=1, kv_tokens=100) as clients:
        await clients.ask("runs")
        await clients.ask("huge", prompt=60, answer=41)
    error = clients.refused["huge"]
    assert isinstance(error, ContextLengthExceeded)
    assert str(error) == "prompt and answer take 101 positions, the cache has 100"


@pytest.mark.parametrize("steps", range(12))
async def test_leaving_at_any_moment(autojump_clock: trio.testing.MockClock, steps: int) -> None:
    """While the lane is handed over, before, and after: it is there for the next one."""
    async with gate_over() as clients:
        runs = await clients.ask("runs", secs=1000)
        waits = await clients.ask("waits", secs=1000)
        for _ in range(steps):
            if runs.cancel_called:
                waits.cancel()
            runs.cancel()
            await trio.lowlevel.checkpoint()
        runs.cancel()
        waits.cancel()


async def test_leaving_in_the_moment_of_admission(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over() as clients:
        runs = await clients.ask("runs", secs=1000)
        leaving = trio.CancelScope()
        outcome: list[str] = []

        async def waits() -> None:
            with leaving:
                await clients.gate.acquire(1, 1)
                outcome.append("admitted")

        clients.nursery.start_soon(waits)
        await trio.testing.wait_all_tasks_blocked()
        leaving.cancel()
        runs.cancel()
        await clients.ask("next")
    assert (clients.admitted, outcome) == (["runs", "next"], [])


async def stalls(lane: PooledLane) -> None:
    await trio.sleep_forever()


async def makes_chunks(lane: PooledLane) -> None:
    for _ in range(5):
        await trio.sleep(59)
        assert lane.work is not None
        lane.work.renew()
    await trio.sleep_forever()


async def generates(lane: PooledLane) -> None:
    for _ in range(5):
        await trio.sleep(59)
        lane.token_received()
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("work", "prompt", "wait", "secs"),
    [
        (stalls, 10, 0, 60),
        (stalls, 6400, 0, 100),
        (stalls, 10, 90, 90),
        (makes_chunks, 10, 0, 5 * 59 + 60),
        (generates, 10, 0, 5 * 59 + 60),
    ],
)
async def test_work_without_progress_ends(
    autojump_clock: trio.testing.MockClock,
    work: Callable[[PooledLane], Any],
    prompt: int,
    wait: float,
    secs: float,
) -> None:
    async with gate_over(lanes=1, kv_tokens=10_000, generation_admission_timeout_secs=wait) as clients:
        await clients.ask("earlier", secs=20)  # a wait for admission does not count
        admission = await clients.gate.acquire(prompt, 100)
        started = trio.current_time()
        with pytest.raises(WorkTimedOut) as caught, admission.running() as lane:
            await work(lane)
        assert trio.current_time() - started == pytest.approx(secs, abs=1)
        assert (caught.value.status, caught.value.code) == (504, "timeout")
        # What the chain still owes for it is nobody's: the lane is replaced.
        assert lane.lane.failure is not None
        await clients.ask("next")
    assert clients.admitted == ["earlier", "next"]


@pytest.mark.parametrize(
    ("options", "patience"),
    [
        ({}, 60.0),
        ({"replay_timeout_secs": 7.0}, 7.0),
        ({"replay_on_stage_loss": False}, RECONNECT_WAIT_SECS),
        ({"replay_timeout_secs": 0.0}, math.inf),
    ],
)
async def test_an_answer_that_has_begun_waits_for_a_lost_chain_like_a_replay(
    autojump_clock: trio.testing.MockClock, options: dict[str, Any], patience: float
) -> None:
    async with toy_cluster(2, inline=True) as cluster:
        cluster.transport._listeners.clear()  # type: ignore[attr-defined]
        gate = AdmissionGate(LanePool(cluster.first, 1), 1000, OpenAIOptions(**options))
        began = trio.current_time()
        with trio.move_on_after(1000) as scope, pytest.raises(ChainUnavailable):
            await gate.acquire(1, 1, promised=True)
        assert scope.cancelled_caught is (patience == math.inf)
        assert trio.current_time() - began == pytest.approx(min(patience, 1000))


async def test_no_lane_is_connected(autojump_clock: trio.testing.MockClock) -> None:
    """Requests that wait when the last lane is lost have as long as those that come then."""
    async with toy_cluster(2, inline=True) as cluster:
        listeners = cluster.transport._listeners  # type: ignore[attr-defined]
        away = listeners.copy()
        pool = LanePool(cluster.first, 1)
        gate = AdmissionGate(pool, 1000, OpenAIOptions())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            async with trio.open_nursery() as waiting:
                clients = Clients(gate, waiting)
                holder = trio.CancelScope()
                with holder:
                    admission = await gate.acquire(1, 1)
                    with admission.running() as lane:
                        await clients.ask("waits")
                        await trio.sleep(50)
                        listeners.clear()
                        lost = trio.current_time()
                        lane.lane.fail(LaneLost("gone"))
                        await trio.testing.wait_all_tasks_blocked()
                        await clients.ask("comes")
            assert trio.current_time() - lost == pytest.approx(RECONNECT_WAIT_SECS)
            assert all(isinstance(error, ChainUnavailable) for error in clients.refused.values())
            assert sorted(clients.refused) == ["comes", "waits"]
            async with trio.open_nursery() as waiting:
                clients = Clients(gate, waiting)
                await clients.ask("in time", secs=100)
                listeners.update(away)
            assert clients.admitted == ["in time"]
            nursery.cancel_scope.cancel()


async def test_adaptive_concurrency_while_requests_wait(
    autojump_clock: trio.testing.MockClock,
) -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.serve)
        async with gate_over(
            lanes=3,
            generation_queue_capacity=200,
            kv_tokens=10_000,
            adaptive_generation_concurrency=True,
            telemetry=telemetry,
        ) as clients:
            # These lanes do not slow each other down.
            for number in range(120):
                await clients.ask(str(number))
            assert clients.gate.concurrency == 1
            assert len(clients.admitted) == 1
            await trio.sleep(300)
            assert clients.gate.queue_depth == 0
            assert clients.gate.concurrency == 3
        nursery.cancel_scope.cancel()
    events = [
        event.attributes
        for event in sink.events
        if event.name == names.STAGE_OPENAI_GENERATION_CONCURRENCY_ADAPT
    ]
    assert [(one["action"], one["previous"], one["current"], one["ceiling"]) for one in events] == [
        ("probe", 1, 2, 3),
        ("keep", 1, 2, 3),
        ("probe", 2, 3, 3),
        ("keep", 2, 3, 3),
    ]
    assert events[1]["throughput_ratio"] == pytest.approx(2, rel=0.15)
    assert events[1]["p95_ratio"] == pytest.approx(1, rel=0.05)


async def test_a_failure_takes_a_lane_more_back(autojump_clock: trio.testing.MockClock) -> None:
    async with gate_over(
        lanes=3, generation_queue_capacity=200, adaptive_generation_concurrency=True
    ) as clients:

        async def fails() -> None:
            admission = await clients.gate.acquire(1, 1)
            assert clients.gate.concurrency == 2
            with pytest.raises(ChainUnavailable), admission.running():
                raise ChainUnavailable("a stage was lost")
            assert clients.gate.concurrency == 1

        for number in range(10):
            await clients.ask(str(number))
        clients.nursery.start_soon(fails)  # begins with the tenth, as a lane more is tried
        await trio.testing.wait_all_tasks_blocked()
        for number in range(10, 20):
            await clients.ask(str(number))
    assert len(clients.admitted) == 20
