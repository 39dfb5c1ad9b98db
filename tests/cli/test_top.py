"""``skippy top`` against a chain of toy stages, without a terminal and on one that is not there."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import click
import pytest
import trio
from click.testing import CliRunner, Result
from rich.console import Console

from skippy.cli.errors import CliError
from skippy.cli.top import EndpointGone, _follow, live_url, top, watch_chain
from skippy.cli.top_view import render
from skippy.config import AccessOptions
from skippy.frontend.options import FrontendOptions
from tests.frontend.support import MODEL, ScriptedGenerator, say, serving
from tests.frontend.test_inside import chain


async def run(*arguments: str, **environment: str) -> Result:
    """The command in a thread, as it waits for this process to answer."""
    invoke = functools.partial(
        CliRunner().invoke, top, list(arguments), env={"COLUMNS": "160", **environment}
    )
    return await trio.to_thread.run_sync(invoke)


def shown(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_one_table() -> None:
    async with chain() as (http, pool, generator), trio.open_nursery() as nursery:
        body = {"model": MODEL, "prompt": "a secret of mine", "max_tokens": 4, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        while pool.idle_lanes < 2:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(functools.partial(http.post, "/v1/completions", json={**body, "max_tokens": 3000}))
        while not generator.gate.running:
            await trio.lowlevel.checkpoint()
        result = await run("--url", f"{http.base_url}/v1")
        nursery.cancel_scope.cancel()
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line.strip()]
    assert lines[0][:3] == ["tokens/s", "running", "queue"]
    assert "1 of 2" in result.output
    assert [line[:2] for line in lines if line[0].startswith("stage-")] == [
        ["stage-0", "0:2"], ["stage-1", "2:4"], ["stage-2", "4:6"],
    ]  # fmt: skip
    assert "slowest: " in result.output
    states = [line[1] for line in lines if line[0].isdecimal() and len(line) in (2, 9)]
    assert len(states) == 2
    assert {"decode", "prefill"} & set(states)
    assert "last request: 17 tokens (0 cached), queue " in result.output
    assert "secret" not in result.output


async def test_json_is_what_the_endpoint_says() -> None:
    async with chain() as (http, _, _generator):
        result = await run("--url", str(http.base_url), "--json")
    snapshot = json.loads(result.output)
    assert (snapshot["object"], snapshot["running"]) == ("chain.status", 0)


async def test_a_key() -> None:
    options = FrontendOptions(access=AccessOptions(api_keys=["sk-1"]))
    async with serving(ScriptedGenerator(say("x")), options) as url:
        refused = await run("--url", url, "--once")
        assert refused.exit_code == 1
        assert "no API key was given" in refused.output
        for result in (
            await run("--url", url, "--api-key", "sk-1"),
            await run("--url", url, SKIPPY_API_KEY="sk-1"),
        ):
            assert result.exit_code == 0, result.output
        wrong = await run("--url", url, "--api-key", "sk\x01")
        assert (wrong.exit_code, "printable ASCII" in wrong.output) == (2, True)


async def test_what_is_no_endpoint() -> None:
    result = await run("--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "is `skippy run` serving there?" in result.output
    async with serving(ScriptedGenerator(say("x"))) as url:
        result = await run("--url", f"{url}/elsewhere")
    assert (result.exit_code, "HTTP 404" in result.output) == (1, True)


def test_urls() -> None:
    assert live_url("http://127.0.0.1:9337/v1") == "ws://127.0.0.1:9337/live"
    assert live_url("https://chain.example/v1/") == "wss://chain.example/live"
    for wrong in ("127.0.0.1:9337", "ftp://x", "http://", "", "http://x:0/", "http://x:port/", "http://[::1"):
        with pytest.raises(click.UsageError, match="is no URL of an endpoint"):
            live_url(wrong)


async def test_following_survives_a_server_that_goes_away(autojump_clock: trio.testing.MockClock) -> None:
    status = {**_snapshot(), "running": 1}
    calls = 0

    async def watch(show: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise EndpointGone("away")
        show(status)
        if calls == 3:
            done.set()
            await trio.sleep_forever()
        raise EndpointGone("the server is shutting down")

    done = trio.Event()
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_follow, watch, console, "http://x")
        await done.wait()
        nursery.cancel_scope.cancel()
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert written.index("1 of 2") < written.index("the server is shutting down") < written.index("away")
    assert trio.current_time() >= 3  # 1 s, then 2 s


async def test_following_begins_with_a_server_that_is_there() -> None:
    with pytest.raises(EndpointGone):
        await _follow(
            functools.partial(watch_chain, "ws://127.0.0.1:1/live", []), Console(file=io.StringIO()), "x"
        )


def _snapshot() -> dict[str, Any]:
    lane = {"id": None, "state": "connecting", "request_id": None}
    return {
        "object": "chain.status", "unready": None, "tokens_per_second": 0.0, "running": 0, "concurrency": 2,
        "queue_depth": 0, "queue_capacity": 16, "kv_tokens": 100, "reserved_kv_tokens": 0, "cache_lookups": 0,
        "cache_hits": 0, "stages": [], "lanes": [lane], "hops": None, "last": None, "times": [],
        "totals": {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0},
    }  # fmt: skip


def test_a_chain_that_is_not_ready() -> None:
    text = shown(render({**_snapshot(), "unready": "stage two sleeps"}))
    assert "stage two sleeps" in text
    assert "connecting" in text


def test_what_a_server_sends_steers_no_terminal_and_is_no_markup() -> None:
    evil = {**_snapshot()["lanes"][0], "state": "\x1b]0;x\x07[red]x[/red]\n"}
    text = shown(render({**_snapshot(), "lanes": [evil], "unready": "\x1b[2J[bold]"}, name="[i]\x9bn"))
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "[red]x[/red]" in text
    assert "[bold]" in text


@pytest.mark.parametrize(
    "wrong", [{"lanes": 5}, {"stages": [{}]}, {"totals": None}, {"tokens_per_second": "x"}]
)
def test_what_is_no_status(wrong: dict[str, Any]) -> None:
    with pytest.raises(CliError, match="no status of a chain"):
        render({**_snapshot(), **wrong})
