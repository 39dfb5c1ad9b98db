"""``/openapi.json`` says what the application has, and what the parsers ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import openapi_spec_validator
import pytest

from skippy.frontend.anthropic.requests import parse_count, parse_messages
from skippy.frontend.app import create_app
from skippy.frontend.embeddings import parse_embeddings
from skippy.frontend.fields import Fields
from skippy.frontend.openapi import ROUTES, openapi_document
from skippy.frontend.openapi.common import SAMPLING
from skippy.frontend.responses import dump
from skippy.frontend.responses_api.requests import parse_responses
from skippy.frontend.schemas import parse_chat, parse_completion
from skippy.frontend.tokenizing import parse_detokenize, parse_tokenize
from skippy.frontend.translation import ChatBody

from .support import ScriptedGenerator, client, say

SCHEMAS: dict[str, Any] = openapi_document()["components"]["schemas"]
FUNCTION = {"name": "f"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
JSON_SCHEMA = {"name": "s", "schema": {"type": "object"}}
FORMAT = {"type": "json_schema", "json_schema": JSON_SCHEMA}
IDENTITY = dict.fromkeys(
    ("model_id", "source_model_sha256", "tokenizer_id", "tokenizer_version", "serving_profile"), "x"
)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


PROMPT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", **EPHEMERAL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ],
    "thinking": {"type": "disabled"},
    "tools": [{"name": "f", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
}


def responses(body: bytes) -> object:
    return parse_responses(body).chat(())


REFUSAL = {"type": "refusal", "refusal": "No."}
ASSISTANT = {"role": "assistant", "content": [{"type": "text", "text": "a"}, REFUSAL], "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
CHAT = {"model": "m", "messages": [USER, ASSISTANT, RESULT], "tools": [TOOL]}
NAMED = {"type": "function", "function": {"name": "f"}}
ANSWERING = {"stream": True, "stream_options": {}, "dry": {}, "xtc": {}, "mirostat_mode": 2}
SAMPLES: list[tuple[str, Callable[[bytes], object], list[dict[str, Any]]]] = [
    (
        "Chat",
        parse_chat,
        [
            {**CHAT, **ANSWERING, "tool_choice": NAMED, "response_format": {"type": "text"}},
            {
                **CHAT,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
                "response_format": {"type": "json_object"},
            },
            {**CHAT, "response_format": FORMAT},
        ],
    ),
    (
        "Completion",
        parse_completion,
        [
            {"model": "m", "prompt": "p", "response_format": form, **ANSWERING}
            for form in ({"type": "text"}, {"type": "json_object"}, FORMAT)
        ],
    ),
    ("Embeddings", parse_embeddings, [{"model": "m", "input": "a"}]),
    ("Detokenize", parse_detokenize, [{"tokens": [1]}]),
    (
        "Tokenize",
        parse_tokenize,
        [{"content": "a"}, {"requests": [{"text": "a", "identity": IDENTITY}]}],
    ),
    (
        "Responses",
        responses,
        [
            {
                "model": "m",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"role": "assistant", "content": [REFUSAL]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                ],
                "stream": True,
                "stream_options": {},
                "mirostat_mode": 2,
                "dry": {},
                "xtc": {},
                "text": {"format": {"type": "json_schema", **JSON_SCHEMA}},
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "f"},
                "reasoning": {"effort": "low"},
            },
            {
                "model": "m",
                "input": "a",
                "text": {"format": {"type": "text"}},
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
        ],
    ),
    (
        "Messages",
        parse_messages,
        [{**PROMPT, "max_tokens": 1, "mirostat_mode": 2, "dry": {}, "xtc": {}, "metadata": {"user_id": "u"}}],
    ),
    ("CountTokens", parse_count, [PROMPT]),
]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref")
    return schema if name is None else resolved(SCHEMAS[name.rpartition("/")[2]])


def alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = resolved(schema)
    for one in schema.get("anyOf", ()):
        yield from alternatives(one)
    if "anyOf" not in schema:
        yield schema


def at(schema: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """The schemas of what is at ``place``."""
    found = list(alternatives(schema))
    for name in re.findall(r"\w+|\[", place.replace("]", "")):
        if name.isdigit():
            continue
        below = [one.get("items") if name == "[" else one.get("properties", {}).get(name) for one in found]
        found = [inner for one in below if one is not None for inner in alternatives(one)]
    yield from found


def records(schema: dict[str, Any]) -> Iterator[frozenset[str]]:
    """The names of the members of every object that ``schema`` has in it."""
    for one in alternatives(schema):
        if "items" in one:
            yield from records(one["items"])
        if one.get("additionalProperties") is False:
            yield frozenset(one["properties"])
            for inner in one["properties"].values():
                yield from records(inner)


@pytest.mark.parametrize(("name", "parse", "samples"), SAMPLES, ids=[name for name, *_ in SAMPLES])
def test_the_document_has_the_parameters_that_parsers_ask_for(
    name: str,
    parse: Callable[[bytes], object],
    samples: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, frozenset[str]]] = []
    refused: set[str] = set()

    def accept_only(fields: Fields, name: str, allowed: Any, reason: str) -> None:
        if not allowed:  # there is no value of it that is accepted
            refused.add(fields.path(name))
        genuine(fields, name, allowed, reason)

    def refuse_unknown(fields: Fields) -> None:
        known = frozenset(name for name in fields.known if fields.path(name) not in refused)
        asked.append((fields.place, known))

    genuine = Fields.accept_only
    monkeypatch.setattr(Fields, "accept_only", accept_only)
    monkeypatch.setattr(Fields, "refuse_unknown", refuse_unknown)
    monkeypatch.setattr(ChatBody, "read", lambda *_: None)  # chat's own parser has a turn of its own
    for sample in samples:
        parse(dump(sample))
    # Sampling is read by chat's parser, whoever asks.
    found = {frozenset(SAMPLING[name]["properties"]) for name in ("dry", "xtc")}
    for place, known in asked:
        here = [frozenset(one.get("properties", ())) for one in at(SCHEMAS[name], place)]
        nearest = min(here, key=lambda names: len(names ^ known))
        assert known == nearest, (place, "only in", {"parser": known - nearest, "document": nearest - known})
        found.add(known)
    assert found >= set(records(SCHEMAS[name])), "a sample is missing"


def test_it_is_valid_and_has_the_applications_routes() -> None:
    document = openapi_document()
    openapi_spec_validator.validate(document)
    app = create_app(ScriptedGenerator(say("x")))
    rules = {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        if not rule.websocket
        for method in rule.methods or ()
        if method not in ("HEAD", "OPTIONS")
    }
    # The page and its files are no part of the API.
    api = {(method, path) for method, path in rules if path != "/" and not path.startswith("/web/")}
    assert api == {(route.method, route.path) for route in ROUTES}


async def test_it_is_served() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.get("/openapi.json")
    assert answer.json() == openapi_document()
