"""What is restored in safe mode: only what the request would have computed in the same chunks."""

from __future__ import annotations

import pytest
import trio.testing

from tests.frontend.test_checkpoints import cache_of, states
from tests.frontend.test_restoring import (
    AUDITED,
    CHUNK,
    ON,
    Chain,
    all_chains,
    caching_chain,
    request,
    settled,
)
from tests.stage.test_chain import PROMPT, unsplit_tokens
from tests.stage.test_restores_whole import WholeToy
from tests.support.lossy import Fate, Frame

LAST = len(PROMPT) - 1
OTHER = [*PROMPT[:30], *b"walks away from it all"]


async def ask(chain: Chain, prompt: list[int], cached: int, count: int = 12) -> list[int]:
    tokens, timings = await chain.generate(request(prompt, count))
    assert (tokens, timings.cached_tokens) == (unsplit_tokens(prompt, count), cached)
    await settled(chain, 2)
    await trio.testing.wait_all_tasks_blocked()
    return tokens


def schedules(chain: Chain) -> list[set[tuple[int, ...]]]:
    """For each stage, how each of its entries was computed."""
    stages = range(len(chain.cluster.stages))
    return [{entry.schedule for entry in cache_of(chain.cluster, i).index.entries()} for i in stages]


@all_chains
async def test_equal_prompts_whole_and_others_up_to_a_chunk_of_their_own(stages: int) -> None:
    async with caching_chain(stages, safe=True) as chain:
        tokens = await ask(chain, PROMPT, 0)
        await ask(chain, PROMPT, len(PROMPT))
        await ask(chain, PROMPT, len(PROMPT), count=20)
        await ask(chain, OTHER, 28)
        await ask(chain, [*PROMPT, *tokens, *b" and then?"], LAST - LAST % CHUNK)


@all_chains
async def test_the_next_chunk_is_the_one_that_would_have_come(stages: int) -> None:
    """Of a list of sizes, that behind those which are restored."""
    async with caching_chain(stages, safe=True, chunk=256, prefill_chunk_schedule=(4, 9, 16)) as chain:
        await ask(chain, PROMPT, 0, count=1)
        await ask(chain, OTHER, 29, count=1)
        assert schedules(chain) == [{(4, 9, 16, 14, 1), (4, 9, 16, 16, 6, 1)}] * stages


@all_chains
async def test_what_an_audit_computes_again_is_cut_no_otherwise(stages: int) -> None:
    async with caching_chain(stages, safe=True, config=AUDITED) as chain:
        await ask(chain, PROMPT, 0)
        await ask(chain, OTHER, 0)
        audits = [cache_of(chain.cluster, index).index.counters for index in range(stages)]
        assert [(each.audits, each.audit_failures) for each in audits] == [(1, 0)] * stages
        assert all((7, 7, 7, 7, 7, 7, 7, 2, *(1,) * 12) in each for each in schedules(chain))


@all_chains
async def test_states_are_kept_where_chunks_end(stages: int) -> None:
    async with caching_chain(stages, safe=True, config=ON, make_engine=WholeToy) as chain:
        await ask(chain, PROMPT, 0, count=3)
        assert states(chain) == [{42, LAST}] * stages
        await ask(chain, OTHER, 0, count=3)
        assert all(28 in lengths for lengths in states(chain))
        await ask(chain, [*PROMPT[:30], 1, 2, 3], 28, count=3)


@pytest.mark.parametrize("frames", [3, 12, 18])
async def test_after_a_loss_tokens_go_one_by_one_as_they_were_first_computed(frames: int) -> None:
    async with caching_chain(2, safe=True) as chain:
        left = [frames]

        def fate(frame: Frame) -> Fate:
            if frame.port != 20_001 or frame.prompt_tokens != len(PROMPT) or not left:
                return None
            left[0] -= 1  # the settings, and then one frame for each token
            return "lose" if left[0] < 0 and left.pop() else None

        chain.transport.fate = fate
        tokens, _ = await chain.generate(request(PROMPT, 20))
        assert tokens == unsplit_tokens(PROMPT, 20)
        await settled(chain, 2)
        assert not left
        assert all((7, 7, 7, 7, 7, 7, 1, *(1,) * 20) in entries for entries in schedules(chain))


async def test_where_cells_are_shared_nothing_is_promised_and_all_is_used() -> None:
    async with caching_chain(2, safe=True, unified=True) as chain:
        tokens = await ask(chain, PROMPT, 0)
        await ask(chain, [*PROMPT, *tokens, *b" and then?"], len(PROMPT) + len(tokens) - 1)
