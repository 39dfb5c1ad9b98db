"""Tools and reasoning over HTTP, with the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.choices import Choice, ChoiceResult
from skippy.frontend.options import FrontendOptions
from skippy.frontend.responses import ChatShape
from skippy.frontend.tools import AnswerReading, ToolFormat
from skippy.protocol import PositionLogProbabilities, TokenLogProbability

from ..support import MODEL, ScriptedGenerator, chat_body, client, openai_client, say, serving
from . import templates

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "add")
]
ASK: Any = [{"role": "user", "content": "Weather?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


class Vocabulary(ToyVocabulary):
    def __init__(self, template: str) -> None:
        super().__init__()
        self._template = template

    @property
    def chat_template(self) -> str | None:
        return self._template


def scripted(text: str, template: str = templates.HERMES, context: int = 4096) -> ScriptedGenerator:
    return ScriptedGenerator(say(text), vocabulary=Vocabulary(template), context_length=context)


async def test_calls_whole_and_streamed() -> None:
    generator = scripted(CALLS)
    async with serving(generator) as url, openai_client(url) as one:
        whole = await one.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        async with one.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        back: Any = whole.choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in back.tool_calls
        ]
        await one.chat.completions.create(model=MODEL, messages=[*ASK, back, *results], tools=TOOLS)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    made = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert made == [("function", "weather", '{"city": "Köln"}'), ("function", "add", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    streamed = final.choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == "Let me see."
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments for call in streamed.message.tool_calls] == ['{"city": "Köln"}', "{}"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 10
    prompt = bytes(token for token in generator.requests[-1].prompt if token < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    assert prompt.count("<tool_response>\nsunny") == 2


CODER_CALLS = (
    'Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\nam "Rhein"\n</parameter>\n'
    "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=add>\n</function>\n</tool_call>"
)


async def test_calls_with_tags_around_their_arguments() -> None:
    """As Qwen3-Coder writes them; a call that is enforced is written as Hermes does."""
    generator = scripted(CODER_CALLS, templates.QWEN3_CODER)
    async with serving(generator) as url, openai_client(url) as one:
        whole = await one.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        async with one.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        back: Any = whole.choices[0].message
        results: Any = [{"role": "tool", "tool_call_id": made.id, "content": "x"} for made in back.tool_calls]
        await one.chat.completions.create(model=MODEL, messages=[*ASK, back, *results], tools=TOOLS)
        shown = generator.requests[-1]
        await one.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required")
    for choice in (whole.choices[0], final.choices[0]):
        made: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in made] == [
            ("weather", {"city": 'Köln\nam "Rhein"', "days": [1, 2]}),
            ("add", {}),
        ]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 10
    prompt = bytes(token for token in shown.prompt if token < 256).decode()
    assert '<parameter=city>\nKöln\nam "Rhein"\n</parameter>' in prompt
    constraint = generator.requests[-1].constraint
    assert constraint is not None
    assert '\\"name\\": \\"weather\\"' in constraint.grammar


async def test_chunks_of_a_call() -> None:
    body = chat_body(stream=True, tools=TOOLS)
    async with client(scripted('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')) as http:
        lines = (await http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    begin = deltas[1]["tool_calls"][0]
    assert begin == {
        "index": 0,
        "id": begin["id"],
        "type": "function",
        "function": {"name": "add", "arguments": ""},
    }
    assert begin["id"].startswith("call_")
    rest = [delta["tool_calls"][0] for delta in deltas[2:-1]]
    assert all(part.keys() == {"index", "function"} for part in rest)
    assert "".join(part["function"]["arguments"] for part in rest) == '{"a": 1}'
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_ends_the_generation_where_they_are_not_parallel() -> None:
    body = chat_body(tools=TOOLS, parallel_tool_calls=False)
    generator = scripted(CALLS + " and more" * 50)
    async with client(generator) as http:
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        await generator.idle.wait()
    assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["weather"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    # Up to the brace that ends the call, one token for each byte.
    assert answer["usage"]["completion_tokens"] == len(CALLS.split("\n</tool_call>")[0].encode())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_is_content(stream: bool) -> None:
    text = '<tool_call>{"name": "add", "arguments": {bad}}</tool_call>'
    async with serving(scripted(text)) as url, openai_client(url) as one:
        if stream:
            async with one.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as events:
                choice: Any = (await events.get_final_completion()).choices[0]
        else:
            whole = await one.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
            choice = whole.choices[0]
            assert choice.message.tool_calls is None
    assert choice.message.content == text
    assert choice.finish_reason == "stop"


async def test_without_tools_nothing_is_parsed() -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        async with client(scripted(CALLS)) as http:
            answer = (await http.post("/v1/chat/completions", json=chat_body(**more))).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_calls_of_several_choices() -> None:
    async with client(scripted(CALLS)) as http:
        answer = (await http.post("/v1/chat/completions", json=chat_body(tools=TOOLS, n=2))).json()
    ids = {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


async def test_a_call_cut_by_the_token_limit() -> None:
    async with client(scripted(CALLS)) as http:
        body = chat_body(tools=TOOLS, max_tokens=60)
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"c']


async def test_a_stop_string_within_a_call_ends_it() -> None:
    async with client(scripted(CALLS)) as http:
        body = chat_body(tools=TOOLS, stop=["Köln"])
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


THOUGHTS = "<think>\nHm, Köln.\n</think>\n\nSunny 🌞 there."


async def test_reasoning_whole_and_streamed() -> None:
    async with serving(scripted(THOUGHTS, templates.QWEN3)) as url, openai_client(url) as one:
        create = one.chat.completions.create
        whole = await create(model=MODEL, messages=ASK)
        message: Any = whole.choices[0].message
        stream = await create(model=MODEL, messages=ASK, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
        none = await create(model=MODEL, messages=ASK, extra_body={"reasoning_format": "none"})
        back = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."}
        history: Any = [*ASK, back, *ASK]
        await create(model=MODEL, messages=history)
    assert (message.reasoning_content, message.content) == ("Hm, Köln.", "Sunny 🌞 there.")
    reasoning = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, reasoning)) == "Hm, Köln."
    assert len(list(filter(None, reasoning))) > 5
    assert "".join(delta.content or "" for delta in deltas) == "Sunny 🌞 there."
    assert none.choices[0].message.content == THOUGHTS
    # One token for each byte: what is thought, and the mark behind it.
    thought = len(THOUGHTS.partition("</think>")[0].encode()) - len("<think>") + len("</think>")
    for usage, expected in ((whole.usage, thought), (none.usage, 0)):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == expected
        assert usage.completion_tokens == len(THOUGHTS.encode())


async def test_reasoning_that_the_template_opens() -> None:
    async with client(scripted("Hm.</think>Yes", templates.DEEPSEEK_R1)) as http:
        message = (await http.post("/v1/chat/completions", json=chat_body())).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes", "refusal": None, "reasoning_content": "Hm."}


async def test_thinking_turned_off() -> None:
    generator = scripted("Yes", templates.QWEN3)
    async with client(generator) as http:
        for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            answer = await http.post("/v1/chat/completions", json=chat_body(**more))
            assert answer.json()["choices"][0]["message"]["content"] == "Yes"
            assert bytes(generator.requests.pop().prompt[-20:]) == b"\n<think>\n\n</think>\n\n"


async def test_a_template_of_the_request_must_be_allowed() -> None:
    body = chat_body(chat_template="{{ messages[0].content }}!")
    generator = scripted("ok")
    async with client(generator) as http:
        error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_model_feature")
    async with client(generator, FrontendOptions(allows_chat_templates=True)) as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        bad = {**body, "chat_template": "{{ raise_exception('no') }}"}
        error = (await http.post("/v1/chat/completions", json=bad)).json()["error"]
    assert bytes(generator.requests[0].prompt[1:]) == b"hi!"
    assert "refused these messages: no" in error["message"]


async def test_a_model_tells_what_its_template_can_do() -> None:
    async with client(scripted("", templates.QWEN3)) as http:
        model = (await http.get(f"/v1/models/{MODEL}")).json()
    assert model["chat_template"] == {
        "tool_format": "hermes",
        "tools": True,
        "system": True,
        "calls": True,
        "parallel_calls": True,
        "results": True,
        "object_arguments": True,
        "null_content": True,
        "reasoning": {"begin": "<think>", "end": "</think>"},
        "variables": ["enable_thinking"],
    }


class Marked(Vocabulary):
    """Byte tokens, and control tokens that begin and end reasoning, and one that nobody looks for."""

    TEXTS = ("[THINK]", "[/THINK]", "<|other|>")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special and text in self.TEXTS:
            return [300 + self.TEXTS.index(text)]
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < 300:
            return super().piece(token, special=special)
        return self.TEXTS[token - 300].encode() if special else b""


async def test_control_tokens_are_text_for_the_parser_alone() -> None:
    tokens = [300, *b"Hm", 302, 301, *b"Yes", 300, 302, *b" [THINK]"]
    template = "{{ messages[0].content }}{# [THINK] [/THINK] #}"
    generator = ScriptedGenerator(lambda request: tokens, vocabulary=Marked(template))
    async with client(generator) as http:
        message = (await http.post("/v1/chat/completions", json=chat_body())).json()["choices"][0]["message"]
        plain = chat_body(reasoning_format="none")
        shown = (await http.post("/v1/chat/completions", json=plain)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes [THINK]")
    # Control tokens have no text where nothing is read out of it.
    assert shown["content"] == "HmYes [THINK]"


def scored(token: int) -> PositionLogProbabilities:
    return PositionLogProbabilities(TokenLogProbability(token, -1.0), ())


def test_log_probabilities_of_tokens_of_calls_are_not_lost() -> None:
    reading = AnswerReading(tools=ToolFormat.HERMES, names=frozenset({"add"}))
    choice = Choice(0, ToyVocabulary(), (), scored=True, reading=reading)
    text = b'So <tool_call>{"name": "add"}</tool_call>'
    result = ChoiceResult()
    shape = ChatShape(
        "m", scorer=lambda scores: {"content": [score.position.chosen.token for score in scores]}
    )
    events = b""
    for token in text:
        piece = choice.feed(token, scored(token))
        if piece is not None:
            result.add(piece)
            events += shape.piece(piece)
    last = choice.finish("stop")
    result.add(last)
    events += shape.piece(last)
    assert bytes(score.position.chosen.token for score in result.scores) == text
    chunks = [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n") if line]
    said = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert bytes(token for logprobs in said for token in logprobs["content"]) == text
    assert result.finish_reason == "tool_calls"
