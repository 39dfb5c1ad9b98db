"""``/v1/messages``: what the official client gets, the order of events, errors, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from skippy.frontend.generation import ChainUnavailable, TooManyRequests

from .support import MODEL, ScriptedGenerator, client, prompt_of, say, serving

_MESSAGES: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def official(generator: ScriptedGenerator) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving(generator) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=30) as api,
    ):
        yield api


async def test_a_whole_message() -> None:
    generator = ScriptedGenerator(say("héllo"))
    before: Any = {"role": "assistant", "content": [{"type": "text", "text": "yes?"}]}
    async with official(generator) as api:
        message = await api.messages.create(
            model=MODEL,
            max_tokens=50,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[*_MESSAGES, before, *_MESSAGES],
        )
    assert [block.text for block in message.content if block.type == "text"] == ["héllo"]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(generator.requests[0].prompt), 6)
    assert prompt_of(generator) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes?<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    Message.model_validate(message.model_dump(), strict=True)


async def test_events_come_in_their_order() -> None:
    generator = ScriptedGenerator(say("ab"))
    async with official(generator) as api:
        stream = await api.messages.create(model=MODEL, max_tokens=5, messages=_MESSAGES, stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, delta = events[0], events[-2]
    assert start.type == "message_start"
    assert start.message.usage.input_tokens == len(generator.requests[0].prompt)
    assert delta.type == "message_delta"
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", 2)


async def test_the_clients_stream_helper() -> None:
    async with (
        official(ScriptedGenerator(say("hello"))) as api,
        api.messages.stream(model=MODEL, max_tokens=9, messages=_MESSAGES) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "hello"
        assert (await stream.get_final_message()).stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(stream: bool) -> None:
    async with official(ScriptedGenerator(say("one STOP two"))) as api:

        async def ask(**more: Any) -> Message:
            keys = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 50, **more}
            if not stream:
                return await api.messages.create(**keys)
            async with api.messages.stream(**keys) as events:
                return await events.get_final_message()

        cut = await ask(max_tokens=3)
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        stopped = await ask(stop_sequences=["never", "STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert [block.text for block in stopped.content if block.type == "text"] == ["one "]


async def test_tokens_are_counted() -> None:
    generator = ScriptedGenerator(say("x"))
    async with official(generator) as api:
        counted = await api.messages.count_tokens(model=MODEL, messages=_MESSAGES, system="s")
        assert not generator.requests
        await api.messages.create(model=MODEL, messages=_MESSAGES, system="s", max_tokens=1)
    assert counted.input_tokens == len(generator.requests[0].prompt)


async def test_errors_have_anthropics_envelope() -> None:
    generator = ScriptedGenerator(lambda _: [97, ChainUnavailable("stage 1 was lost")], context_length=64)
    async with official(generator) as api:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.messages.create(model="claude", max_tokens=1, messages=_MESSAGES)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
        with pytest.raises(anthropic.BadRequestError) as long:
            await api.messages.create(
                model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x" * 99}]
            )
        assert long.value.body["error"]["code"] == "context_length_exceeded"  # type: ignore[index,call-overload]
        async with api.messages.stream(model=MODEL, max_tokens=9, messages=_MESSAGES) as stream:
            with pytest.raises(anthropic.APIStatusError) as lost:
                await stream.get_final_message()
        assert "stage 1 was lost" in str(lost.value)
        generator.entry_error = TooManyRequests("all lanes are busy")
        with pytest.raises(anthropic.RateLimitError):
            await api.messages.create(model=MODEL, max_tokens=1, messages=_MESSAGES)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"metadata": []}, "metadata"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"top_k": -2}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
    ],
)
async def test_faults_are_named(body: dict[str, Any], param: str) -> None:
    whole = {"model": MODEL, "max_tokens": 5, "messages": _MESSAGES, **body}
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.post("/v1/messages", json=whole)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["param"] == param
    assert answer.json()["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]
