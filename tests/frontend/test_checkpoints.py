"""Prompts of models that restore nothing but whole states: cut where that is worth a state."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio.testing

from skippy.config import KvCacheConfig
from skippy.kv.entries import Entry
from tests.frontend.test_restoring import Chain, all_chains, caching_chain, request, settled
from tests.stage.test_chain import unsplit_tokens
from tests.stage.test_restores_whole import WholeToy
from tests.support.cached import cache_of

SYSTEM = [*b"what every request begins with, so it is worth keeping:"]
STRIDE = 8
ON = KvCacheConfig(mode="lookup-record", min_tokens=STRIDE)
CHUNK = 100
"""Whole prompts, if nothing cuts them."""


def prompt(tail: str) -> list[int]:
    return [*SYSTEM, *f" {tail * 12}".encode()]


def states(chain: Chain) -> list[set[int]]:
    """For each stage, how many tokens the states have that it keeps."""

    def lengths(entries: list[Entry[Any]]) -> set[int]:
        return {entry.length for entry in entries if entry.state is not None}

    return [lengths(cache_of(chain.cluster, i).index.entries()) for i in range(len(chain.cluster.stages))]


async def ask(chain: Chain, tokens: list[int], cached: int) -> None:
    """A request that finds so much of its prompt, is right, and has left what it leaves."""
    got, timings = await chain.generate(request(tokens, 5))
    assert (got, timings.cached_tokens) == (unsplit_tokens(tokens, 5), cached)
    await settled(chain, 2)
    await trio.testing.wait_all_tasks_blocked()


@all_chains
@pytest.mark.parametrize("payload", ["auto", "full-state"])
async def test_where_a_prompt_parts_from_others_every_stage_keeps_its_state(
    stages: int, payload: Any
) -> None:
    config = attrs.evolve(ON, payload=payload)
    common = len(SYSTEM) + 1
    async with caching_chain(stages, config=config, chunk=CHUNK, make_engine=WholeToy) as chain:
        before = [len(prompt(tail)) - 1 for tail in "abc"]
        await ask(chain, prompt("a"), 0)
        near = (before[0] - 1) // STRIDE * STRIDE
        assert all({near, before[0]} <= lengths for lengths in states(chain))
        await ask(chain, prompt("b"), 0)
        assert all({common, before[1]} <= lengths for lengths in states(chain))
        await ask(chain, prompt("c"), common)  # which is there, so that the cut is near the end again
        assert all(near in lengths for lengths in states(chain))
        await ask(chain, prompt("d"), common)
        counters = [cache_of(chain.cluster, i).index.counters for i in range(stages)]
        assert [(each.imports, each.errors) for each in counters] == [(2, 0)] * stages


async def test_a_template_that_puts_something_else_behind_the_messages() -> None:
    """A prompt that goes on otherwise a few tokens before its end finds the last multiple of the stride."""
    async with caching_chain(2, config=ON, chunk=CHUNK, make_engine=WholeToy) as chain:
        thinking = [*SYSTEM, *b"<think>"]
        await ask(chain, thinking, 0)
        near = (len(thinking) - 2) // STRIDE * STRIDE
        await ask(chain, [*thinking[:near], *b" no thought, and the next turn"], near)


@pytest.mark.parametrize("forgetful", [0, 1, 2])
async def test_what_one_stage_has_lost_all_have_again(forgetful: int) -> None:
    async with caching_chain(3, config=ON, chunk=CHUNK, make_engine=WholeToy) as chain:
        common = len(SYSTEM) + 1
        await ask(chain, prompt("a"), 0)
        await ask(chain, prompt("b"), 0)
        cache = cache_of(chain.cluster, forgetful)
        for entry in cache.index.entries():
            cache.forget(entry)
        await ask(chain, prompt("c"), 0)
        if not forgetful:  # it knows nothing of what would be worth a state
            await ask(chain, prompt("d"), 0)
        await ask(chain, prompt("e"), common)


@pytest.mark.parametrize(("limit", "expected"), [(0, [8, 16, 20, 24]), (1, []), (2, [20]), (3, [20, 24])])
async def test_how_many_states_one_prompt_leaves(limit: int, expected: list[int]) -> None:
    config = attrs.evolve(ON, shared_prefix_record_limit=limit)
    async with caching_chain(1, config=config, make_engine=WholeToy) as chain:
        cache = cache_of(chain.cluster, 0)
        sequence = cache.scheduler.take_sequence()
        assert sequence is not None
        cache.index.add("", range(20), sequence=sequence)
        tokens = [*range(20), *range(90, 100)]
        assert cache.plan_checkpoints("", tokens, 0) == tuple(expected)
        assert cache.plan_checkpoints("", tokens, 20)[:1] == (20,)
        assert cache.plan_checkpoints("", tokens, 20)[1:] == ((24,) if limit != 1 else ())
        assert cache.plan_checkpoints("ab", tokens[:9], 0) == ((8,) if limit != 1 else ())
        assert cache.plan_checkpoints("ab", tokens[:8], 0) == ()
        cache.scheduler.keep_sequence(sequence)


async def test_where_any_prefix_is_served_no_prompt_is_cut() -> None:
    async with caching_chain(2, config=ON, chunk=CHUNK) as chain:
        await ask(chain, prompt("a"), 0)
        assert cache_of(chain.cluster, 0).plan_checkpoints("", prompt("b"), 0) == ()
