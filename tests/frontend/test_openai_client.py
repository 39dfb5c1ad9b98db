"""The official client, unmodified, against a real server."""

from __future__ import annotations

import openai
import pytest
import trio

from skippy.frontend.generation import ChainUnavailable

from .support import MODEL, ScriptedGenerator, openai_client, say, serving

_MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_async_chat() -> None:
    async with serving(ScriptedGenerator(say("hello"))) as url, openai_client(url) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        whole = await client.chat.completions.create(model=MODEL, messages=_MESSAGES)
        assert whole.choices[0].message.content == "hello"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        stream = await client.chat.completions.create(
            model=MODEL, messages=_MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage == whole.usage


async def test_async_chat_stream_helper() -> None:
    async with (
        serving(ScriptedGenerator(say("hello"))) as url,
        openai_client(url) as client,
        client.chat.completions.stream(model=MODEL, messages=_MESSAGES) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello"


async def test_an_answer_goes_back_into_the_conversation() -> None:
    generator = ScriptedGenerator(say("hello"))
    async with serving(generator) as url, openai_client(url) as client:
        create = client.chat.completions.create
        whole = await create(model=MODEL, messages=_MESSAGES)
        async with client.chat.completions.stream(model=MODEL, messages=_MESSAGES) as stream:
            parsed = await stream.get_final_completion()
        plain: openai.types.chat.ChatCompletionMessageParam = {"role": "assistant", "content": "hello"}
        await create(model=MODEL, messages=[*_MESSAGES, plain, *_MESSAGES])
        expected = generator.requests.pop().prompt
        # As objects and as dictionaries, with all the nulls the client's types hold.
        for message in (whole.choices[0].message, parsed.choices[0].message):
            for form in (message, message.model_dump(), message.to_dict()):
                await create(model=MODEL, messages=[*_MESSAGES, form, *_MESSAGES])  # type: ignore[list-item]
                assert generator.requests.pop().prompt == expected


async def test_async_completions() -> None:
    async with serving(ScriptedGenerator(say("hello"))) as url, openai_client(url) as client:
        whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("hel", "length")
        stream = await client.completions.create(model=MODEL, prompt="x", stop="lo", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hel"


async def test_typed_exceptions() -> None:
    generator = ScriptedGenerator(say("x"), context_length=30)
    async with serving(generator) as url, openai_client(url) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=_MESSAGES, n=129)
        assert bad.value.param == "n"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-4o", messages=_MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await create(model=MODEL, messages=[{"role": "user", "content": "x" * 50}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.APIStatusError) as large:
            await create(model=MODEL, messages=[{"role": "user", "content": "x" * 5_000_000}])
        assert large.value.status_code == 413
        generator.entry_error = ChainUnavailable("no chain")
        with pytest.raises(openai.InternalServerError) as lost:
            await create(model=MODEL, messages=_MESSAGES, stream=True)
        assert lost.value.status_code == 503


async def test_error_in_a_stream() -> None:
    generator = ScriptedGenerator(lambda request: [97, ChainUnavailable("stage 1 was lost")])
    async with serving(generator) as url, openai_client(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="stage 1 was lost"):
            async for _ in stream:
                pass


async def test_closing_a_stream_frees_the_generation() -> None:
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [97, never])
    async with serving(generator) as url, openai_client(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
        await anext(aiter(stream))
        assert generator.active == 1
        await stream.close()
        await generator.idle.wait()


async def test_sync_client() -> None:
    def talk(url: str) -> tuple[str | None, str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=_MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=_MESSAGES, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            done = client.completions.create(model=MODEL, prompt=[1, 2, 3])
            return whole.choices[0].message.content, text, done.choices[0].text

    async with serving(ScriptedGenerator(say("hello"))) as url:
        assert await trio.to_thread.run_sync(talk, url) == ("hello", "hello", "hello")
