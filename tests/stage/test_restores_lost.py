"""Lanes that are lost while, or after, a prefix is restored: the request goes on with the same tokens."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from skippy.config import KvCacheConfig
from skippy.protocol import MessageKind, ReplyKind
from tests.stage.test_chain import PROMPT, generate, unsplit_tokens, wait_for_sequences
from tests.stage.test_replay import PORTS, REQUEST, RIGHT, SAMPLED, lossy_chain, once
from tests.support.cached import K, cache_of, cached_cluster, complete, configure
from tests.support.driver import driver_of
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


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("kind", [K.PREFILL_EMBD, K.TRY_RESTORE_PREFILL, K.TRY_RESTORE_PREFILL_DECODE])
async def test_a_lane_that_ends_just_as_its_rows_have_run_or_were_restored(
    index: int, kind: MessageKind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for that is over, and so not cancelled; but the sequence is somebody else's by then."""
    with trio.fail_after(20):
        async with cached_cluster(3, lane_count=2) as cluster:
            context = cluster.stages[index].context
            waited_for, name = (
                (context.scheduler, "carry_out")
                if kind is K.PREFILL_EMBD
                else (
                    context.cache,
                    "complete",
                )
            )
            real = getattr(waited_for, name)

            async def ends(what: Any) -> None:
                await real(what)
                for lane in context.lanes:
                    lane.close()
                    lane._drop_session()

            async with driver_of(cluster) as driver:
                await complete(driver, PROMPT, 2)
                driver.request_id += 2
                driver.prompt_tokens = len(PROMPT)
                await configure(driver)
                monkeypatch.setattr(waited_for, name, ends)
                if kind is K.PREFILL_EMBD:
                    assert (await driver.ask(kind, 0, PROMPT[::-1])).kind is ReplyKind.ACK
                elif kind is K.TRY_RESTORE_PREFILL:
                    await driver.send(kind, 0, PROMPT[:-1])
                else:
                    fields = {"token_count": 1, "current_token": PROMPT[-1], "decode_step": 0}
                    await driver.send(kind, len(PROMPT) - 1, PROMPT, **fields)
                assert await driver.ended()
                monkeypatch.undo()
            await wait_for_sequences(cluster)
            for each in range(3):
                assert [entry.live for entry in cache_of(cluster, each).index.entries()] in ([], [False])
            async with driver_of(cluster) as driver:
                answer = await complete(driver, PROMPT, 5)
                assert answer.tokens == unsplit_tokens(PROMPT, 5)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
