"""Who has missed a prefix keeps its place among a stage's sessions: the stages behind may have theirs yet."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from skippy.engine import EngineError
from skippy.protocol import MessageKind, ReplyKind, is_hit
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.stage.test_restores import fused
from tests.support.cached import cache_of, cached_cluster, complete, configure, counters
from tests.support.cluster import Cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
LAST = len(PROMPT) - 1
OTHER = [256, *b"quite another prompt"]


async def miss_on_the_last_stage(cluster: Cluster, driver: Driver) -> None:
    """Ask for the prompt once more, of which the last stage has nothing left."""
    await complete(driver, PROMPT, 3)
    await wait_for_sequences(cluster)
    cache = cache_of(cluster, 2)
    for entry in cache.index.entries():
        cache.forget(entry)
    driver.request_id += 2
    await configure(driver)
    assert (await fused(driver, PROMPT)).kind is ReplyKind.ACK


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("then", ["prefill", "restore", "fused", "leave"])
async def test_a_request_that_has_missed_does_not_wait_for_one_that_waits_for_it(
    then: str, lanes: int
) -> None:
    """The second request comes when the first one has missed on the last stage."""
    expected, others = unsplit_tokens(PROMPT, 5), unsplit_tokens(OTHER, 5)
    with trio.fail_after(20):
        async with (
            cached_cluster(3, lane_count=lanes) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as second,
            trio.open_nursery() as nursery,
        ):
            second.request_id = 101
            await miss_on_the_last_stage(cluster, driver)
            second.prompt_tokens = len(OTHER)
            await configure(second)
            # Acknowledged as it has come; its rows wait for a sequence, where there is but one.
            await second.ask(K.PREFILL_EMBD, 0, OTHER[:-1])

            async def go_on() -> None:
                for step, token in enumerate([OTHER[-1], *others[:-1]]):
                    assert await second.decode(len(OTHER) - 1 + step, token) == others[step]
                await second.ask(K.STOP)

            nursery.start_soon(go_on)
            await trio.testing.wait_all_tasks_blocked()
            start = 0
            if then == "fused":
                assert (await fused(driver, PROMPT)).kind is ReplyKind.ACK
            elif then == "restore":
                start = (await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])).predicted
            if then != "leave":
                await driver.ask(K.PREFILL_EMBD, start, PROMPT[start:-1])
                for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                    assert await driver.decode(LAST + step, token) == expected[step]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)


async def test_a_request_whose_prefix_cannot_be_imported_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the prompt the first stage has but a state left, which it cannot import when it is asked again."""
    expected, others = unsplit_tokens(PROMPT, 5), unsplit_tokens(OTHER, 5)
    with trio.fail_after(20):
        async with (
            cached_cluster(3, lane_count=1) as cluster,
            driver_of(cluster) as driver,
            driver_of(cluster) as second,
            trio.open_nursery() as nursery,
        ):
            second.request_id = 101
            await miss_on_the_last_stage(cluster, driver)
            states = cache_of(cluster, 0).states
            assert states is not None
            await states.writer.wait_idle()

            def refuse(*_: object) -> None:
                raise EngineError("not today")

            monkeypatch.setattr(cluster.engines[0], "import_state", refuse)
            second.prompt_tokens = len(OTHER)
            await configure(second)
            await second.ask(K.PREFILL_EMBD, 0, OTHER[:-1])

            async def go_on() -> None:
                for step, token in enumerate([OTHER[-1], *others[:-1]]):
                    assert await second.decode(len(OTHER) - 1 + step, token) == others[step]
                await second.ask(K.STOP)

            nursery.start_soon(go_on)
            await trio.testing.wait_all_tasks_blocked()
            assert not is_hit((await driver.ask(K.TRY_RESTORE_PREFILL, 0, PROMPT[:-1])).stats)
            assert counters(cluster)[0].errors == 1
            await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:-1])
            for step, token in enumerate([PROMPT[-1], *expected[:-1]]):
                assert await driver.decode(LAST + step, token) == expected[step]
            await driver.ask(K.STOP)
            await wait_for_sequences(cluster)
