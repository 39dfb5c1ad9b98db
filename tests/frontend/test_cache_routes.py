"""``/kv``: who may ask what."""

from __future__ import annotations

import httpx
import pytest

from skippy.frontend.generation import ChainUnavailable

from .support import ScriptedGenerator, client, say


async def test_the_report_is_the_generators() -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        answer = await http.get("/kv")
    assert answer.status_code == 200
    assert answer.json() == await generator.cache_report()


@pytest.mark.parametrize(
    ("query", "namespace"),
    [("", "all"), ("?namespace=all", "all"), ("?namespace=common", "common"), ("?namespace=0a1f", "0a1f")],
)
async def test_what_is_to_be_forgotten(query: str, namespace: str) -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        answer = await http.delete(f"/kv{query}")
    assert (answer.status_code, answer.json()["dropped"]) == (200, 7)
    assert generator.dropped == [namespace]


@pytest.mark.parametrize("namespace", ["", "ALL", "xyz", "0A", "a" * 65, "0a*"])
async def test_what_is_no_namespace_is_refused_by_name(namespace: str) -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        answer = await http.delete("/kv", params={"namespace": namespace})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "namespace"
    assert generator.dropped == []


@pytest.mark.parametrize(
    ("query", "param"), [("namspace=0a", "namspace"), ("namespace=0a&namespace=0b", "namespace"), ("x", "x")]
)
async def test_a_slip_in_the_query_does_not_have_everything_forgotten(query: str, param: str) -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        answer = await http.delete(f"/kv?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert generator.dropped == []


async def test_a_chain_that_cannot_be_told() -> None:
    generator = ScriptedGenerator(say("x"))
    generator.entry_error = ChainUnavailable("stage 1 is away")
    async with client(generator) as http:
        answer = await http.delete("/kv")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "stage 1 is away"


async def test_only_a_method_that_other_origins_must_ask_for_forgets_anything() -> None:
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        post: httpx.Response = await http.post("/kv", data={"namespace": "all"})
    assert (post.status_code, post.headers["allow"]) == (405, "DELETE, GET, HEAD, OPTIONS")
    assert generator.dropped == []
