"""The served chain of three processes, seen through the official client and raw HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trio
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletion

from skippy.engine import EngineOptions, Vocabulary
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo

from .support import Served, client_of, serve

MESSAGES: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
TEXT = "Once upon a time, in a small village by the sea, there lived"


def chat(served: Served, **fields: Any) -> ChatCompletion:
    fields = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, **fields}
    result = client_of(served.url).chat.completions.create(model=served.model, **fields)
    assert isinstance(result, ChatCompletion)
    return result


@pytest.fixture(scope="module")
def vocabulary(bundled_model: Path) -> Vocabulary:
    options = EngineOptions(context_length=64, max_sequences=1)
    vocabulary = LlamaEngine.load(SliceInfo.from_file(bundled_model), options).vocabulary
    assert vocabulary is not None
    return vocabulary


def test_greedy_text_is_the_same_for_one_two_and_three_stages(bundled_model: Path, chain: Served) -> None:
    def texts(served: Served) -> tuple[Any, ...]:
        """With the log-probabilities, which the last stage sends with each token."""
        completion = client_of(served.url).completions.create(
            model=served.model, prompt=TEXT, max_tokens=48, temperature=0, logprobs=3
        )
        answer = chat(served, max_tokens=48).choices[0].message.content
        scores = completion.choices[0].logprobs
        assert scores is not None
        assert "".join(scores.tokens or ()) == completion.choices[0].text
        likeliest = [max(top, key=lambda token: top[token]) for top in scores.top_logprobs or ()]
        assert likeliest == scores.tokens
        return answer, completion.choices[0].text, scores.token_logprobs, scores.top_logprobs

    expected = texts(chain)
    assert all(expected)
    for stages in (1, 2):
        with serve(bundled_model, stages) as served:
            assert texts(served) == expected, f"{stages} stages"


def test_choices_and_all_that_samplers_do(chain: Served) -> None:
    """Of several choices the first is what one alone would be; a seed gives the same again."""
    everything = {
        "top_k": 50, "min_p": 0.01, "typical_p": 0.98, "top_n_sigma": 3, "dynatemp_range": 0.2,
        "repeat_penalty": 1.1, "dry_multiplier": 0.5, "xtc_probability": 0.2, "logit_bias": [[1000, -5]],
        "samplers": "edskypmxt",
    }  # fmt: skip
    for extra in (everything, {"mirostat": 1, "mirostat_tau": 4}, {"mirostat": 2, "mirostat_tau": 4}):
        fields: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 12, "extra_body": extra}
        alone = chat(chain, **fields)
        assert chat(chain, **fields).choices[0].message == alone.choices[0].message
        three = chat(chain, n=3, logprobs=True, **fields)
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in three.choices]
        assert len(set(texts)) == 3
        assert three.usage is not None
        assert alone.usage is not None
        assert three.usage.prompt_tokens == alone.usage.prompt_tokens
        counts = [len((choice.logprobs and choice.logprobs.content) or ()) for choice in three.choices]
        assert three.usage.completion_tokens == sum(counts)


def test_uneven_cuts_change_nothing(bundled_model: Path, chain: Served) -> None:
    with serve(bundled_model, None, "--splits", "1,29") as served:
        assert chat(served).choices[0].message == chat(chain).choices[0].message


def test_usage_counts_what_the_tokenizer_counts(chain: Served, vocabulary: Vocabulary) -> None:
    completion = client_of(chain.url).completions.create(
        model=chain.model, prompt=TEXT, max_tokens=20, temperature=0
    )
    prompt = vocabulary.tokenize(TEXT, add_special=True, parse_special=True)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 20
    assert completion.usage.total_tokens == len(prompt) + 20
    assert completion.choices[0].finish_reason == "length"
    text = vocabulary.tokenize(completion.choices[0].text, add_special=False, parse_special=False)
    assert len(text) == pytest.approx(20, abs=2)  # merging may differ at the borders


def test_streaming_gives_the_same_text_and_usage(chain: Served) -> None:
    whole = chat(chain)
    pieces, usage, ids = [], None, set()
    stream = client_of(chain.url).chat.completions.create(
        model=chain.model,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage == whole.usage
    assert len(ids) == 1
    text = client_of(chain.url).completions.create(
        model=chain.model, prompt=TEXT, max_tokens=12, temperature=0, stream=True
    )
    streamed = "".join(chunk.choices[0].text for chunk in text if chunk.choices)
    completion = client_of(chain.url).completions.create(
        model=chain.model, prompt=TEXT, max_tokens=12, temperature=0
    )
    assert streamed == completion.choices[0].text


def test_the_async_client_works_under_trio(chain: Served) -> None:
    async def main() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=chain.url, api_key="none", max_retries=0) as asynchronous:
            whole = await asynchronous.chat.completions.create(
                model=chain.model, messages=MESSAGES, max_tokens=24, temperature=0
            )
            stream = await asynchronous.chat.completions.create(
                model=chain.model, messages=MESSAGES, max_tokens=24, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            return whole.choices[0].message.content, "".join(pieces)

    whole, streamed = trio.run(main)
    assert whole == streamed == chat(chain).choices[0].message.content


def answers(served: Served, requests: Sequence[dict[str, Any]], at_once: int) -> list[str | None]:
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(chat, served, **fields) for fields in requests]
        return [future.result().choices[0].message.content for future in futures]


REQUESTS: list[dict[str, Any]] = [
    {"seed": 7, "temperature": 0.9, "max_tokens": 40},
    {"seed": 8, "temperature": 1.1, "top_p": 0.8, "presence_penalty": 0.5, "max_tokens": 40},
    {"max_tokens": 40, "messages": [{"role": "user", "content": "Count to ten."}]},
]


def test_two_clients_at_once_get_what_each_would_get_alone(chain: Served) -> None:
    alone = answers(chain, REQUESTS, 1)
    assert answers(chain, REQUESTS, 3) == alone
    assert len(set(alone)) == 3


def test_in_safe_mode_answers_do_not_depend_on_what_else_runs(bundled_model: Path) -> None:
    """Prompts of several chunks beside decode steps; more requests than lanes, in another order."""
    long = [{"role": "user", "content": "Say it again: the quick brown fox jumps over the lazy dog. " * 24}]
    requests = [
        *({**fields, "max_tokens": 16} for fields in REQUESTS),
        {"seed": 9, "temperature": 0.8, "max_tokens": 8, "messages": long},
        {"max_tokens": 8},
    ]
    with serve(bundled_model, 3, env={"SKIPPY_ITERATION_SCHEDULER_SAFE_MODE": "1"}) as served:
        served.process.wait_for("safe mode: one sequence at a time")
        alone = answers(served, requests, 1)
        assert answers(served, requests[::-1], 5)[::-1] == alone
        assert len(set(alone)) == 5


def test_errors_are_the_clients_typed_exceptions(chain: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client_of(chain.url).chat.completions.create(model="nonesuch", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as several:
        chat(chain, n=129)
    assert several.value.param == "n"
    with pytest.raises(openai.BadRequestError) as long:
        client_of(chain.url).completions.create(model=chain.model, prompt="word " * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as typed:
        chat(chain, temperature="hot")
    assert typed.value.param == "temperature"
    assert chat(chain, max_tokens=3).usage is not None


BAD_BODIES = {
    "malformed JSON": b'{"model": ',
    "bad UTF-8": b'{"model": "\xff"}',
    "not an object": b"[1, 2]",
    "NaN": b'{"model": "m", "messages": [], "temperature": NaN}',
    "deep nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies_get_an_envelope_and_the_server_goes_on(chain: Served, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/chat/completions", "/completions"):
        response = httpx.post(chain.url + path, content=BAD_BODIES[name], headers=headers, timeout=60)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert httpx.get(chain.url.removesuffix("/v1") + "/readyz", timeout=60).json()["status"] == "ready"


def test_a_disconnect_frees_the_lane_at_once(bundled_model: Path) -> None:
    """With a single lane the next answer can only come once the abandoned one of 3,000 tokens is gone."""
    with serve(bundled_model, 3, "--lane-count", "1") as served:
        body = {"model": served.model, "prompt": TEXT, "max_tokens": 3000, "stream": True, "ignore_eos": True}
        for _ in range(3):
            with httpx.stream("POST", served.url + "/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                events = [json.loads(line[6:]) for line in (next(lines) for _ in range(5)) if line]
                assert events
                assert "error" not in events[0]
            with httpx.Client(timeout=20) as http:
                answer = http.post(
                    served.url + "/completions",
                    json={"model": served.model, "prompt": TEXT, "max_tokens": 4, "temperature": 0},
                )
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_stop_string_ends_the_text_before_it(chain: Served) -> None:
    whole = chat(chain, max_tokens=60).choices[0].message.content or ""
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    choice = chat(chain, max_tokens=60, stop=[stop, "\x00never"]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_logit_bias_reaches_the_last_stage(chain: Served, vocabulary: Vocabulary) -> None:
    token = vocabulary.tokenize(" banana", add_special=False, parse_special=False)[0]
    completion = client_of(chain.url).completions.create(
        model=chain.model, prompt=TEXT, max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert completion.choices[0].text == vocabulary.piece(token).decode() * 3


def test_text_that_the_tokenizer_cannot_take_is_a_400_and_not_a_crash(chain: Served) -> None:
    """llama.cpp's pre-tokenizers recurse over a word; the engine refuses what would overflow the stack."""
    word = "a" * 70_000
    for fields in ({"prompt": word}, {"messages": [{"role": "user", "content": word}]}):
        path = "/completions" if "prompt" in fields else "/chat/completions"
        response = httpx.post(
            chain.url + path, json={"model": chain.model, "max_tokens": 1, **fields}, timeout=60
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert chat(chain, max_tokens=3).usage is not None


def test_the_other_routes_give_what_chat_gives(chain: Served) -> None:
    expected = chat(chain).choices[0].message.content
    response = client_of(chain.url).responses.create(
        model=chain.model, input=MESSAGES, max_output_tokens=24, temperature=0
    )
    assert response.output_text == expected
    follow = client_of(chain.url).responses.create(
        model=chain.model,
        input="And another one?",
        previous_response_id=response.id,
        max_output_tokens=8,
        temperature=0,
    )
    assert response.usage is not None
    assert follow.usage is not None
    assert follow.usage.input_tokens > response.usage.total_tokens
    url = chain.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as api:
        keys: Any = {"model": chain.model, "messages": MESSAGES, "max_tokens": 24}
        with api.messages.stream(**keys, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == expected
        counted = api.messages.count_tokens(model=chain.model, messages=MESSAGES)
    assert counted.input_tokens == response.usage.input_tokens
    langchain = ChatOpenAI(
        base_url=chain.url, api_key=lambda: "none", model=chain.model, temperature=0, max_tokens=24
    )
    assert langchain.invoke(MESSAGES).content == expected


def test_tokens_and_prompts_of_the_real_tokenizer(chain: Served, vocabulary: Vocabulary) -> None:
    with httpx.Client(base_url=chain.url, timeout=60) as http:
        prompt = http.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
        tokens = http.post("/tokenize", json={"content": prompt}).json()["tokens"]
        assert tokens == vocabulary.tokenize(prompt, add_special=False, parse_special=True)
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": prompt}
        identity = http.get("/tokenize").json()["identity"]
        batch = {"requests": [{"text": TEXT, "identity": identity}]}
        (result,) = http.post("/tokenize", json=batch).json()["results"]
    assert result["tokens"] == vocabulary.tokenize(TEXT, add_special=False, parse_special=False)
