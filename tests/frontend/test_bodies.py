"""Bodies as clients send them, right and wrong, on a real chain: each gets an answer, and no lane is lost.

Streams are compared with whole answers: what is said must not depend on how.
"""

from __future__ import annotations

import json
import random
from typing import Any, cast

import httpx
import pytest
import trio

from tests.stage.test_chain import generator_over, wait_for_sequences
from tests.support.cluster import toy_cluster

from .support import ScriptedGenerator, client, completion_body, say, serving
from .test_choices import streamed

# What each field may be, the last ones wrong; several of them wrong in ways that only the last stage knows.
FIELDS: dict[str, list[Any]] = {
    "n": [1, 2, 3, 0, 129, "1"],
    "seed": [0, 7, -1, 2**63, 1.5],
    "temperature": [0, 0.7, 1, 2.5, -1, "hot"],
    "top_p": [1, 0.5, 0, 2],
    "top_k": [0, 1, 40, -1, -2, 1.5],
    "min_p": [0, 0.05, 1, -0.1],
    "presence_penalty": [0, 1.5, -2, 3],
    "frequency_penalty": [0, 0.5, -3],
    "repeat_penalty": [1, 1.3, 0],
    "repeat_last_n": [0, 8, -1, -2],
    "logit_bias": [{}, {"65": 5}, [[65, 5], [66, False]], {"600": 1}, {"x": 1}, [[1]]],
    "mirostat": [0, 2, 1, 3],
    "mirostat_tau": [5, 0, -1],
    "typical_p": [1, 0.5, 2],
    "dry_multiplier": [0, 0.8, -1],
    "samplers": [["top_k", "temperature"], "kt", ["infill"], "z"],
    "ignore_eos": [True, False, 1],
    "stop": ["a", ["ab", "b"], "", ["x"] * 17],
    "max_tokens": [1, 5, 9, 10**6, 0],
    "stream": [False, True, "yes"],
    "user": ["u", 5],
    "metadata": [{"a": "b"}, {"a": 1}],
    "unheard_of": [None, 1],
}
CHAT: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ],
        [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": "well"}],
        [{"role": "user", "content": "x" * 600}],
        [{"role": "robot", "content": "hi"}],
        [],
    ],
    "logprobs": [True, False, 1],
    "top_logprobs": [0, 5, 20, 21],
}
COMPLETION: dict[str, list[Any]] = {
    "prompt": ["hi", ["a", "b"], [65, 66], [[65], [66, 67]], "", [600], [[1], "x"], 5],
    "logprobs": [0, 5, True, 21],
    "echo": [True, False, 1],
    "best_of": [1, 2],
    "suffix": ["", "x"],
}


def body(draw: random.Random, needed: str, own: dict[str, list[Any]]) -> dict[str, Any]:
    """Mostly right: of each field's values the first ones come most often."""
    fields = {**FIELDS, **own}
    chosen = [needed, *draw.sample(sorted(fields.keys() - {needed}), draw.choice([0, 1, 2, 3, 5, 8]))]
    result: dict[str, Any] = {"model": "toy", "max_tokens": 4}
    for name in chosen:
        values = fields[name]
        result[name] = values[min(int(draw.expovariate(0.7)), len(values) - 1)]
    return result


@pytest.mark.parametrize("stages", [1, 3])
async def test_each_body_gets_an_answer(stages: int) -> None:
    draw = random.Random(stages)
    statuses = []
    with trio.fail_after(60):
        async with (
            toy_cluster(stages) as cluster,
            generator_over(cluster, lanes=2) as generator,
            serving(cast(Any, generator)) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            for _ in range(90 // (stages + 1)):
                for path, needed, own in (
                    ("chat/completions", "messages", CHAT),
                    ("completions", "prompt", COMPLETION),
                ):
                    sent = body(draw, needed, own)
                    answer = await http.post(f"/v1/{path}", json=sent)
                    statuses.append(answer.status_code)
                    check(sent, answer)
            assert generator.gate.running == 0
            await wait_for_sequences(cluster)
    assert set(statuses) == {200, 400}
    assert min(statuses.count(200), statuses.count(400)) > 15


def check(sent: dict[str, Any], answer: httpx.Response) -> None:
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"], sent
        assert error["type"] == "invalid_request_error", (sent, error)
        return
    prompts = sent.get("prompt")
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    count = (sent.get("n") or 1) * (len(prompts) if several and isinstance(prompts, list) else 1)
    if not sent.get("stream"):
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count)), sent
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        return
    assert answer.text.endswith("data: [DONE]\n\n")
    texts, reasons, chunks = streamed(answer.text)
    assert not any("error" in chunk for chunk in chunks), sent
    assert sorted(reasons) == list(range(count)), sent
    assert set(texts) <= set(reasons)


ALPHABET = "abc é\u0301汉字🙂👩🏽\u200d\U0001f1e9\U0001f1ea\n"


async def test_streams_say_what_whole_answers_say() -> None:
    """Stop strings of 1 to 20 characters wherever they fall, with and without log-probabilities."""
    draw = random.Random(7)
    generator = ScriptedGenerator(say(""))
    async with client(generator) as http:
        for _ in range(80):
            text = "".join(draw.choices(ALPHABET, k=draw.randrange(40)))
            start = draw.randrange(len(text) + 1)
            inside = text[start : start + draw.randint(1, 20)]
            stops = [stop for stop in (inside, "".join(draw.choices(ALPHABET, k=3))) if stop]
            generator.script = say(text)
            sent = completion_body(stop=draw.sample(stops, draw.randint(0, len(stops))), max_tokens=200)
            whole = (await http.post("/v1/completions", json=sent)).json()["choices"][0]
            stream = (await http.post("/v1/completions", json={**sent, "stream": True})).text
            texts, reasons, chunks = streamed(stream)
            assert (texts[0], reasons[0]) == (whole["text"], "stop")
            found = [at for stop in sent["stop"] if (at := text.find(stop)) >= 0]
            assert whole["text"] == text[: min(found, default=len(text))]
            # Each chunk is JSON of its own, with whole characters.
            assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
