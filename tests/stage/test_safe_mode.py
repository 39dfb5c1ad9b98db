"""Safe mode: one work at a time, in order of arrival."""

from __future__ import annotations

import pytest
import trio

from skippy.config import StageOptions
from skippy.frontend.generation import GenerationRequest
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.support.cluster import toy_cluster
from tests.support.iterations import bench


def test_safe_mode_runs_one_work_at_a_time_whole_in_order_of_arrival() -> None:
    b = bench(mixed_rows=64, safe=True)
    works = [b.work(0, 40), b.step_of(1), b.work(2, 600), *b.steps(3, 4)]
    assert b.run_all() == [[(0, 40)], [(1, 1)], [(2, 600)], [(3, 1)], [(4, 1)]]
    assert b.ended == works


@pytest.mark.parametrize("safe", [True, False])
async def test_safe_mode_is_reported(safe: bool) -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    answers: list[list[int]] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            async with (
                toy_cluster(2, telemetry=telemetry, options=StageOptions(safe_mode=safe)) as cluster,
                generator_over(cluster) as generator,
            ):
                assert [stage.context.scheduler.safe for stage in cluster.stages] == [safe, safe]

                async def ask() -> None:
                    answers.append(await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=6)))

                async with trio.open_nursery() as askers:
                    askers.start_soon(ask)
                    askers.start_soon(ask)
            nursery.cancel_scope.cancel()
    assert answers == [unsplit_tokens(PROMPT, 6)] * 2
    started = [event for event in sink.events if event.name == names.STAGE_SCHEDULER_START]
    assert [event.attributes["safe_mode"] for event in started] == [safe, safe]
