"""Audits of what is remembered, how it was computed, and forgetting it on request."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from skippy.engine.base import StateBytes
from skippy.engine.toy import ToyEngine
from skippy.protocol import ReplyKind
from skippy.stage import GenerationSettings
from skippy.stage.states import State, StateTier
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.stage.test_restores_whole import WholeToy
from tests.stage.test_states import ONE, PROMPTS, ask
from tests.support.cached import K, cache_of, cached_cluster, complete, configure, counters
from tests.support.cluster import Cluster
from tests.support.driver import Driver, driver_of

LAST = len(PROMPT) - 1
CHUNKS = (7,) * (LAST // 7) + ((LAST % 7,) if LAST % 7 else ())

all_chains = pytest.mark.parametrize("stages", [1, 2, 3])


async def audited(driver: Driver, prompt: list[int], length: int) -> list[int]:
    """A request that restores nothing, and whose first tokens are compared when it ends."""
    driver.request_id += 2
    driver.prompt_tokens = len(prompt)
    metadata = GenerationSettings(cache_audit=length).to_metadata()
    await driver.ask(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
    missed = await driver.ask(K.TRY_RESTORE_PREFILL, 0, prompt[:-1])
    assert missed.stats.kv_lookup_misses == 1
    last = len(prompt) - 1
    for position in range(0, last, 7):
        await driver.ask(K.PREFILL_EMBD, position, prompt[position : min(position + 7, last)])
    tokens = [await driver.decode(last, prompt[-1])]
    assert (await driver.ask(K.STOP)).kind is ReplyKind.ACK
    return tokens


def spoil(cluster: Cluster, index: int) -> None:
    """Change one number of what a stage remembers, in the engine."""
    (entry,) = cache_of(cluster, index).index.entries()
    cluster.engines[index]._sums[entry.sequence][0, 5, 0] ^= 1


@all_chains
async def test_a_session_remembers_how_it_was_computed(stages: int) -> None:
    turn = [*PROMPT, *unsplit_tokens(PROMPT, 3)[:2], *b"and on"]
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            for index in range(stages):
                (entry,) = cache_of(cluster, index).index.entries()
                assert (entry.schedule, entry.alone) == ((*CHUNKS, 1, 1, 1), True)
            await complete(driver, turn, 2)
            for index in range(stages):
                (entry,) = cache_of(cluster, index).index.entries()
                assert (entry.schedule, entry.alone) == ((*CHUNKS, 1, 1, 1, 5, 1, 1), True)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("step", [False, True])
async def test_who_shares_a_call_is_not_alone_nor_is_who_comes_after(index: int, step: bool) -> None:
    """Told to the stages behind with the next chunk, of a decode step with Stop; not to those before."""
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            driver.prompt_tokens = len(PROMPT)
            await configure(driver)
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:9])
            for stage in cluster.stages:  # so that every stage has begun
                await stage.context.scheduler.run(lambda engine: None)
            await driver.ask(K.TRIM_SESSION, token_count=9)
            iterations = cluster.stages[index].context.scheduler._iterations
            iterations._cut_batches += not step
            await driver.ask(K.PREFILL_EMBD, 9, PROMPT[9:-1])
            iterations._cut_batches += step
            await driver.decode(LAST, PROMPT[-1])
            await driver.ask(K.STOP)
            alone = [cache_of(cluster, each).index.entries()[0].alone for each in range(3)]
            assert alone == [each < index for each in range(3)]


@all_chains
async def test_an_audit_finds_the_same_bits(stages: int) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            for length in (LAST, 20):
                assert await audited(driver, PROMPT, length) == unsplit_tokens(PROMPT, 1)
            for each in counters(cluster):
                assert (each.audits, each.audit_failures, each.largest_difference) == (2, 0, 0.0)
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_an_audit_finds_a_changed_number(index: int) -> None:
    """The stage forgets what is wrong, and has what was computed instead; no client saw any of it."""
    with trio.fail_after(20):
        async with cached_cluster(3) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            spoil(cluster, index)
            assert await audited(driver, PROMPT, LAST) == unsplit_tokens(PROMPT, 1)
            failures = [each.audit_failures for each in counters(cluster)]
            assert failures == [int(each == index) for each in range(3)]
            for each in range(3):
                entries = cache_of(cluster, each).index.entries()
                made = [(*CHUNKS, 1)] if each == index else [(*CHUNKS, 1, 1, 1), (*CHUNKS, 1)]
                assert [(entry.schedule, entry.alone) for entry in entries] == [(way, True) for way in made]
            answer = await complete(driver, PROMPT, 6)
            assert (answer.restored, answer.tokens) == (LAST, unsplit_tokens(PROMPT, 6))
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("spoilt", [None, 0, 1, 2])
async def test_exported_states_are_compared_too(
    spoilt: int | None, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequence by sequence: one that is wrong on one stage is forgotten there."""
    kv = {"payload": "full-state", "directory": str(tmp_path) if on_disk else None}
    with trio.fail_after(20):
        async with (
            cached_cluster(3, kv=kv, inline=True, lane_count=2) as cluster,
            driver_of(cluster) as driver,
        ):
            await complete(driver, PROMPT, 3)
            await trio.testing.wait_all_tasks_blocked()
            if spoilt is not None:
                engine = cluster.engines[spoilt]
                real = engine.import_state

                def wrong(sequence: int, state: StateBytes) -> None:
                    real(sequence, state)
                    engine._sums[sequence][0, 5, 0] ^= 1

                monkeypatch.setattr(engine, "import_state", wrong)
            for _ in range(2):
                assert await audited(driver, PROMPT, LAST) == unsplit_tokens(PROMPT, 1)
                await trio.testing.wait_all_tasks_blocked()
            monkeypatch.undo()
            for index, each in enumerate(counters(cluster)):
                assert each.audits == 2
                assert each.audit_failures == (2 if index == spoilt else 0)
            answer = await complete(driver, PROMPT, 6)
            assert answer.tokens == unsplit_tokens(PROMPT, 6)
            await wait_for_sequences(cluster)


async def test_a_stage_without_a_sequence_to_spare_compares_no_states() -> None:
    with trio.fail_after(20):
        async with (
            cached_cluster(1, kv={"payload": "full-state"}, inline=True, lane_count=1) as cluster,
            driver_of(cluster) as driver,
        ):
            await complete(driver, PROMPT, 3)
            await trio.testing.wait_all_tasks_blocked()
            assert await audited(driver, PROMPT, LAST) == unsplit_tokens(PROMPT, 1)
            assert counters(cluster)[0].audits == 0
            assert (await complete(driver, PROMPT, 1)).restored == LAST
            await wait_for_sequences(cluster)


@all_chains
@pytest.mark.parametrize(
    ("which", "kept"),
    [("all", set()), ("common", {"ab", "ac", "b"}), ("a", {"", "b"}), ("ab", {"", "ac", "b"})],
)
async def test_forgetting_namespaces(stages: int, which: str, kept: set[str]) -> None:
    with trio.fail_after(20):
        async with cached_cluster(stages) as cluster, driver_of(cluster) as driver:
            for namespace in ("", "ab", "ac", "b"):
                await complete(driver, PROMPT[:12], 2, namespace=namespace)
            driver.request_id += 2
            metadata = GenerationSettings(cache_drop=which).to_metadata()
            await driver.ask(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
            await driver.ask(K.STOP)
            for index in range(stages):
                assert {entry.namespace for entry in cache_of(cluster, index).index.entries()} == kept
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("make_engine", [ToyEngine, WholeToy])
@pytest.mark.parametrize("restored", [0, 15])
@pytest.mark.parametrize(("which", "kept"), [("all", False), ("ab", False), ("c", True)])
async def test_forgetting_what_a_session_has_and_the_index_has_not(
    stages: int, make_engine: type[ToyEngine], restored: int, which: str, kept: bool
) -> None:
    """A copy that no row has followed yet, and a state that is indexed at its end."""
    with trio.fail_after(20):
        async with (
            cached_cluster(stages, make_engine=make_engine) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as another,
        ):
            if restored:
                await complete(driver, PROMPT, 3, namespace="ab", checkpoints=(14,), chunk=14)
                await trio.testing.wait_all_tasks_blocked(0.01)
            driver.request_id += 2
            driver.prompt_tokens = len(PROMPT)
            await configure(driver, "ab")
            if restored:
                length = (await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:restored])).predicted
                assert length == (14 if make_engine is WholeToy else restored)
            else:
                length = len(PROMPT) - 5
                await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:length])
                await driver.ask(K.TRIM_SESSION, token_count=length)  # behind it, on every stage
            another.request_id = 201
            metadata = GenerationSettings(cache_drop=which).to_metadata()
            await another.ask(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
            await another.ask(K.STOP)
            await driver.ask(K.PREFILL_EMBD, length, PROMPT[length:-1])
            assert await driver.decode(LAST, PROMPT[-1]) == unsplit_tokens(PROMPT, 1)[0]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)
            for index in range(stages):
                lengths = [entry.length for entry in cache_of(cluster, index).index.entries()]
                assert (len(PROMPT) in lengths) is kept
                assert kept or not lengths


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("whole", [False, True])
async def test_what_is_forgotten_while_it_is_imported_does_not_come_back(
    on_disk: bool, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on without it, and its own rows are the first ones since."""
    kv = {"directory": str(tmp_path)} if on_disk else {}
    with trio.fail_after(30):
        async with cached_cluster(1, kv=kv, **ONE) as cluster, driver_of(cluster) as driver:
            await ask(driver, PROMPTS[0], 0)
            await ask(driver, PROMPTS[1], 0)
            cache, load = cache_of(cluster, 0), StateTier.load

            async def forgetting(self: StateTier, state: State, sequence: int) -> None:
                await load(self, state, sequence)
                if whole:
                    cache.forget_all("all")
                else:
                    (entry,) = [entry for entry in cache.index.entries() if entry.state is state]
                    cache.forget(entry)

            monkeypatch.setattr(StateTier, "load", forgetting)
            await ask(driver, PROMPTS[0], 0)
            monkeypatch.undo()
            await ask(driver, PROMPTS[0], len(PROMPTS[0]) - 1)
            assert counters(cluster)[0].imports == 0
            await wait_for_sequences(cluster)
