"""What an answer says about the time and the tokens it took."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest, Timings
from skippy.frontend.lanes import LanePool
from skippy.frontend.responses import timings_object
from skippy.frontend.running import Usage
from tests.support.cluster import fixed_chunks, toy_cluster

from .support import MODEL, ScriptedGenerator, chat_body, client, say


def test_the_object() -> None:
    timings = Timings(
        queue_ms=1.23456, cached_tokens=60, restore_ms=2, prefill_tokens=39, prefill_ms=30, prompt_ms=40,
        answer_ms=100,
    )  # fmt: skip
    assert timings_object(timings, Usage(100, 11, cached_tokens=60)) == {
        "queue_wait_ms": 1.235,
        "cache_n": 60,
        "cache_restore_ms": 2,
        "suffix_prefill_n": 39,
        "suffix_prefill_ms": 30,
        "prompt_n": 40,
        "prompt_ms": 40,
        "prompt_per_second": 1000,
        "predicted_n": 11,
        "predicted_ms": 100,
        "predicted_per_second": 100,
    }


@pytest.mark.parametrize("answered", [0, 1])
def test_rates_of_nothing(answered: int) -> None:
    shown = timings_object(Timings(cached_tokens=5), Usage(5, answered, cached_tokens=5))
    assert shown["prompt_per_second"] == shown["predicted_per_second"] == 0


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_has_them_in_its_last_chunk(include_usage: bool) -> None:
    body = chat_body(stream=True, stream_options={"include_usage": include_usage})
    async with client(ScriptedGenerator(say("ab"))) as http:
        text = (await http.post("/v1/chat/completions", json=body)).text
        whole = (await http.post("/v1/chat/completions", json=chat_body())).json()
    chunks: list[Any] = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["timings"].keys() == whole["timings"].keys()
    assert chunks[-1]["timings"]["predicted_n"] == whole["timings"]["predicted_n"] == 2
    assert (chunks[-1]["choices"] == []) == include_usage


async def test_each_part_of_a_generation_has_its_time() -> None:
    """The second one waits for the first one's lane; the parts of the prompt's time make up its whole."""
    async with toy_cluster(2, inline=True) as cluster, trio.open_nursery() as nursery:
        pool = LanePool(cluster.first, 1)
        nursery.start_soon(pool.serve)
        await pool.wait_ready()
        generator = ChainGenerator(cluster.first, pool, MODEL, fixed_chunks(4))
        held, began = trio.Event(), trio.current_time()
        seen: list[Timings] = []

        async def generate(hold: bool) -> None:
            async with generator.generate(GenerationRequest(prompt=range(1, 11), max_tokens=3)) as stream:
                async for _ in stream:
                    if hold:
                        held.set()
                        await trio.sleep(0.05)
                        hold = False
            seen.append(stream.timings)

        with trio.fail_after(20):
            async with trio.open_nursery() as both:
                both.start_soon(generate, True)
                await held.wait()
                both.start_soon(generate, False)
        whole = 1000 * (trio.current_time() - began)
        for timings in seen:
            assert (timings.cached_tokens, timings.prefill_tokens, timings.restore_ms) == (0, 9, 0)
            assert 0 < timings.prefill_ms <= timings.prompt_ms
            assert timings.queue_ms + timings.prompt_ms + timings.answer_ms <= whole
        assert seen[0].answer_ms >= 50
        assert seen[1].queue_ms >= 50 > seen[0].queue_ms
        nursery.cancel_scope.cancel()
