"""What stages tell of their prefix caches: all of a chain in one answer, and no more than fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from skippy.frontend.prefill import send_settings
from skippy.protocol import MAX_ANNEX_REPORT_BYTES, ReplyAnnex
from skippy.stage import GenerationSettings
from skippy.stage.reports import cache_report, parse_reports, report_annex
from tests.frontend.test_restoring import caching_chain, request, settled
from tests.stage.test_chain import PROMPT
from tests.support.cached import cache_of, cached_cluster, complete
from tests.support.driver import driver_of


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_every_stage_is_in_the_report(stages: int) -> None:
    async with caching_chain(stages) as chain:
        await chain.generate(request(PROMPT))
        cache = chain.cluster.stages[-1].context.cache
        assert cache is not None
        cache.index.counters.errors = 7
        await settled(chain, 2)
        report = await chain.generator.cache_report()
        assert report["missing"] is None
        assert [stage["stage_index"] for stage in report["stages"]] == [*range(stages)]
        held = [[entry["tokens"] for entry in stage["entries"]] for stage in report["stages"]]
        assert held == [[len(PROMPT) + 11]] * stages
        assert [stage["counters"]["errors"] for stage in report["stages"]] == [0] * (stages - 1) + [7]
        writers = [stage["states"]["writer"] for stage in report["stages"]]
        assert writers == [{"stored": 0, "dropped": 0, "failed": 0}] * stages
        await settled(chain, 2)
        assert report["stages"] == [cache_report(stage.context) for stage in chain.cluster.stages]


async def test_files_and_memory_are_counted(tmp_path: Path) -> None:
    kv = {"directory": str(tmp_path)}
    with trio.fail_after(20):
        async with cached_cluster(1, kv=kv, inline=True) as cluster, driver_of(cluster) as driver:
            await complete(driver, PROMPT, 3)
            states = cache_of(cluster, 0).states
            assert states is not None
            await states.write_out()
            report = cache_report(cluster.first.context)
            assert report["states"]["files"]["written"] == report["states"]["writer"]["stored"] == 1
            assert report["states"]["memory"]["states"] == 0
            assert report["entries"][0]["state_bytes"] > 0


async def test_a_busy_chain_is_reported_without_the_others(autojump_clock: trio.abc.Clock) -> None:
    async with caching_chain(2, lanes=1) as chain:
        async with chain.generator.generate(request(PROMPT, 500)) as stream:
            await anext(stream)
            report = await chain.generator.cache_report()
            assert [stage["stage_index"] for stage in report["stages"]] == [0]
            assert "no lane was free" in report["missing"]
        assert (await chain.generator.cache_report())["missing"] is None


async def test_no_more_than_fits_and_every_stage_has_room() -> None:
    """Of many entries the youngest are told; each stage of a long chain has its share."""
    with trio.fail_after(20):
        kv = {"max_entries": 512, "extra_sequences": 250}
        async with cached_cluster(1, kv=kv, inline=True) as cluster:
            cache, context = cache_of(cluster, 0), cluster.first.context
            while (sequence := cache.scheduler.take_sequence()) is not None:
                path = range(sequence, sequence + 9)
                assert cache.index.add("ab" * 32, path, sequence=sequence, live=True) is not None
            annex: ReplyAnnex | None = None
            for index in range(5, 0, -1):
                stage: Any = SimpleNamespace(stage_index=index, cache=cache)
                annex = report_annex(stage, annex)
            assert annex is not None
            assert annex.report is not None
            assert len(annex.report.encode()) <= MAX_ANNEX_REPORT_BYTES
            reports, whole = parse_reports(annex), cache_report(context)["entries"]
            assert len(whole) > 200
            assert [report["stage_index"] for report in reports] == [1, 2, 3, 4, 5]
            for report in reports:
                told = report["entries"]
                assert len(told) >= 20
                assert told == whole[-len(told) :]
                assert report["entries_left_out"] == len(whole) - len(told)


async def test_who_does_not_ask_is_told_nothing() -> None:
    async with caching_chain(2) as chain:
        pooled = chain.generator._pool.take()
        assert pooled is not None
        pooled.request = (1, 2)
        place = await send_settings(pooled, GenerationSettings())
        await place.wait()
        assert place.annex is None
        pooled.give_back()


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[" * 40_000, "[1]", "{}", '{"stage_index": "1"}', '{"stage_index": 1', "\n\n"]
)
def test_what_is_no_report_is_left_out(text: str) -> None:
    good = '{"stage_index":2,"enabled":false}'
    assert parse_reports(ReplyAnnex(report=f"{text}\n{good}")) == [{"stage_index": 2, "enabled": False}]
    assert parse_reports(None) == []
