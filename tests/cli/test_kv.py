"""``skippy kv`` against a chain of toy stages, and against what is no such endpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import trio
from click.testing import CliRunner, Result

from skippy.cli import kv_flags
from skippy.cli.kv import kv, table
from skippy.config import ConfigError, KvCacheConfig
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from tests.frontend.support import MODEL, ScriptedGenerator, say, serving
from tests.support.cluster import fixed_chunks, toy_cluster

PROMPT = "the quick brown fox jumps over the lazy dog"


async def run(*arguments: str) -> Result:
    """The command in a thread, as it waits for this process to answer."""
    return await trio.to_thread.run_sync(lambda: CliRunner().invoke(kv, list(arguments)))


@contextlib.asynccontextmanager
async def endpoint(config: KvCacheConfig | None) -> AsyncIterator[tuple[str, LanePool]]:
    """The base URL of a chain of two."""
    async with (
        toy_cluster(2, inline=True, lane_count=4, kv_cache=config) as cluster,
        trio.open_nursery() as nursery,
    ):
        pool = LanePool(cluster.first, 4)
        nursery.start_soon(pool.serve)
        await pool.wait_ready()
        generator: Any = ChainGenerator(cluster.first, pool, MODEL, fixed_chunks(8))
        async with serving(generator) as url:
            yield url, pool
        nursery.cancel_scope.cancel()


async def complete(url: str, pool: LanePool, **more: Any) -> Any:
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, **more}
        answer = await http.post("/v1/completions", json=body)
    while pool.idle_lanes < 4:
        await trio.lowlevel.checkpoint()
    return answer.json()


async def test_looking_inside_and_forgetting() -> None:
    config = KvCacheConfig(mode="lookup-record", min_tokens=8)
    with trio.fail_after(60):
        async with endpoint(config) as (url, pool):
            for key in (None, "one", "two"):
                usage = (await complete(url, pool, prompt_cache_key=key))["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            held = usage["total_tokens"] - 1  # the last one was never computed
            listed = (await run("ls", "--url", f"{url}/v1")).output.splitlines()
            title = "stage namespace tokens held in state used refs chunks alone"
            assert listed[0].split() == title.split()
            rows = [line.split() for line in listed[1:]]
            assert [(row[0], row[2]) for row in rows] == [(s, str(held)) for s in "000111"]
            assert rows[0][1] == rows[3][1] == "common"
            namespaces = [row[1] for row in rows[1:3]]
            assert namespaces == [row[1] for row in rows[4:]]
            assert len({*namespaces}) == 2
            assert all(len(name) == 16 for name in namespaces)

            stats = (await run("stats", "--url", url)).output
            for index in range(2):
                assert f"stage {index}: holds.entries: 3\n" in stats
                assert f"stage {index}: settings.min_tokens: 8\n" in stats
                assert f"stage {index}: states.writer.stored: 0\n" in stats
                assert f"stage {index}: states.memory.states: 0\n" in stats
            assert "chain: lookup_hits: 0\n" in stats
            assert "stage 0: counters.misses: 3\n" in stats
            assert "stage 0: activations.misses: 0\n" in stats
            whole = json.loads((await run("ls", "--json", "--url", url)).output)
            assert [[e["tokens"] for e in stage["entries"]] for stage in whole["stages"]] == [[held] * 3] * 2
            for stage in json.loads((await run("stats", "--json", "--url", url)).output)["stages"]:
                assert "entries" not in stage

            dropped = await run("drop", "--namespace", namespaces[0][:6], "--url", url)
            assert (dropped.exit_code, dropped.output) == (
                0,
                "forgotten on every stage; on stage 0 1 entries\n",
            )
            assert len((await run("ls", "--url", url)).output.splitlines()) == 5
            for key, known in ((None, True), ("one", False), ("two", True)):
                cached = (await complete(url, pool, prompt_cache_key=key))["usage"]["prompt_tokens_details"]
                assert (cached["cached_tokens"] > 0) == known, key
            await run("drop", "--all", "--url", url)
            assert len((await run("ls", "--url", url)).output.splitlines()) == 1


async def test_a_cache_that_is_off() -> None:
    with trio.fail_after(60):
        async with endpoint(None) as (url, pool):
            await complete(url, pool)
            assert (await run("ls", "--url", url)).output == "the prefix cache is off\n"
            assert (await run("stats", "--url", url)).output == "the prefix cache is off\n"
            assert (await run("drop", "--all", "--url", url)).exit_code == 0


@pytest.mark.parametrize("arguments", [(), ("--all", "--namespace", "ab")])
async def test_what_to_forget_has_to_be_said(arguments: tuple[str, ...]) -> None:
    outcome = await run("drop", *arguments)
    assert outcome.exit_code == 2
    assert "give either --all or --namespace DIGITS" in outcome.output


async def test_errors_of_the_endpoint_are_shown() -> None:
    async with serving(ScriptedGenerator(say("x"))) as url:
        refused = await run("drop", "--namespace", "Z", "--url", url)
        assert refused.exit_code == 1
        assert "'all', 'common' or the first digits" in refused.output
        odd = await run("stats", "--json", "--url", f"{url}/health")
        assert odd.exit_code == 1
        assert "there is nothing at GET /health/kv (HTTP 404)" in odd.output
    nobody = await run("ls", "--url", url)
    assert nobody.exit_code == 1
    assert "is `skippy run` serving there?" in nobody.output


def test_columns_stand_below_each_other() -> None:
    assert list(table([("a", "bb"), ("ccc", "d")])) == ["a    bb", "ccc  d"]


def test_the_options_of_run() -> None:
    nothing: dict[str, Any] = dict.fromkeys(kv_flags.OPTIONS)
    assert kv_flags.kv_cache(values := {**nothing, "other": 1}) is None
    assert values == {"other": 1}
    given = {**nothing, "kv_cache": "record", "kv_dir": "/x", "kv_audit_rate": 0.5, "kv_max_entries": 0}
    assert kv_flags.kv_cache(given) == KvCacheConfig(
        mode="record", directory="/x", audit_rate=0.5, max_entries=0
    )
    for wrong, text in (
        ({"kv_audit_rate": 2.0}, "--kv-audit-rate: audit_rate: is 2.0, must be 0 to 1"),
        ({"kv_audit_rate": float("nan")}, "--kv-audit-rate: audit_rate: is nan, must be 0 to 1"),
        ({"kv_dir": ""}, "--kv-dir: directory: must not be empty"),
        ({"kv_max_bytes": 2**63}, f"--kv-max-bytes: max_bytes: is {2**63}, must be 0 to {2**63 - 1}"),
    ):
        with pytest.raises(ConfigError) as caught:
            kv_flags.kv_cache({**nothing, "kv_cache": "record", **wrong})
        assert str(caught.value) == text
