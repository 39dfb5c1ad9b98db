"""Trace points by the names that dashboards know, and what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from skippy.frontend.generation import GenerationRequest
from skippy.protocol import MessageKind
from skippy.stage import Lane, LaneLost
from skippy.stage.iterations import Iterations
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.support.cluster import Cluster, toy_cluster
from tests.support.driver import driver_of

LAST = len(PROMPT) - 1


@asynccontextmanager
async def traced_cluster(stages: int) -> AsyncIterator[tuple[Cluster, MemorySink]]:
    """Everything that has happened is in the sink when the block has been left."""
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            async with toy_cluster(stages, telemetry=telemetry) as cluster:
                yield cluster, sink
            nursery.cancel_scope.cancel()


def attributes(sink: MemorySink, name: str) -> list[dict[str, Any]]:
    return [dict(event.attributes) for event in sink.events if event.name == name]


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_generation(stages: int) -> None:
    async with (
        traced_cluster(stages) as (cluster, sink),
        generator_over(cluster, lanes=1, chunk=20) as generator,
    ):
        request = GenerationRequest(prompt=PROMPT, max_tokens=6)
        assert await generate(generator, request) == unsplit_tokens(PROMPT, 6)
    iterations = attributes(sink, names.STAGE_SCHEDULER_ITERATION)
    assert sum(each["prefill_tokens"] for each in iterations) == stages * LAST
    assert sum(each["decode_tokens"] for each in iterations) == stages * 6
    assert {(each["running"], each["waiting"]) for each in iterations} == {(1, 0)}
    # Each step of stage 0 has a name of its own; what prefill computes there is in that of the stages.
    assert len(attributes(sink, names.STAGE_OPENAI_STAGE0_LLAMA_DECODE)) == 6
    kinds = Counter(each["message_kind"] for each in attributes(sink, names.STAGE_BINARY_LLAMA_DECODE))
    assert kinds == Counter(PREFILL_EMBD=3 * stages, DECODE_EMBD=6 * (stages - 1))
    assert len(attributes(sink, names.STAGE_EMBEDDED_RUNTIME_READY)) == stages
    (summary,) = attributes(sink, names.STAGE_OPENAI_GENERATION_SUMMARY)
    counts = ("prompt_token_count", "completion_token_count", "prefill_tokens", "cached_tokens")
    assert [summary[name] for name in counts] == [len(PROMPT), 6, LAST, 0]
    assert (summary["finish_reason"], summary["replay_count"]) == ("length", 0)
    assert summary["prompt_ms"] > 0
    assert not attributes(sink, names.STAGE_OPENAI_DOWNSTREAM_LANE_RETURN_FAILED)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_a_rewind(stages: int) -> None:
    line = unsplit_tokens(PROMPT, 4)
    async with traced_cluster(stages) as (cluster, sink), driver_of(cluster) as driver:
        await driver.start(PROMPT)
        for step, token in enumerate([PROMPT[-1], *line[:2]]):
            assert await driver.decode(LAST + step, token) == line[step]
        await driver.verify(1, LAST + 3, [line[2], 33, 33])  # one right token, two that are undone
        await driver.reply()
        assert await driver.decode(LAST + 1, line[0]) == line[1]
        await driver.ask(MessageKind.STOP)
    rewound = [{"before_token_count": LAST + 6, "after_token_count": LAST + 1}]
    assert attributes(sink, names.STAGE_OPENAI_SESSION_AUTO_ALIGN) == rewound
    assert attributes(sink, names.STAGE_BINARY_SESSION_AUTO_ALIGN) == rewound * (stages - 1)


async def test_a_lane_that_cannot_be_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(lane: Lane) -> None:
        lane.fail(LaneLost("the wire has been cut"))
        raise LaneLost("the wire has been cut")

    monkeypatch.setattr(Lane, "wait_settled", lose)
    async with traced_cluster(2) as (cluster, sink), generator_over(cluster, lanes=1) as generator:
        await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=2))
        while not attributes(sink, names.STAGE_OPENAI_DOWNSTREAM_LANE_REPLACED):
            await trio.lowlevel.checkpoint()
    (failed,) = attributes(sink, names.STAGE_OPENAI_DOWNSTREAM_LANE_RETURN_FAILED)
    assert failed["error"] == "the wire has been cut"


async def test_a_fault_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Iterations, "step", Mock(side_effect=AssertionError("a bug")))
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            with pytest.RaisesGroup(AssertionError, flatten_subgroups=True, allow_unwrapped=True):
                async with toy_cluster(1, telemetry=telemetry) as cluster, driver_of(cluster) as driver:
                    await driver.ask(MessageKind.CONFIGURE_GENERATION)
                    await driver.send(MessageKind.PREFILL_EMBD, 0, PROMPT[:-1])
                    await trio.sleep_forever()
            nursery.cancel_scope.cancel()
    assert [each["failure_contained"] for each in attributes(sink, names.STAGE_SCHEDULER_WORKER_PANIC)] == [
        False
    ]
