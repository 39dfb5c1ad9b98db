"""Official clients and LangChain, unmodified, against chains of one stage and of three.

Every answer must also fit the types that the clients ship, strictly.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import attrs
import httpx
import langchain_openai
import openai
import pydantic
import pytest
import trio
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from skippy import embed
from skippy.config import OpenAIOptions
from tests.support.cluster import toy_cluster

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a word."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "paint", "description": "Paints.", "parameters": SCHEMA}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@attrs.frozen
class Server:
    url: str
    model: str
    http: httpx.AsyncClient

    async def ask(self, path: str, **body: Any) -> str:
        """The raw answer."""
        answer = await self.http.post(path, json={"model": self.model, **body})
        assert answer.status_code == 200, answer.text
        return answer.text

    async def events(self, path: str, **body: Any) -> list[str]:
        """The data of the events of a stream."""
        lines = (await self.ask(path, stream=True, **body)).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [one for one in data if one != "[DONE]"]


@contextlib.asynccontextmanager
async def chain(stages: int) -> AsyncIterator[Server]:
    options = OpenAIOptions(bind_addr="127.0.0.1:0", default_max_tokens=12)
    with trio.fail_after(60):
        async with (
            toy_cluster(stages, ctx_size=1024) as cluster,
            embed.open_openai(cluster.first, options) as endpoint,
            httpx.AsyncClient(base_url=endpoint.url.removesuffix("/v1"), timeout=60) as http,
        ):
            await endpoint.wait_ready()
            yield Server(endpoint.url, cluster.first.config.model_id, http)


def strictly(kind: Any, data: str) -> Any:
    """``data`` as one of the client's types; nothing is converted or left out."""
    return pydantic.TypeAdapter(kind).validate_json(data, strict=True)


both = pytest.mark.parametrize("stages", [1, 3])


@both
async def test_answers_fit_openais_types(stages: int) -> None:
    async with chain(stages) as server:
        path = "/v1/chat/completions"
        chat: dict[str, Any] = {"messages": MESSAGES, "seed": 1}
        whole = strictly(ChatCompletion, await server.ask(path, **chat, n=2, logprobs=True, top_logprobs=3))
        assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
        chunks = await server.events(path, **chat, logprobs=True, stream_options={"include_usage": True})
        parsed = [strictly(ChatCompletionChunk, chunk) for chunk in chunks]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in parsed if chunk.choices)
        assert text == whole.choices[0].message.content
        formed = strictly(
            ChatCompletion, await server.ask(path, **chat, max_tokens=200, response_format=FORMAT)
        )
        assert set(json.loads(formed.choices[0].message.content)) == {"color", "count"}
        path = "/v1/completions"
        done = strictly(Completion, await server.ask(path, prompt=["a", "b"], logprobs=2, temperature=0))
        assert len(done.choices) == 2
        # The client's type of chunks is that of whole answers, where a finish_reason must be.
        strictly(Completion, (await server.events(path, prompt="a"))[-1])
        strictly(Model, (await server.http.get(f"/v1/models/{server.model}")).text)


@both
async def test_answers_fit_the_types_of_the_responses_api(stages: int) -> None:
    async with chain(stages) as server:
        included = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = strictly(Response, await server.ask("/v1/responses", input="a", temperature=0, **included))
        assert len(whole.output[0].content[0].logprobs) == 12
        assert whole.status == "incomplete"
        events = [
            strictly(ResponseStreamEvent, event)
            for event in await server.events("/v1/responses", input="a", temperature=0, **included)
        ]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == whole.output_text
        again = await server.http.get(f"/v1/responses/{whole.id}")
        assert strictly(Response, again.text) == whole
        form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
        formed = strictly(
            Response, await server.ask("/v1/responses", input="a", max_output_tokens=200, text=form)
        )
        assert set(json.loads(formed.output_text)) == {"color", "count"}


@both
async def test_answers_fit_anthropics_types(stages: int) -> None:
    async with chain(stages) as server:
        body = {"messages": MESSAGES[1:], "system": "Be brief.", "max_tokens": 8, "temperature": 0}
        whole = strictly(Message, await server.ask("/v1/messages", **body))
        assert whole.stop_reason == "max_tokens"
        events = [
            strictly(RawMessageStreamEvent, event) for event in await server.events("/v1/messages", **body)
        ]
        text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
        assert text == whole.content[0].text
        del body["max_tokens"], body["temperature"]
        counted = strictly(MessageTokensCount, await server.ask("/v1/messages/count_tokens", **body))
        usage = whole.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@both
async def test_embeddings(stages: int) -> None:
    async with chain(stages) as server:
        answer = await server.http.post("/v1/embeddings", json={"model": server.model, "input": ["a", "b"]})
        if stages == 1:
            assert len(strictly(CreateEmbeddingResponse, answer.text).data) == 2
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model_feature")


def with_openai(server: Server) -> None:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as api:
        chat = api.chat.completions
        whole = chat.create(model=server.model, messages=MESSAGES, temperature=0)
        with chat.stream(model=server.model, messages=MESSAGES, temperature=0) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == whole.choices[0].message.content

        class Answer(pydantic.BaseModel):
            count: int = pydantic.Field(ge=0, le=9)

        formed = chat.parse(model=server.model, messages=MESSAGES, response_format=Answer, max_tokens=200)
        assert formed.choices[0].message.parsed is not None
        tools: Any = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
        tools["parallel_tool_calls"] = False
        called = chat.create(model=server.model, messages=MESSAGES, max_tokens=200, **tools)
        assert called.choices[0].finish_reason == "tool_calls"
        (call,) = called.choices[0].message.tool_calls or ()
        assert set(json.loads(call.function.arguments)) == {"color", "count"}  # type: ignore[union-attr]
        tools["tools"] = [{"type": "function", **TOOL}]
        answer = api.responses.create(model=server.model, input="a", max_output_tokens=200, **tools)
        assert [(item.type, item.name) for item in answer.output if item.type == "function_call"] == [
            ("function_call", "paint")
        ]
        first = api.responses.create(model=server.model, input="a", temperature=0)
        second = api.responses.create(model=server.model, input="b", previous_response_id=first.id)
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        with api.responses.stream(model=server.model, input="a", temperature=0) as events:
            kinds = [event.type for event in events]
        assert kinds[-1] == "response.incomplete"
        assert [model.id for model in api.models.list()] == [server.model]


def with_anthropic(server: Server) -> None:
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as api:
        keys: Any = {"model": server.model, "messages": MESSAGES[1:], "max_tokens": 8}
        whole = api.messages.create(**keys, extra_body={"temperature": 0})
        with api.messages.stream(**keys, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]
        tools = [{"name": "paint", "input_schema": SCHEMA}]
        keys |= {
            "max_tokens": 200,
            "tools": tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        (block,) = api.messages.create(**keys).content
        assert block.type == "tool_use"
        assert set(block.input) == {"color", "count"}


def with_langchain(server: Server) -> None:
    keys: Any = {"base_url": server.url, "api_key": "none", "model": server.model, "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**keys, temperature=0, max_tokens=12)
    conversation = [("system", "Be brief."), ("human", "Say a word.")]
    whole = chat.invoke(conversation)
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream(conversation)) == whole.content
    longer = langchain_openai.ChatOpenAI(**keys, temperature=0, max_tokens=200)
    formed = longer.with_structured_output({"title": "answer", **SCHEMA}, method="json_schema")
    assert set(formed.invoke(conversation)) == {"color", "count"}
    bound = longer.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(conversation).tool_calls
    assert (call["name"], set(call["args"])) == ("paint", {"color", "count"})
    responses = langchain_openai.ChatOpenAI(**keys, temperature=0, use_responses_api=True)
    assert responses.invoke("Say a word.").text


@both
@pytest.mark.parametrize(
    "talk", [with_openai, with_anthropic, with_langchain], ids=lambda talk: talk.__name__
)
async def test_clients(stages: int, talk: Callable[[Server], None]) -> None:
    async with chain(stages) as server:
        await trio.to_thread.run_sync(talk, server)
