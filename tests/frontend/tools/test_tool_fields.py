"""Tools in request bodies, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skippy.frontend.chat_settings import ChatSettings
from skippy.frontend.errors import ApiError
from skippy.frontend.schemas import ChatMessage, ChatRequest, parse_chat
from skippy.frontend.tool_fields import Tool, ToolUse
from skippy.frontend.tools import ToolCall

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: Any = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def parse(messages: list[dict[str, Any]] | None = None, **more: Any) -> ChatRequest:
    said = messages or [{"role": "user", "content": "hi"}]
    return parse_chat(json.dumps({"model": "m", "messages": said, **more}).encode())


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WEATHER = Tool("weather", "Tells it.", SCHEMA, True)
ADD = Tool("add")
TOOLS = [tool(description="Tells it.", parameters=SCHEMA, strict=True), tool("add")]
BOTH = frozenset({"weather", "add"})


@pytest.mark.parametrize(
    ("more", "use"),
    [
        ({}, ToolUse()),
        ({"tools": [], "tool_choice": "auto", "functions": [], "function_call": "none"}, ToolUse()),
        ({"tools": TOOLS}, ToolUse(tools=(WEATHER, ADD), allowed=BOTH)),
        ({"tools": TOOLS, "tool_choice": "none"}, ToolUse()),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            ToolUse(tools=(WEATHER, ADD), allowed=BOTH, required=True, parallel=False),
        ),
        (
            {"tools": TOOLS, "tool_choice": choice("add")},
            ToolUse(tools=(WEATHER, ADD), allowed=frozenset({"add"}), required=True),
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [choice("weather")]},
                },
            },
            ToolUse(tools=(WEATHER, ADD), allowed=frozenset({"weather"})),
        ),
    ],
)
def test_tools(more: dict[str, Any], use: ToolUse) -> None:
    assert parse(**more).settings == ChatSettings(tool_use=use)


def allowed(mode: str = "auto", tools: Any = ()) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": "x"}, "tools", "must be an array"),
        ({"tools": [tool(f"t{n}") for n in range(129)]}, "tools", "has 129 entries; at most 128"),
        ({"tools": [tool(), 7]}, "tools[1]", "must be an object"),
        ({"tools": [{"function": {"name": "x"}}]}, "tools[0].type", "is missing"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "is 'custom', which is not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [tool(), tool("add"), tool("a b")]}, "tools[2].function.name", "is 'a b'; it must be"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool(None)]}, "tools[0].function.name", "is missing"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "another tool's name"),
        ({"tools": [tool(description=7)]}, "tools[0].function.description", "must be a string"),
        ({"tools": [tool(description="x" * 16385)]}, "tools[0].function.description", "16384"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "must be an object"),
        ({"tools": [tool(parameters={"x": "y" * 131072})]}, "tools[0].function.parameters", "at most"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "must be true or false"),
        ({"tools": [tool(returns={})]}, "tools[0].function.returns", "unknown parameter"),
        ({"tools": [{**tool(), "x": 1}]}, "tools[0].x", "unknown parameter"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "is 'any'"),
        ({"tool_choice": 7, "tools": TOOLS}, "tool_choice", "must be an object"),
        ({"tool_choice": choice("x"), "tools": TOOLS}, "tool_choice.function.name", "not among the tools"),
        ({"tool_choice": {"type": "web"}, "tools": TOOLS}, "tool_choice.type", "not supported"),
        ({"tool_choice": allowed("x"), "tools": TOOLS}, "tool_choice.allowed_tools.mode", "must be 'auto'"),
        ({"tool_choice": allowed(), "tools": TOOLS}, "tool_choice.allowed_tools.tools", "at least one"),
        (
            {"tool_choice": allowed("auto", [choice("x")]), "tools": TOOLS},
            "tool_choice.allowed_tools.tools[0].function.name",
            "not among",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
        ({"functions": [{"name": "x"}]}, "functions", "was replaced by tools"),
        ({"function_call": {"name": "x"}}, "function_call", "was replaced by tool_choice"),
        ({"reasoning_format": "hidden"}, "reasoning_format", "must be one of none, auto, deepseek"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "must be one of"),
        ({"chat_template": ""}, "chat_template", "has 0 characters"),
        ({"chat_template": "x" * 300000}, "chat_template", "has 300000 characters"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"x": "y" * 40000}}, "chat_template_kwargs", "at most 32768"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "not a variable"),
    ],
)
def test_errors_name_the_field(more: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(**more)
    assert (caught.value.status, caught.value.param) == (400, param)


def call(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
        **more,
    }


def test_messages_with_calls() -> None:
    request = parse(
        [
            {"role": "assistant", "content": None, "tool_calls": [call(0), {**call(1), "index": 1}]},
            {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "sunny"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
            {"role": "assistant", "content": "Yes", "reasoning_content": "Hm", "tool_calls": []},
        ]
    )
    calls = (ToolCall("c0", "weather", "{}"), ToolCall("c1", "weather", "{}"))
    assert request.messages == (
        ChatMessage("assistant", "", tool_calls=calls),
        ChatMessage("tool", "sunny", tool_call_id="c0"),
        ChatMessage("tool", "rain", "weather", tool_call_id="c1"),
        ChatMessage("assistant", "Yes", reasoning="Hm"),
    )


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", "is missing"),
        ({"role": "tool", "content": "x", "tool_call_id": "y" * 257}, "messages[0].tool_call_id", "has 257"),
        ({"role": "tool", "tool_call_id": "c0"}, "messages[0].content", "is missing"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id", "unknown"),
        ({"role": "user", "content": "x", "tool_calls": [call(0)]}, "messages[0].tool_calls", "unknown"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role", "replaced by 'tool'"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call", "replaced by tool_calls"),
        ({"role": "assistant", "tool_calls": 7}, "messages[0].tool_calls", "must be an array"),
        ({"role": "assistant", "tool_calls": [call(0)] * 129}, "messages[0].tool_calls", "at most 128"),
        (
            {"role": "assistant", "tool_calls": [{}]},
            "messages[0].tool_calls[0].function",
            "must be an object",
        ),
        (
            {"role": "assistant", "tool_calls": [call(0, id=None)]},
            "messages[0].tool_calls[0].id",
            "is missing",
        ),
        (
            {"role": "assistant", "tool_calls": [call(0, type="custom")]},
            "messages[0].tool_calls[0].type",
            "not supported",
        ),
        (
            {"role": "assistant", "tool_calls": [call(0, function={"name": "", "arguments": "{}"})]},
            "messages[0].tool_calls[0].function.name",
            "must be 1 to 64",
        ),
        (
            {"role": "assistant", "tool_calls": [call(0, function={"name": "x", "arguments": {}})]},
            "messages[0].tool_calls[0].function.arguments",
            "must be a string",
        ),
    ],
)
def test_errors_in_messages_name_the_field(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse([message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_too_many_messages() -> None:
    with pytest.raises(ApiError, match="has 4097 entries; at most 4096") as caught:
        parse([{"role": "user", "content": ""}] * 4097)
    assert caught.value.param == "messages"
