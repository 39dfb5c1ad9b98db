"""Looking inside and ending requests: ``/slots``, ``/metrics``, ``DELETE /v1/requests/{id}``."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from skippy.config import AccessOptions, KvCacheConfig
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.frontend.options import FrontendOptions
from tests.support.cluster import fixed_chunks, toy_cluster

from .support import MODEL, ScriptedGenerator, bearer, chat_body, client, completion_body, say, serving

CHAT = "/v1/chat/completions"
KEYS = ("sk-first", "sk-second")


def endless(*_: Any) -> Any:
    """A script that says one token and then waits for ever."""
    return [ord("a"), trio.Event()]


async def wait_running(generator: ScriptedGenerator, count: int = 1) -> None:
    while generator.active < count:
        await trio.lowlevel.checkpoint()


@contextlib.asynccontextmanager
async def chain(lanes: int = 2) -> AsyncIterator[tuple[httpx.AsyncClient, LanePool, ChainGenerator]]:
    """An endpoint on a chain of three toy stages with prefix caches."""
    config = KvCacheConfig(mode="lookup-record", min_tokens=8)
    with trio.fail_after(60):
        async with (
            toy_cluster(3, inline=True, lane_count=lanes, ctx_size=4096, kv_cache=config) as cluster,
            trio.open_nursery() as nursery,
        ):
            pool = LanePool(cluster.first, lanes)
            nursery.start_soon(pool.serve)
            while pool.connected < lanes:
                await trio.lowlevel.checkpoint()
            generator = ChainGenerator(cluster.first, pool, MODEL, fixed_chunks(8))
            async with (
                serving(generator) as url,  # type: ignore[arg-type]
                httpx.AsyncClient(base_url=url, timeout=30) as http,
            ):
                yield http, pool, generator
            nursery.cancel_scope.cancel()


async def wait_idle(pool: LanePool) -> None:
    while pool.idle_lanes < pool.size:
        await trio.lowlevel.checkpoint()


# -- cancelling ----------------------------------------------------------------------------------------


async def test_a_stream_that_is_cancelled_ends_with_an_error_frame() -> None:
    generator = ScriptedGenerator(endless)
    lines: list[str] = []
    async with client(generator) as http, trio.open_nursery() as nursery:
        given = str(uuid.uuid4())

        async def read() -> None:
            headers = {"x-request-id": given}
            async with http.stream("POST", CHAT, json=chat_body(stream=True), headers=headers) as answer:
                assert answer.headers["x-request-id"] == given
                lines.extend([line async for line in answer.aiter_lines()])

        nursery.start_soon(read)
        await wait_running(generator)
        answer = await http.delete(f"/v1/requests/{given.upper()}")
        assert (answer.status_code, answer.json()["cancelled"]) == (200, True)
        await generator.idle.wait()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "cancelled"


async def test_an_answer_that_is_cancelled_has_a_status_that_no_client_retries() -> None:
    generator = ScriptedGenerator(endless)
    async with client(generator) as http, trio.open_nursery() as nursery:
        given = str(uuid.uuid4())
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await http.post(CHAT, json=chat_body(), headers={"x-request-id": given}))

        nursery.start_soon(ask)
        await wait_running(generator)
        assert (await http.delete(f"/v1/requests/{given}")).status_code == 200
        await generator.idle.wait()
    assert answers[0].status_code == 499
    assert answers[0].json()["error"]["code"] == "cancelled"


@pytest.mark.parametrize("request_id", [str(uuid.UUID(int=7)), "x", "%00", "a" * 1000])
async def test_a_request_that_does_not_run_cannot_be_cancelled(request_id: str) -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.delete(f"/v1/requests/{request_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
        done = await http.post(CHAT, json=chat_body())
        answer = await http.delete(f"/v1/requests/{done.headers['x-request-id']}")
        assert answer.status_code == 404


async def test_a_key_cancels_only_its_own_requests() -> None:
    generator = ScriptedGenerator(endless)
    options = FrontendOptions(access=AccessOptions(api_keys=KEYS))
    async with client(generator, options) as http, trio.open_nursery() as nursery:
        given = str(uuid.uuid4())

        async def ask(key: str) -> None:
            headers = {"x-request-id": given, **bearer(key)}
            statuses[key] = (await http.post(CHAT, json=chat_body(), headers=headers)).status_code

        statuses: dict[str, int] = {}
        nursery.start_soon(ask, KEYS[0])
        await wait_running(generator)
        for headers, status in (({}, 401), (bearer("sk-wrong"), 401), (bearer(KEYS[1]), 404)):
            assert (await http.delete(f"/v1/requests/{given}", headers=headers)).status_code == status
        assert generator.active == 1
        # Nor where two have chosen the same id.
        nursery.start_soon(ask, KEYS[1])
        await wait_running(generator, 2)
        assert (await http.delete(f"/v1/requests/{given}", headers=bearer(KEYS[1]))).status_code == 200
        while not statuses:
            await trio.lowlevel.checkpoint()
        assert statuses == {KEYS[1]: 499}
        assert generator.active == 1
        assert (await http.delete(f"/v1/requests/{given}", headers=bearer(KEYS[0]))).status_code == 200
    assert statuses == dict.fromkeys(KEYS, 499)


async def test_cancelling_frees_the_lane_of_a_chain() -> None:
    """And one that waits for a lane gives up its place."""
    async with chain(lanes=1) as (http, pool, generator), trio.open_nursery() as nursery:
        ids = [str(uuid.uuid4()) for _ in range(2)]
        statuses: dict[str, int] = {}

        async def ask(given: str) -> None:
            body = completion_body("hello", max_tokens=4000, temperature=0, ignore_eos=True)
            answer = await http.post("/v1/completions", json=body, headers={"x-request-id": given})
            statuses[given] = answer.status_code

        nursery.start_soon(ask, ids[0])
        while not generator.status().totals.generated_tokens:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(ask, ids[1])
        while generator.gate.queue_depth < 1:
            await trio.lowlevel.checkpoint()
        assert [lane["request_id"] for lane in (await http.get("/slots")).json()["data"]] == [ids[0]]
        for given in reversed(ids):
            before = generator.status().totals.generated_tokens
            assert (await http.delete(f"/v1/requests/{given}")).status_code == 200
        await wait_idle(pool)
        # What was under way when it was cancelled may still have come.
        assert generator.status().totals.generated_tokens - before <= 16
    assert statuses == dict.fromkeys(ids, 499)


# -- lanes ---------------------------------------------------------------------------------------------


async def test_the_lane_table_shows_what_runs_and_no_text() -> None:
    async with chain() as (http, _, generator), trio.open_nursery() as nursery:
        given = str(uuid.uuid4())
        body = completion_body("a secret prompt of its own", max_tokens=3000, temperature=0, ignore_eos=True)

        async def ask() -> None:
            await http.post("/v1/completions", json=body, headers={"x-request-id": given})

        idle = (await http.get("/slots")).json()
        assert [(lane["object"], lane["state"]) for lane in idle["data"]] == [("slot", "idle")] * 2
        nursery.start_soon(ask)
        while generator.status().totals.generated_tokens < 3:
            await trio.lowlevel.checkpoint()
        answer = await http.get("/slots")
        assert "secret" not in answer.text
        table = answer.json()
        assert sorted(lane["state"] for lane in table["data"]) == ["decode", "idle"]
        (lane,) = [lane for lane in table["data"] if lane["state"] == "decode"]
        assert lane["request_id"] == given
        assert (lane["max_tokens"], lane["cached_tokens"]) == (3000, 0)
        assert lane["prompt_tokens"] == len("a secret prompt of its own") + 1
        assert 3 <= lane["generated_tokens"] <= 3000
        assert lane["tokens_per_second"] > 0
        assert (table["running"], table["queue_depth"], table["concurrency"]) == (1, 0, 2)
        assert table["reserved_kv_tokens"] == lane["prompt_tokens"] + 3000
        nursery.cancel_scope.cancel()


async def test_lanes_that_are_not_connected_are_rows_too() -> None:
    async with toy_cluster(2, inline=True, lane_count=3) as cluster:
        generator = ChainGenerator(cluster.first, LanePool(cluster.first, 3), MODEL)
        status = generator.status()
    assert [lane.state for lane in status.lanes] == ["connecting"] * 3
    assert status.unready is not None
    assert [(s.stage_id, s.layer_start, s.layer_end) for s in status.stages] == [
        ("stage-0", 0, 3), ("stage-1", 3, 6),
    ]  # fmt: skip


# -- metrics -------------------------------------------------------------------------------------------


async def scrape(http: httpx.AsyncClient, **headers: str) -> dict[str, float]:
    answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_metrics_of_a_chain() -> None:
    async with chain() as (http, pool, _):
        before = await scrape(http)
        assert (before["skippy_ready"], before["skippy_stages"], before["skippy_lanes[idle]"]) == (1, 3, 2)
        assert before["skippy_generated_tokens_total"] == before["skippy_inter_token_seconds_count"] == 0
        body = completion_body("the quick brown fox jumps over", max_tokens=9, temperature=0, ignore_eos=True)
        prompt = 0
        for stream in (False, True):
            answer = await http.post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 200
            prompt = prompt or answer.json()["usage"]["prompt_tokens"]
            await wait_idle(pool)
        after = await scrape(http)
        route = "[/v1/completions]"
        assert after[f"skippy_requests_total[completed]{route}"] == 2
        assert after[f"skippy_http_responses_total{route}[200]"] == 2
        assert after["skippy_http_responses_total[/metrics][200]"] == 1
        assert after["skippy_generations_total"] == 2
        assert after["skippy_prompt_tokens_total"] == 2 * prompt
        assert after["skippy_cached_prompt_tokens_total"] > 0
        assert after["skippy_cache_hits_total"] == 3  # one for each stage
        assert after["skippy_generated_tokens_total"] == 18
        for name, count in (
            ("time_to_first_token", 2), ("request_duration", 2), ("queue_wait", 2), ("inter_token", 16),
        ):  # fmt: skip
            assert after[f"skippy_{name}_seconds_count"] == count, name
            assert after[f"skippy_{name}_seconds_bucket[+Inf]"] == count, name
            assert 0 <= after[f"skippy_{name}_seconds_sum"] < 60, name
        assert after["skippy_kv_tokens"] == 2 * 4096
        assert after["skippy_reserved_kv_tokens"] == after["skippy_running_generations"] == 0


async def test_labels_do_not_grow_with_what_is_asked() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        for path in ("/v1/models/a", "/v1/models/b", "/nowhere/a", "/nowhere/b"):
            assert (await http.get(path)).status_code == 404
        for method, path in (("PUT", "/v1/models/a"), ("GET", "/v1/requests/a"), ("GET", "/v1/completions")):
            assert (await http.request(method, path)).status_code == 405
        metrics = await scrape(http)
    responses = {name: value for name, value in metrics.items() if name.startswith("skippy_http")}
    assert {name: value for name, value in responses.items() if "_created" not in name} == {
        "skippy_http_responses_total[/v1/models/<path:model_id>][404]": 2,
        "skippy_http_responses_total[/v1/models/<path:model_id>][405]": 1,
        "skippy_http_responses_total[/v1/requests/<request_id>][405]": 1,
        "skippy_http_responses_total[/v1/completions][405]": 1,
        "skippy_http_responses_total[][404]": 2,
    }


async def test_two_applications_have_metrics_of_their_own() -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as one, client(ScriptedGenerator(say("x"))) as other:
        assert (await one.post(CHAT, json=chat_body())).status_code == 200
        name = f"skippy_requests_total[completed][{CHAT}]"
        assert (await scrape(one))[name] == 1
        assert name not in await scrape(other)


async def test_how_requests_ended_is_counted() -> None:
    generator = ScriptedGenerator(lambda request: [ord("a"), ValueError("a fault")])
    async with client(generator) as http:
        assert (await http.post(CHAT, json=chat_body())).status_code == 500
        generator.script = endless
        async with http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
            assert answer.status_code == 200
        await generator.idle.wait()
        metrics = await scrape(http)
    assert metrics[f"skippy_requests_total[failed][{CHAT}]"] == 1
    assert metrics[f"skippy_requests_total[cancelled][{CHAT}]"] == 1


async def test_openmetrics_where_the_scraper_takes_it() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        plain = await http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        modern = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.text.endswith("# EOF\n")


async def test_with_keys_looking_inside_takes_one() -> None:
    options = FrontendOptions(access=AccessOptions(api_keys=KEYS))
    async with client(ScriptedGenerator(say("x")), options) as http:
        for path in ("/slots", "/metrics"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=bearer(KEYS[1]))).status_code == 200
