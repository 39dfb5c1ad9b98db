"""``/v1/responses``: what the official client gets, the order of events, what is stored, what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from skippy.frontend.generation import ChainUnavailable
from skippy.frontend.options import FrontendOptions
from skippy.frontend.responses_api.store import ResponseStore, StoredResponse

from .support import MODEL, ScriptedGenerator, client, openai_client, prompt_of, say, serving


@contextlib.asynccontextmanager
async def official(
    generator: ScriptedGenerator, options: FrontendOptions | None = None, key: str = "none"
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(generator, options) as url,
        openai_client(url, key) as api,
    ):
        yield api


async def test_a_whole_response() -> None:
    generator = ScriptedGenerator(say("héllo"))
    async with official(generator) as api:
        create = api.responses.create
        response = await create(model=MODEL, input="hi", instructions="Be brief.", temperature=0)
    assert response.output_text == "héllo"
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert (response.temperature, response.instructions) == (0, "Be brief.")
    usage = response.usage
    assert usage is not None
    assert (usage.output_tokens, usage.input_tokens) == (6, len(generator.requests[0].prompt))
    assert prompt_of(generator) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    Response.model_validate(response.model_dump(), strict=True)


async def test_events_come_in_their_order() -> None:
    async with official(ScriptedGenerator(say("ab"))) as api:
        stream = await api.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    final = events[-1].response  # type: ignore[union-attr]
    assert final.output_text == "ab"
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.output[0].id}


async def test_the_clients_stream_helper() -> None:
    async with (
        official(ScriptedGenerator(say("hello"))) as api,
        api.responses.stream(model=MODEL, input="hi") as stream,
    ):
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_is_incomplete(stream: bool) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "stream": stream}
    async with client(ScriptedGenerator(say("hello"))) as http:
        answer = await http.post("/v1/responses", json=body)
    if stream:
        last = answer.text.strip().split("\n\n")[-1].split("\n")
        assert last[0] == "event: response.incomplete"
        response = json.loads(last[1].removeprefix("data: "))["response"]
    else:
        response = answer.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "he"


async def test_a_failure_in_a_stream() -> None:
    async with official(ScriptedGenerator(lambda _: [97, ChainUnavailable("stage 1 was lost")])) as api:
        stream = await api.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events][-2:] == ["error", "response.failed"]
    assert events[-2].message == "stage 1 was lost"  # type: ignore[union-attr]
    failed = events[-1].response  # type: ignore[union-attr]
    assert (failed.status, failed.error.code) == ("failed", "server_error")


async def test_a_conversation_goes_on() -> None:
    generator = ScriptedGenerator(say("one"))
    async with official(generator) as api:
        first = await api.responses.create(model=MODEL, input="a", instructions="Once.")
        second = await api.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        # Instructions are of one response only.
        expected = (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        assert prompt_of(generator) == expected
        assert second.previous_response_id == first.id
        # The same, as items that the client keeps itself.
        items: list[Any] = [{"role": "user", "content": "a"}, *first.output, {"role": "user", "content": "b"}]
        await api.responses.create(model=MODEL, input=items, store=False)
        assert prompt_of(generator) == expected
        assert (await api.responses.retrieve(first.id)).output_text == "one"
        listed = await api.responses.input_items.list(second.id)
        assert listed.data[0].content[0].text == "b"  # type: ignore[union-attr]
        many: list[Any] = [{"role": "user", "content": str(index)} for index in range(30)]
        third = await api.responses.create(model=MODEL, input=many)
        pages = api.responses.input_items.list(third.id, limit=7)
        texts = [item.content async for item in pages]  # type: ignore[union-attr]
        assert texts == [str(index) for index in reversed(range(30))]
        for query in ("limit=0", "limit=101", "limit=x", f"limit={'1' * 5000}", "order=up", "after=x"):
            with pytest.raises(openai.BadRequestError) as wrong:
                await api.get(f"/responses/{third.id}/input_items?{query}", cast_to=object)
            assert wrong.value.param == query.split("=")[0]
        await api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await api.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        assert gone.value.param == "previous_response_id"
        await api.responses.create(model=MODEL, input="c", previous_response_id=second.id)
        assert prompt_of(generator).count("<|im_start|>") == 6


async def test_responses_belong_to_a_key_and_are_kept_only_if_asked_for() -> None:
    async with official(ScriptedGenerator(say("x")), key="mine") as api:
        kept = await api.responses.create(model=MODEL, input="a")
        unkept = await api.responses.create(model=MODEL, input="a", store=False)
        stream = await api.responses.create(model=MODEL, input="a", stream=True)
        streamed = [event async for event in stream][-1].response.id  # type: ignore[union-attr]
        assert (await api.responses.retrieve(streamed)).output_text == "x"
        for found_by, response in (("yours", kept), ("mine", unkept)):
            with pytest.raises(openai.NotFoundError):
                await api.with_options(api_key=found_by).responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await api.with_options(api_key="yours").responses.delete(kept.id)
        await api.responses.retrieve(kept.id)


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_entries=3, max_bytes=100)

    def put(name: str, size: int) -> None:
        store.put("", name, StoredResponse(b"x" * size, b"", b""))

    for name in "abc":
        put(name, 10)
    assert store.get("", "a") is not None
    put("d", 10)
    assert [store.get("", name) is not None for name in "abcd"] == [True, False, True, True]
    put("e", 85)
    assert (len(store), store.bytes) == (2, 95)
    put("f", 101)
    assert store.get("", "f") is None
    assert store.delete("", "e")
    assert not store.delete("", "e")
    assert store.bytes == 10
    empty = ResponseStore(max_entries=0, max_bytes=100)
    empty.put("", "a", StoredResponse(b"x", b"", b""))
    assert (len(empty), empty.bytes) == (0, 0)


async def test_log_probabilities_need_to_be_included() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": "a", "top_logprobs": 2})
    assert answer.json()["error"]["param"] == "top_logprobs"


async def test_tokens_are_counted_without_an_answer() -> None:
    generator = ScriptedGenerator(say("ok"))
    async with official(generator) as api:
        first = await api.responses.create(model=MODEL, input="hi", instructions="Be brief.")
        count = api.responses.input_tokens.count
        alone = await count(model=MODEL, input="hi", instructions="Be brief.")
        behind = await count(model=MODEL, input="more", previous_response_id=first.id)
        second = await api.responses.create(model=MODEL, input="more", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            await count(model="another", input="hi")
        with pytest.raises(openai.BadRequestError, match="not stored here"):
            await count(model=MODEL, input="hi", previous_response_id="resp_none")
    assert first.usage is not None
    assert second.usage is not None
    assert (alone.object, alone.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    assert behind.input_tokens == second.usage.input_tokens
    assert len(generator.requests) == 2


async def test_what_the_client_has_parsed_goes_back_in() -> None:
    """OpenAI's client adds what it has made of texts and arguments to the items that it gives back."""
    generator = ScriptedGenerator(say("ok"))
    items = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "{}", "parsed": {"a": 1}, "annotations": []},
                {"type": "refusal", "refusal": "No."},
            ],
        },
        {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "parsed_arguments": {"b": 2},
        },
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    async with client(generator) as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, "input": items})
    assert answer.status_code == 200, answer.text
    assert '<|im_start|>assistant\n{}\nNo.\n{"tool_calls": ' in prompt_of(generator)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"input": "a", "stream_options": {}}, "stream_options"),
        ({"input": "a", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "x" * 600}, "input"),
    ],
)
async def test_faults_are_named(body: dict[str, Any], param: str) -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.post("/v1/responses", json={"model": MODEL, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param or error["param"].startswith(f"{param}."), error
    assert "messages[" not in error["message"]
