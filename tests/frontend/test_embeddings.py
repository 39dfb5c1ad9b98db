"""``/v1/embeddings``: the route, and what a stage computes for it."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import trio

from skippy import embed
from skippy.config import OpenAIOptions
from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.generation import TooManyRequests
from tests.support.cluster import LAYERS, toy_cluster

from .support import MODEL, ScriptedGenerator, client, say, serving


def generator(size: int | None = 4) -> ScriptedGenerator:
    result = ScriptedGenerator(say("x"))
    result.embedding_size = size
    return result


async def test_texts_and_token_ids() -> None:
    async with client(generator()) as http:
        for value, counts in (("ab", [3]), (["", "abcd"], [1, 5]), ([5, 6], [2]), ([[5], [6, 7]], [1, 2])):
            answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": value})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert [item["index"] for item in body["data"]] == list(range(len(counts)))
            assert [item["embedding"].index(1) for item in body["data"]] == [n % 4 for n in counts]
            assert body["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
            assert (body["object"], body["model"]) == ("list", MODEL)


async def test_the_official_client_reads_both_encodings() -> None:
    async with (
        serving(generator()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        for form in (openai.omit, "float", "base64"):
            keys: Any = {"encoding_format": form, "dimensions": 4}
            answer = await api.embeddings.create(model=MODEL, input="ab", **keys)
            vector = answer.data[0].embedding
            if form == "base64":
                assert vector == "AAAAAAAAAAAAAAAAAACAPw=="
            else:
                assert vector == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a"}, "model"),
        ({"model": MODEL}, "input"),
        ({"model": MODEL, "input": []}, "input"),
        ({"model": MODEL, "input": ["a", 5]}, "input[1]"),
        ({"model": MODEL, "input": [5, 260]}, "input[0][1]"),
        ({"model": MODEL, "input": [[5], []]}, "input[1]"),
        ({"model": MODEL, "input": "x" * 600}, "input[0]"),
        ({"model": MODEL, "input": "a", "dimensions": 3}, "dimensions"),
        ({"model": MODEL, "input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"model": MODEL, "input": ["a"] * 2049}, "input"),
    ],
)
async def test_faults_are_named(body: dict[str, Any], param: str) -> None:
    async with client(generator()) as http:
        answer = await http.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_chain_refuses() -> None:
    async with client(generator(None)) as http:
        answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model_feature")


async def test_a_full_queue_is_429() -> None:
    busy = generator()
    busy.entry_error = TooManyRequests("all lanes are busy")
    async with client(busy) as http:
        answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_a_stage_computes_them_piece_by_piece_and_frees_its_sequence() -> None:
    text = "x" * 300  # of two pieces
    engine = ToyEngine(0, LAYERS, LAYERS)
    tokens = [ToyVocabulary.BOS, *text.encode()]
    rows = engine.embed(Segment(0, 0, len(tokens), tokens=tokens))
    expected = rows[-1] / np.linalg.norm(rows[-1])
    with trio.fail_after(30):
        async with (
            toy_cluster(1, ctx_size=512) as cluster,
            embed.open_openai(cluster.first, OpenAIOptions(bind_addr="127.0.0.1:0")) as endpoint,
            httpx.AsyncClient(base_url=endpoint.url, timeout=30) as http,
        ):
            await endpoint.wait_ready()
            model = cluster.first.config.model_id
            body = {"model": model, "input": [text, "y"]}
            first, second = (await http.post("/embeddings", json=body)).json()["data"]
            assert first["embedding"] == pytest.approx(expected, abs=1e-6)
            assert first["embedding"] != second["embedding"]
            assert math.hypot(*second["embedding"]) == pytest.approx(1, abs=1e-6)
            assert cluster.free_sequences == [cluster.first.info.max_sequences]
            # The stage goes on as before.
            prompt = {"model": model, "prompt": "hi", "max_tokens": 4, "temperature": 0}
            answer = await http.post("/completions", json=prompt)
            assert answer.json()["usage"]["completion_tokens"] == 4
