"""Tools and reasoning over the Responses API and Anthropic's Messages API, with the official clients."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from skippy.frontend.anthropic.shape import MessageShape
from skippy.frontend.choices import Piece
from skippy.frontend.generation import Timings
from skippy.frontend.responses_api.shape import ResponsesShape
from skippy.frontend.running import Usage
from skippy.frontend.tools import CallArguments, CallBegin, CallBroken, Content
from skippy.frontend.translation import ChatBody

from ..support import MODEL, ScriptedGenerator, client, serving
from . import templates
from .test_http_tools import CALLS, scripted

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("weather", "add")]
ANTHROPIC_TOOLS: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "add")]
ASK: Any = [{"role": "user", "content": "Weather?"}]
THINKING = "<think>It may rain.</think>Yes."


def prompt_of(generator: ScriptedGenerator) -> str:
    prompt = generator.requests[-1].prompt
    return b"".join(generator.vocabulary.piece(token, special=True) for token in prompt).decode()


async def test_function_calls_of_a_response() -> None:
    generator = scripted(CALLS)
    async with (
        serving(generator) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        create = api.responses.create
        whole = await create(model=MODEL, input="Weather?", tools=TOOLS, parallel_tool_calls=True)
        stream = await create(model=MODEL, input="Weather?", tools=TOOLS, stream=True)
        events = [event async for event in stream]
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in whole.output
            if item.type == "function_call"
        ]
        await create(model=MODEL, input=outputs, previous_response_id=whole.id, tools=TOOLS)
        stored = prompt_of(generator)
        await create(model=MODEL, input=[*ASK, *whole.output, *outputs], tools=TOOLS)  # type: ignore[list-item]
        assert prompt_of(generator) == stored
    kinds = [item.type for item in whole.output]
    assert kinds == ["message", "function_call", "function_call"]
    calls = [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert calls == [("weather", '{"city": "Köln"}'), ("add", "{}")]
    assert stored.count("sunny") == 2
    assert "Köln" in stored
    final = events[-1].response  # type: ignore[union-attr]
    assert final.status == "completed"
    assert [item.type for item in final.output] == kinds
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Köln"}', "{}"]
    for event in done:
        deltas = [
            one.delta
            for one in events
            if one.type == "response.function_call_arguments.delta" and one.item_id == event.item_id
        ]
        assert "".join(deltas) == event.arguments
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_tool_uses_of_a_message() -> None:
    generator = scripted(CALLS)
    async with (
        serving(generator) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        keys: Any = {"model": MODEL, "max_tokens": 500, "tools": ANTHROPIC_TOOLS}
        whole = await api.messages.create(**keys, messages=ASK)
        async with api.messages.stream(**keys, messages=ASK) as stream:
            streamed = await stream.get_final_message()
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
            for block in whole.content
            if block.type == "tool_use"
        ]
        results[1]["is_error"] = True
        answer: Any = {"role": "assistant", "content": whole.content}
        await api.messages.create(**keys, messages=[*ASK, answer, {"role": "user", "content": results}])
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        uses = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert uses == [("weather", {"city": "Köln"}), ("add", {})]
    shown = prompt_of(generator)
    assert shown.count("sunny") == 2
    assert "Error: sunny" in shown


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart(stream: bool) -> None:
    generator = scripted(THINKING, templates.QWEN3)
    async with client(generator) as http:
        body = {"model": MODEL, "input": "a", "stream": stream}
        text = (await http.post("/v1/responses", json=body)).text
        if stream:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
            assert "".join(deltas) == "It may rain."
            response = events[-1]["response"]
        else:
            response = json.loads(text)
        thought, said = response["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "It may rain.")
        assert said["content"][0]["text"] == "Yes."
        items = [*ASK, thought, said, *ASK]
        assert (await http.post("/v1/responses", json={**body, "input": items})).status_code == 200
        body = {"model": MODEL, "messages": ASK, "max_tokens": 99, "stream": stream}
        text = (await http.post("/v1/messages", json=body)).text
        if stream:
            assert '"thinking_delta"' in text
        else:
            blocks = json.loads(text)["content"]
            assert [(block["type"], block[block["type"]]) for block in blocks] == [
                ("thinking", "It may rain."), ("text", "Yes."),
            ]  # fmt: skip


VOID = (
    CallBegin(0, "c", "f"),
    CallArguments(0, '{"a'),
    CallBroken(0),
    Content('{"a'),
)


def test_a_call_that_was_none_is_content() -> None:
    usage = Usage(1, 1)
    shape = ResponsesShape("m", {})
    shape.piece(Piece(0, "", (), "stop", None, VOID))
    data = shape.closing(usage, Timings()).decode().strip().split("data: ")[-1]
    (item,) = json.loads(data)["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", '{"a')
    message = MessageShape("m")
    events = message.piece(Piece(0, "", (), "stop", None, VOID)).decode()
    assert events.count("content_block_start") == 2 * events.count("content_block_stop") == 4
    assert '"end_turn"' in message.closing(usage, Timings()).decode()


def test_a_call_that_was_cut_is_incomplete() -> None:
    cut = Piece(0, "", (), "length", None, VOID[:2])
    shape = ResponsesShape("m", {})
    shape.piece(cut)
    data = shape.closing(Usage(1, 1), Timings()).decode().strip().split("data: ")[-1]
    response = json.loads(data)["response"]
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


def call(**more: str) -> dict[str, str]:
    return {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", **more}


def used(**more: str) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}, **more}
    return {"role": "assistant", "content": [{"type": "text", "text": "a"}, use]}


RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": "a"}]}
NAMED = {"type": "function", "name": "add"}
OTHER = {"type": "function", "name": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "", "output": "a"}


def allowed(**more: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [NAMED], **more}


async def test_tools_that_a_response_may_call() -> None:
    """The Responses API has them beside the mode, where chat has both in a member of their own."""
    async with client(scripted(CALLS)) as http:
        body = {"model": MODEL, "input": "a", "tools": TOOLS, "tool_choice": allowed()}
        answer = (await http.post("/v1/responses", json=body)).json()
    assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == ["add"]
    assert answer["tool_choice"] == allowed()


def test_many_calls_are_put_into_one_message_one_by_one() -> None:
    """Without a copy of those before for each, which for the thousands that a body holds took minutes."""
    body = ChatBody()
    body.say({"role": "assistant", "content": None}, "input[0]")
    body.call({"id": "a"}, "input[0]")
    calls = body.messages[-1]["tool_calls"]
    body.call({"id": "b"}, "input[1]")
    assert body.messages[-1]["tool_calls"] is calls == [{"id": "a"}, {"id": "b"}]


MINE = {"input": "a", "tools": TOOLS}
THEIRS = {"messages": ASK, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {**MINE, "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ("responses", {**MINE, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ("messages", {**THEIRS, "tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema"),
        ("messages", {**THEIRS, "tool_choice": {"type": "any"}}, "tool_choice"),
        ("responses", {"input": [*ASK, call(name="a b")]}, "input[1].name"),
        ("responses", {"input": [*ASK, call(), call(call_id="")]}, "input[2].call_id"),
        ("responses", {"input": [OUTPUT]}, "input[0].call_id"),
        ("responses", {**MINE, "tool_choice": allowed(mode="any")}, "tool_choice.mode"),
        ("responses", {**MINE, "tool_choice": allowed(tools=[])}, "tool_choice.tools"),
        ("responses", {**MINE, "tool_choice": allowed(tools=[{"type": "mcp"}])}, "tool_choice.tools[0].type"),
        ("responses", {**MINE, "tool_choice": allowed(tools=[NAMED, OTHER])}, "tool_choice.tools[1].name"),
        ("messages", {**THEIRS, "messages": [used(name="a b")]}, "messages[0].content[1].name"),
        ("messages", {**THEIRS, "messages": [used(id="")]}, "messages[0].content[1].id"),
        ("messages", {**THEIRS, "messages": [RESULT]}, "messages[0].content[0].tool_use_id"),
    ],
)
async def test_faults_have_the_routes_names(path: str, body: dict[str, Any], param: str) -> None:
    async with client(scripted("x")) as http:
        answer = await http.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
