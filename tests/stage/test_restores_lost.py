"""Lanes that are lost while, or after, a prefix is restored: the request goes on with the same tokens."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from skippy.config import KvCacheConfig
from tests.stage.test_chain import PROMPT, generate, unsplit_tokens
from tests.stage.test_replay import PORTS, REQUEST, RIGHT, SAMPLED, lossy_chain, once
from tests.support.lossy import Fate

KV = KvCacheConfig(mode="lookup-record", min_tokens=4)
TURN = [*PROMPT, *RIGHT[:4], *b"and then"]
SECOND = attrs.evolve(REQUEST, prompt=TURN)
EXPECTED = unsplit_tokens(TURN, REQUEST.max_tokens, SAMPLED)


async def frames_of_second(port: int) -> tuple[int, int]:
    """The numbers of the frames to ``port`` that the second of two requests sends, undisturbed."""
    async with lossy_chain(kv=KV) as chain:
        assert await generate(chain.generator, REQUEST) == RIGHT
        await trio.sleep(1)
        first = chain.transport.count(port)
        assert await generate(chain.generator, SECOND) == EXPECTED
        return first, chain.transport.count(port)


@pytest.mark.parametrize("fate", ["lose", "deliver and break"])
@pytest.mark.parametrize("where", PORTS)
async def test_any_frame_of_a_restored_request_is_lost(
    where: str, fate: Fate, autojump_clock: trio.testing.MockClock
) -> None:
    port = PORTS[where]
    first, end = await frames_of_second(port)
    assert end - first >= 10
    for number in range(first, end, 1 if fate == "lose" else 3):
        async with lossy_chain(kv=KV) as chain:
            assert await generate(chain.generator, REQUEST) == RIGHT
            await trio.sleep(1)
            chain.transport.fate = once(port, number, fate)
            assert await generate(chain.generator, SECOND) == EXPECTED, number
