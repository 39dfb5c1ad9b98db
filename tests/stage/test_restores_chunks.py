"""Requests that are to be given only what was computed as they would compute it themselves."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from skippy.protocol import ReplyKind
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.stage.test_restores_whole import WholeToy, exported
from tests.support.cached import K, cache_of, cached_cluster, complete, configure, counters
from tests.support.driver import driver_of

LAST = len(PROMPT) - 1
ANSWER = unsplit_tokens(PROMPT, 6)
all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


async def ask(driver: Any, prompt: list[int], restored: int, chunk: int = 7) -> None:
    answer = await complete(driver, prompt, 3, chunk=chunk, chunks=(chunk,))
    assert (answer.restored, answer.tokens) == (restored, unsplit_tokens(prompt, 3))


@all_chains
async def test_only_whole_chunks_that_are_the_requests_own(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 6)
            await ask(driver, PROMPT, LAST)
            await ask(driver, [*PROMPT[:30], *b"walks"], 28)
            await ask(driver, [*PROMPT, *ANSWER[:5], *b"and on"], LAST - LAST % 7)
            await ask(driver, PROMPT, 0, chunk=9)
            await ask(driver, PROMPT, LAST, chunk=9)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_stage_whose_entry_was_computed_otherwise_computes_it_again(index: int) -> None:
    """Tokens that the others have in chunks are there from an answer on one stage, for example."""
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            (entry,) = cache_of(cluster, index).index.entries()
            entry.schedule = (7, 7, *(1,) * (entry.length - 14))
            sent = [stage.context.cache.activations for stage in cluster.stages if stage.context.cache]
            await ask(driver, [*PROMPT, 5], 14)
            assert [each.stats().hits for each in sent if each] == [0, 0]
            assert [each.hit_tokens for each in counters(cluster)] == (
                [14] * 3 if index == 0 else [LAST - LAST % 7] * index + [14] * (3 - index)
            )
            await wait_for_sequences(cluster)


@all_chains
async def test_what_shared_a_call_is_of_no_use(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            for index in range(stages):
                (entry,) = cache_of(cluster, index).index.entries()
                entry.alone = False
            driver.request_id += 2
            driver.prompt_tokens = len(PROMPT)
            await configure(driver, chunks=(7,))
            for kind in (K.PROBE_PREFILL, K.TRY_RESTORE_PREFILL, K.RESTORE_PREFILL):
                assert (await driver.ask(kind, 0, PROMPT[:-1])).stats.kv_lookup_misses == 1
            assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
            assert (await complete(driver, PROMPT, 3)).restored == LAST
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [1, 3])
async def test_states_that_cannot_be_cut_end_with_a_chunk(stages: int) -> None:
    with trio.fail_after(20):
        async with (
            cached_cluster(stages, make_engine=WholeToy) as cluster,
            driver_of(cluster) as driver,
        ):
            await complete(driver, PROMPT, 3, checkpoints=(14,))
            await exported(cluster, LAST)
            await ask(driver, PROMPT, LAST)
            await ask(driver, [*PROMPT[:30], *b"walks"], 14)
            await ask(driver, [*PROMPT[:30], *b"runs"], 0, chunk=10)
            await wait_for_sequences(cluster)


async def test_the_chunks_come_before_what_is_restored() -> None:
    with trio.fail_after(20):
        async with cached_cluster(2) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            driver.request_id += 2
            await configure(driver, chunks=(7,))
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:7])
            await driver.send(K.CONFIGURE_GENERATION)
            assert await driver.ended()
            await wait_for_sequences(cluster)
