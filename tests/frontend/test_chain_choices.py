"""Choices and log-probabilities of real chains: toy stages behind the endpoint, and the official client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import attrs
import openai
import pytest
import trio

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.choices import choice_sampling
from skippy.frontend.generation import GenerationRequest
from skippy.frontend.running import GenerationTask
from skippy.protocol import MessageKind as K, SamplingConfig
from tests.stage.test_chain import PROMPT, generator_over, unsplit_tokens
from tests.stage.test_logprobs import unsplit_scores
from tests.support.cluster import toy_cluster

from .support import serving
from .test_restoring import CHUNK, ON, SAMPLED, caching_chain

all_chains = pytest.mark.parametrize("stages", [1, 3])


def decoded(tokens: list[int]) -> str:
    pieces = map(ToyVocabulary(512).piece, tokens)
    return b"".join(pieces).decode("utf-8", "replace")


async def ask(generator: Any, request: GenerationRequest, n: int) -> GenerationTask:
    async def prepare() -> list[GenerationRequest]:
        return [request]

    task = GenerationTask(generator, prepare, (), n=n, stall_secs=10, buffer=4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        results = await task.results()
    for number, result in enumerate(results):
        expected = unsplit_tokens(PROMPT, 5, choice_sampling(request.sampling, number))
        assert result.text == decoded(expected), number
    return task


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3, 7])
async def test_the_prompt_is_computed_once(stages: int, n: int) -> None:
    """Also where there are more choices than lanes; the next request finds it, and counts it as cached."""
    request = GenerationRequest(prompt=PROMPT, max_tokens=5, sampling=SAMPLED)
    async with caching_chain(stages, lanes=3, config=attrs.evolve(ON, extra_sequences=8)) as chain:
        task = await ask(chain.generator, request, n)
        assert (task.usage.prompt_tokens, task.usage.completion_tokens) == (len(PROMPT), 5 * n)
        assert task.usage.cached_tokens == 0
        chunks = -(-(len(PROMPT) - 1) // CHUNK)
        if stages > 1:
            assert chain.count(K.PREFILL_EMBD) == chunks
        restored = [choice.timings.cached_tokens for choice in task.choices]
        assert restored == [len(PROMPT) - 1] * n
        again = await ask(chain.generator, request, n)
        assert again.usage.cached_tokens == len(PROMPT) - 1
        if stages > 1:
            assert chain.count(K.PREFILL_EMBD) == chunks


async def test_without_a_cache_each_computes_it() -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=5, sampling=SAMPLED)
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster, generator_over(cluster) as generator:
            task = await ask(generator, request, 4)
    assert [choice.timings.cached_tokens for choice in task.choices] == [0] * 4


async def test_a_short_prompt_is_not_shared() -> None:
    request = GenerationRequest(prompt=PROMPT[:3], max_tokens=2)
    async with caching_chain(2) as chain:
        assert await chain.generator.share(request) == 0
        assert chain.count(K.CONFIGURE_GENERATION) == 0


async def test_choices_do_not_wait_for_each_others_lanes() -> None:
    """Two requests with more choices than lanes each: all of them end."""
    request = GenerationRequest(prompt=PROMPT, max_tokens=5, sampling=SAMPLED)
    async with caching_chain(2, lanes=2) as chain, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, chain.generator, request, 5)


@contextlib.asynccontextmanager
async def endpoint(stages: int) -> AsyncIterator[openai.AsyncOpenAI]:
    with trio.fail_after(60):
        async with (
            toy_cluster(stages) as cluster,
            generator_over(cluster, lanes=2) as generator,
            serving(cast(Any, generator)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


@all_chains
@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_are_the_unsplit_models(stages: int, top: int) -> None:
    vocabulary = ToyVocabulary(512)
    prompt, seed = list(PROMPT), 5
    sampling = attrs.evolve(SamplingConfig(flags=1, temperature=1, top_p=1, top_k=40, min_p=0.05), seed=seed)
    tokens = unsplit_tokens(PROMPT, 12, sampling)
    expected = unsplit_scores(prompt, tokens, top)
    fields: dict[str, Any] = {"max_tokens": 12, "seed": seed, "logprobs": top, "temperature": 1, "top_p": 1}
    async with endpoint(stages) as client:
        whole = await client.completions.create(model="toy", prompt=prompt, **fields)
        stream = await client.completions.create(model="toy", prompt=prompt, stream=True, **fields)
        chunks = [chunk.choices[0] async for chunk in stream]
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs == pytest.approx([each.chosen.log_probability for each in expected], abs=1e-5)
    pieces = [vocabulary.piece(token, special=True) for token in tokens]
    assert found.tokens == [
        piece.decode() if piece.isascii() else f"bytes:\\x{piece[0]:02x}" for piece in pieces
    ]
    assert found.top_logprobs is not None
    for position, likeliest in zip(expected, found.top_logprobs, strict=True):
        assert top <= len(likeliest) <= top + 1
        least = min([position.chosen, *position.top], key=lambda each: each.log_probability)
        assert min(likeliest.values()) == pytest.approx(least.log_probability, abs=1e-5)
    assert "".join(chunk.text for chunk in chunks) == whole.choices[0].text == decoded(tokens)
    streamed = [name for chunk in chunks if chunk.logprobs for name in chunk.logprobs.tokens or ()]
    assert streamed == found.tokens
    offsets = [at for chunk in chunks if chunk.logprobs for at in chunk.logprobs.text_offset or ()]
    assert offsets == found.text_offset


@all_chains
async def test_chat_logprobs_have_the_bytes_of_the_text(stages: int) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    create: dict[str, Any] = {
        "model": "toy", "messages": messages, "max_tokens": 12, "seed": 3, "logprobs": True, "n": 2,
    }  # fmt: skip
    async with endpoint(stages) as client:
        whole = await client.chat.completions.create(**create, top_logprobs=20)
        stream = await client.chat.completions.create(**create, top_logprobs=20, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        plain = await client.chat.completions.create(**{**create, "logprobs": False})
        assert all(choice.logprobs is None for choice in plain.choices)
    for choice in whole.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        data = b"".join(bytes(token.bytes or ()) for token in content)
        assert data.decode("utf-8", "replace") == choice.message.content
        for token in content:
            assert len(token.top_logprobs) == 20
            assert token.logprob <= token.top_logprobs[0].logprob <= 0
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        streamed = [each for chunk in own if chunk.logprobs for each in chunk.logprobs.content or ()]
        assert streamed == content
        assert "".join(chunk.delta.content or "" for chunk in own) == choice.message.content
