"""What the stages of a chain observe arrives in the statistics of their replies: all of it, and once."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
import trio.testing

from skippy.config import StageOptions
from skippy.engine import StageEngine
from skippy.protocol import EMPTY_STATS, MessageKind, Reply, ReplyStats
from skippy.protocol.stats import I64_MAX, merge
from skippy.stage.clock import measured_on
from skippy.stage.statistics import LaneStats
from tests.stage.test_chain import PROMPT, unsplit_tokens
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
COSTS = [100, 700, 300]
LAST = len(PROMPT) - 1
WIDTH = 8


@attrs.define
class Work:
    """A clock that only computing moves on: a call of stage i takes ``COSTS[i]`` µs."""

    now: int = 0

    def seconds(self) -> float:
        return (self.now + 0.5) / 1e6  # so that no rounding comes between

    def slow_down(self, engine: StageEngine, cost: int) -> None:
        decode = engine.decode

        @functools.wraps(decode)
        def costly(*args: object, **kwargs: object) -> None:
            decode(*args, **kwargs)  # type: ignore[arg-type]
            self.now += cost

        engine.decode = costly  # type: ignore[method-assign]


@asynccontextmanager
async def timed_chain(
    stages: int, options: StageOptions | None = None
) -> AsyncIterator[tuple[Cluster, Driver]]:
    work = Work()
    with measured_on(work.seconds), trio.fail_after(20):
        async with (
            toy_cluster(stages, inline=True, options=options) as cluster,
            driver_of(cluster) as driver,
        ):
            for engine, cost in zip(cluster.engines, COSTS, strict=False):
                work.slow_down(engine, cost)
            yield cluster, driver


async def prefill(driver: Driver) -> None:
    """The settings, and the prompt in two chunks, each all the way through; nothing is reported yet."""
    driver.prompt_tokens = len(PROMPT)
    await driver.ask(K.CONFIGURE_GENERATION)
    assert driver.stats == EMPTY_STATS
    for start, end in ((0, 10), (10, LAST)):
        assert await driver.ask(K.PREFILL_EMBD, start, PROMPT[start:end]) == Reply.ack()
        assert driver.stats == EMPTY_STATS
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_prefill_and_a_window_through_a_chain(stages: int) -> None:
    line = [PROMPT[-1], *unsplit_tokens(PROMPT, 8)]
    slowest = COSTS.index(max(COSTS[:stages]))
    async with timed_chain(stages) as (_, driver):
        await prefill(driver)
        await driver.send(K.DECODE_EMBD, LAST, line[:1], decode_step=0)
        await driver.reply()
        first = driver.stats
        # Stages 0 and the last one: those in between have no part in predictions.
        reporting = {1: [0], 2: [0, 1], 3: [0, 2]}[stages]
        assert first.prefill_compute_observation_count == 2 * len(reporting)
        assert first.prefill_compute_us_at_slowest_rate == max(COSTS[i] for i in reporting)
        assert first.prefill_edge_observation_count == (2 if stages > 1 else 0)
        await driver.verify(1, LAST + 1, line[1:4])
        await driver.reply()
        second = driver.stats
        assert second.prefill_compute_observation_count == 0
        assert second.verify_window_stage_count == len(reporting)
        await driver.ask(K.STOP)
        stop = driver.stats
        whole = functools.reduce(merge, (first, second, stop))
    assert whole == ReplyStats(
        verify_window_compute_us=sum(COSTS[:stages]),
        # Stage 0 alone waits for the answer; the others go on.
        verify_window_downstream_wait_us=sum(COSTS[1:stages]),
        verify_window_total_us=sum(COSTS[:stages]) + sum(COSTS[1:stages]),
        verify_window_stage_count=stages,
        verify_window_request_count=stages,
        verify_window_token_count=3 * stages,
        verify_window_max_tokens=3,
        prefill_edge_observation_count=2 * (stages - 1),
        prefill_compute_us_at_slowest_rate=COSTS[slowest],
        prefill_compute_stage_index=slowest,
        prefill_compute_token_count_at_slowest_rate=LAST - 10,
        prefill_compute_observation_count=2 * stages,
    )
    if stages < 3:
        assert stop == EMPTY_STATS


@pytest.mark.parametrize("options", [StageOptions(), StageOptions(reply_credit_limit=0)])
async def test_edges_by_a_real_clock(options: StageOptions) -> None:
    with trio.fail_after(20):
        async with toy_cluster(3, options=options) as cluster, driver_of(cluster) as driver:
            await prefill(driver)
            await driver.ask(K.PREFILL_FINAL_EMBD, LAST, PROMPT[-1:], decode_step=0)
            stats = driver.stats
            await driver.ask(K.STOP)
            stats = merge(stats, driver.stats)
    assert stats.prefill_compute_observation_count == 9
    assert stats.prefill_edge_observation_count == 6
    assert stats.prefill_edge_stage_index in (0, 1)
    assert stats.prefill_edge_activation_bytes_max in [rows * WIDTH * 4 for rows in (1, 10, LAST - 10)]
    largest = max(stats.prefill_edge_write_us_max, stats.prefill_edge_wait_us_max)
    assert 0 < largest <= stats.prefill_edge_total_us_max


async def test_every_acknowledgement_that_is_not_early_reports() -> None:
    for kind in (K.CONFIGURE_GENERATION, K.TRIM_SESSION, K.PROBE_PREFILL, K.STOP):
        async with timed_chain(1) as (_, driver):
            await prefill(driver)
            position = {"token_count": LAST} if kind is K.TRIM_SESSION else {}
            tokens = [1, 2] if kind is K.PROBE_PREFILL else []
            await driver.ask(kind, 0, tokens, **position)
            assert driver.stats.prefill_compute_observation_count == 2
            assert driver.stats.kv_lookup_misses == (kind is K.PROBE_PREFILL)


async def test_a_replayed_chunk_reports_but_is_not_observed() -> None:
    async with timed_chain(3) as (_, driver):
        await prefill(driver)
        driver.generation = 1
        await driver.ask(K.DECODE_REPLAY_EMBD, 0, PROMPT[:5])
    assert driver.stats.prefill_compute_observation_count == 6
    assert driver.stats.prefill_compute_stage_index == 1


def test_sums_saturate() -> None:
    stats = LaneStats(0)
    stats.add(ReplyStats(kv_lookup_misses=I64_MAX))
    stats.add(ReplyStats(kv_lookup_misses=I64_MAX))
    assert stats.take(ReplyStats(kv_lookup_misses=1, kv_lookup_hits=2)) == ReplyStats(
        kv_lookup_misses=I64_MAX, kv_lookup_hits=2
    )
    below = ReplyStats(kv_lookup_hits=1)
    assert stats.take(below) is below
