"""Calls that must be made, on chains of toy stages: official client, and LangChain's chat model."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
import trio

from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool

from ...support.cluster import fixed_chunks, toy_cluster
from ..support import MODEL, serving

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]
ASK: Any = [{"role": "user", "content": "Weather?"}]


@asynccontextmanager
async def chain(stages: int) -> AsyncIterator[str]:
    """An endpoint on a chain of toy stages: its URL."""
    with trio.fail_after(120):
        async with (
            toy_cluster(stages, inline=True, lane_count=2, ctx_size=4096) as cluster,
            trio.open_nursery() as nursery,
        ):
            pool = LanePool(cluster.first, 2)
            nursery.start_soon(pool.serve)
            while pool.connected < 2:
                await trio.lowlevel.checkpoint()
            async with serving(ChainGenerator(cluster.first, pool, MODEL, fixed_chunks(256))) as url:  # type: ignore[arg-type]
                yield url
            nursery.cancel_scope.cancel()


def check_call(name: str, arguments: dict[str, Any], allowed: tuple[str, ...]) -> None:
    assert name in allowed
    assert arguments.keys() == {"unit", "days"}
    assert arguments["unit"] in ("C", "F")
    assert 1 <= arguments["days"] <= 99


@pytest.mark.parametrize("stages", [1, 3])
async def test_calls_that_must_be_made(stages: int) -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    choices: list[tuple[Any, tuple[str, ...]]] = [
        ("required", ("weather", "forecast")),
        (named, ("forecast",)),
    ]
    async with (
        chain(stages) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        for seed, (choice, allowed) in enumerate(choices):
            more: Any = {
                "model": MODEL,
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": choice,
                "parallel_tool_calls": False,
                "temperature": 1,
                "seed": seed,
            }
            whole = (await client.chat.completions.create(**more)).choices[0]
            assert whole.finish_reason == "tool_calls"
            (call,) = whole.message.tool_calls or ()
            assert call.type == "function"
            check_call(call.function.name, json.loads(call.function.arguments), allowed)
            async with client.chat.completions.stream(**more) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            assert streamed.finish_reason == "tool_calls"
            # The same seed and a fixed composition: the same call.
            (same,) = streamed.message.tool_calls or ()
            assert same.function == call.function or same.function.arguments == call.function.arguments


async def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    broken = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}

    def tools(parameters: Any, **more: Any) -> Any:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]

    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"tools": tools(wrong), "tool_choice": "required"},
            "tools[0].function.parameters.properties.a.not",
        ),
        ({"tools": tools(wrong, strict=True)}, "tools[0].function.parameters.properties.a.not"),
        ({"tools": tools({"type": "array"}, strict=True)}, "tools[0].function.parameters.type"),
        ({"tools": tools(broken), "tool_choice": "required"}, "tool_choice"),
        ({"tools": tools(broken, strict=True)}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ]
    async with (
        chain(1) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        for body, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model=MODEL, messages=ASK, extra_body=body)
            assert str(caught.value.param).startswith(param), body
        # A tool that binds nothing takes any schema.
        fine = await client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=4, extra_body={"tools": tools(wrong)}
        )
        assert fine.choices[0].finish_reason in ("stop", "length")


async def test_strict_tools_bind_answers_that_may_be_anything() -> None:
    """An answer is text, or fits the schema of the tool; with a form for text, it is that."""
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9}}}
    async with (
        chain(1) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        for seed in range(6):
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=ASK,
                max_tokens=200,
                seed=seed,
                extra_body={"tools": strict, "response_format": form, "parallel_tool_calls": False},
            )
            choice = answer.choices[0]
            if choice.finish_reason == "tool_calls":
                (call,) = choice.message.tool_calls or ()
                assert call.type == "function"
                check_call(call.function.name, json.loads(call.function.arguments), ("weather",))
            elif choice.finish_reason == "stop":
                assert int(choice.message.content or "") <= 9


def weather(unit: Literal["C", "F"]) -> str:
    """Tell the weather."""
    return f"20 {unit}"


def forecast(unit: Literal["C", "F"]) -> str:
    """Tell what comes."""
    return f"21 {unit}"


def talk_with_langchain(url: str) -> None:
    """Bind tools, call them, and go on with their results, whole and streamed."""
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, temperature=1, seed=1
    )  # type: ignore[call-arg,arg-type]
    for choice, allowed in (("any", ("weather", "forecast")), ("forecast", ("forecast",))):
        bound = model.bind_tools([weather, forecast], tool_choice=choice, parallel_tool_calls=False)
        asked = HumanMessage("Weather?")
        answer = bound.invoke([asked])
        (call,) = answer.tool_calls
        assert call["name"] in allowed
        assert call["args"]["unit"] in ("C", "F")
        assert not answer.invalid_tool_calls
        whole: AIMessageChunk | None = None
        for chunk in bound.stream([asked]):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk  # type: ignore[assignment]
        assert whole is not None
        assert [made["args"] for made in whole.tool_calls] == [call["args"]]
        result = ToolMessage("20 C", tool_call_id=call["id"])
        after = model.bind(max_tokens=5).invoke([asked, answer, result])
        assert after.response_metadata["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("stages", [1, 3])
async def test_langchain(stages: int) -> None:
    async with chain(stages) as url:
        await trio.to_thread.run_sync(functools.partial(talk_with_langchain, url))
