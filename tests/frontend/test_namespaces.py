"""Who shares cached prompts with whom: the API key and prompt_cache_key of a request decide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from skippy.frontend.namespaces import cache_namespace
from skippy.frontend.options import FrontendOptions
from skippy.stage import GenerationSettings
from skippy.stage.settings import parse_metadata

from .support import ScriptedGenerator, chat_body, client, completion_body, say

TEXTS = st.none() | st.text(max_size=8)


def meaning(text: str | None) -> str:
    return text if text and text.strip() else ""


def test_neither_key_is_the_common_namespace() -> None:
    assert {cache_namespace(*pair) for pair in [(None, None), ("", " "), ("\t", None)]} == {""}


def test_keys_that_differ_in_a_space_are_two_tenants() -> None:
    assert len({cache_namespace(None, key) for key in ("a", " a", "a ", "a\n")}) == 4


def test_a_namespace_stays_the_same_from_process_to_process() -> None:
    """Entries on disk outlive the process that made them."""
    assert cache_namespace("sk-1", "chat").startswith("ef34eb6ce736f85c")


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_equal_keys_and_only_those_share_one(a: str | None, b: str | None, c: str | None, d: str) -> None:
    same = (meaning(a), meaning(b)) == (meaning(c), meaning(d))
    assert (cache_namespace(a, b) == cache_namespace(c, d)) == same


@given(TEXTS, TEXTS)
def test_a_namespace_travels_in_the_settings(key: str | None, cache_key: str | None) -> None:
    settings = GenerationSettings(cache_namespace=cache_namespace(key, cache_key))
    assert parse_metadata(settings.to_metadata()) == settings


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_requests_are_given_their_namespace(path: str) -> None:
    generator = ScriptedGenerator(say("x"))

    async def ask(headers: dict[str, str], **more: Any) -> str:
        body = (chat_body if "chat" in path else completion_body)(**more)
        assert (await http.post(path, json=body, headers=headers)).status_code == 200
        return generator.requests[-1].namespace

    async with client(generator) as http:
        assert await ask({}) == await ask({}, prompt_cache_key=" ") == ""
        keyed = await ask({"authorization": "Bearer sk-1"})
        assert keyed == cache_namespace("sk-1", None) != ""
        assert await ask({"authorization": "bearer  sk-1"}) == keyed
        assert await ask({"api-key": "sk-1"}) == await ask({"x-api-key": "sk-1"}) == keyed
        assert await ask({"authorization": "Bearer sk-2"}) == cache_namespace("sk-2", None)
        assert await ask({"authorization": "Basic eDp5"}) == cache_namespace("Basic eDp5", None)
        assert await ask({"authorization": "Bearer sk-1"}, prompt_cache_key="k") == cache_namespace(
            "sk-1", "k"
        )
        assert await ask({}, prompt_cache_key="k") == cache_namespace(None, "k")


async def test_how_long_prompts_are_kept_is_not_for_the_client_to_say() -> None:
    """Longer than the process lives only where prompts are kept on disk."""
    for on_disk in (False, True):
        options = FrontendOptions(keeps_prompts_on_disk=on_disk)
        async with client(ScriptedGenerator(say("x")), options) as http:
            for value in ("in_memory", "24h", "48h"):
                right = value == "in_memory" or (value == "24h" and on_disk)
                body = chat_body(prompt_cache_retention=value)
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == (200 if right else 400), answer.text
                assert right or answer.json()["error"]["param"] == "prompt_cache_retention"
