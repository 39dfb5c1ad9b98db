"""Models whose sequences cannot be shortened: prefixes are restored whole, from sequences and checkpoints."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from skippy.engine import EngineError, EngineInfo
from skippy.engine.toy import ToyEngine
from tests.stage.test_chain import PROMPT, unsplit_tokens, wait_for_sequences
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.cluster import Cluster
from tests.support.driver import driver_of

LAST = len(PROMPT) - 1


class WholeToy(ToyEngine):
    """An engine whose sequences cannot be shortened, as those of recurrent models."""

    @property
    def info(self) -> EngineInfo:
        return attrs.evolve(super().info, can_trim=False, can_trim_state=False)

    def trim(self, sequence: int, length: int) -> None:
        if 0 < length < self.length(sequence):
            raise EngineError("it is one whole")
        super().trim(sequence, length)


async def exported(cluster: Cluster, length: int) -> None:
    """Wait until every stage has the state of so many tokens."""

    def done(index: int) -> bool:
        entries = cache_of(cluster, index).index.entries()
        return any(entry.state is not None and entry.length == length for entry in entries)

    while not all(done(index) for index in range(len(cluster.stages))):
        await trio.testing.wait_all_tasks_blocked(0.001)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("payload", ["kv-recurrent", "full-state"])
async def test_a_prompt_again_and_the_next_turn(stages: int, payload: str) -> None:
    """The next turn of a chat goes on behind the last one; the same prompt behind its own end."""
    tokens = unsplit_tokens(PROMPT, 3)
    turn = [*PROMPT, *tokens[:2], *b" and then"]
    with trio.fail_after(20):
        async with (
            cached_cluster(
                stages, kv={"payload": payload, "shared_prefix_record_limit": 1}, make_engine=WholeToy
            ) as cluster,
            driver_of(cluster) as driver,
        ):
            assert (await complete(driver, PROMPT, 3)).tokens == tokens
            await exported(cluster, LAST)
            again = await complete(driver, PROMPT, 3)
            assert (again.restored, again.tokens) == (LAST, tokens)
            if payload == "full-state":
                await exported(cluster, LAST + 3)
            answer = await complete(driver, turn, 3)
            assert (answer.restored, answer.tokens) == (LAST + 3, unsplit_tokens(turn, 3))
            assert (await complete(driver, PROMPT[:20], 3)).restored == 0, "no part of it"
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("stages", [1, 3])
async def test_states_are_kept_where_the_settings_say_and_a_chunk_ends(stages: int) -> None:
    with trio.fail_after(20):
        async with (
            cached_cluster(stages, make_engine=WholeToy, inline=True) as cluster,
            driver_of(cluster) as driver,
        ):
            await complete(driver, PROMPT, 3, chunk=5, checkpoints=(2, 10, 23, 40))
            await exported(cluster, LAST)
            for index in range(stages):
                entries = cache_of(cluster, index).index.entries()
                assert {entry.length for entry in entries if entry.state} == {10, 40, LAST}
            branch = [*PROMPT[:40], *b"elsewhere"]
            answer = await complete(driver, branch, 3)
            assert (answer.restored, answer.tokens) == (40, unsplit_tokens(branch, 3))
            await wait_for_sequences(cluster)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_wholes_of_different_lengths_settle_on_one_that_all_have(index: int) -> None:
    """One stage has lost the longer of two: all go on from the shorter one."""
    with trio.fail_after(20):
        async with (
            cached_cluster(3, kv={"shared_prefix_record_limit": 1}, make_engine=WholeToy) as cluster,
            driver_of(cluster) as driver,
        ):
            await complete(driver, PROMPT[:31], 1)
            await exported(cluster, 30)
            await complete(driver, PROMPT, 1)
            await exported(cluster, LAST)
            cache = cache_of(cluster, index)
            for entry in cache.index.entries():
                if entry.length > 31:
                    cache.forget(entry)
            answer = await complete(driver, PROMPT, 6)
            assert answer.tokens == unsplit_tokens(PROMPT, 6)
            assert answer.restored in (30, 31)
            await wait_for_sequences(cluster)
