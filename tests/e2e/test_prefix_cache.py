"""A chain of processes that remembers prompts, seen by its clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.processes import running

from .support import Served, client_of, serve

SYSTEM = (
    "You are the keeper of a lighthouse on a small island in the north. You know the tides, the birds and "
    "the ships, and you answer each question in one or two plain sentences. You never speak of the weather "
    "unless somebody asks for it, and you never use a word that a child would not know. If you are not sure, "
    "you say so. When somebody asks for a list, you give three things and no more. You like short words."
)
QUESTIONS = (
    "Name three birds that live by the sea.",
    "Why is the sea salty?",
    "What does a lighthouse do at night?",
    "How do you boil an egg?",
)


@pytest.fixture(scope="module")
def chain(bundled_model: Path) -> Iterator[Served]:
    """Prompts of up to 256 tokens go as one chunk, whatever was measured."""
    with serve(bundled_model, 3, "--lane-count", "8", "--ctx-size", "1024") as served:
        yield served


def ask(served: Served, messages: list[dict[str, Any]], key: str = "none", **fields: Any) -> Any:
    client = client_of(served.url, key)
    body: Any = {"messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(model=served.model, **body)


def question(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def content(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def report(served: Served) -> Any:
    return httpx.get(served.url.removesuffix("/v1") + "/kv", timeout=20).json()


def forget(served: Served) -> None:
    answer = httpx.delete(served.url.removesuffix("/v1") + "/kv", timeout=60)
    assert answer.status_code == 200, answer.text


def test_cold_and_warm_answers_are_the_same(chain: Served) -> None:
    """Asked again, all but the last token of a prompt is there, and so are the first tokens of its answer."""
    forget(chain)
    cold = []
    for text in QUESTIONS:
        answer = ask(chain, question(text), key=f"cold {text}")  # nobody else's prompts are of use
        assert cached(answer) == 0
        assert answer.timings["cache_n"] == 0
        assert answer.timings["suffix_prefill_n"] == answer.usage.prompt_tokens - 1
        cold.append(content(answer))
    for text, right in zip(QUESTIONS, cold, strict=True):
        answer = ask(chain, question(text), key=f"cold {text}")
        assert content(answer) == right
        assert cached(answer) >= answer.usage.prompt_tokens - 1
        assert answer.timings["suffix_prefill_n"] == 0
        seeded = ask(chain, question(text), key=f"cold {text}", temperature=0.9, seed=5)
        again = ask(chain, question(text), key=f"cold {text}", temperature=0.9, seed=5)
        assert content(seeded) == content(again)
        assert cached(again) == answer.usage.prompt_tokens - 1


def test_a_shared_beginning_is_computed_once(chain: Served) -> None:
    forget(chain)
    first = ask(chain, question(QUESTIONS[0]), key="shared")
    for text in QUESTIONS[1:]:
        answer = ask(chain, question(text), key="shared")
        assert cached(answer) > 100
        assert answer.timings["suffix_prefill_n"] < 30
        assert answer.timings["cache_restore_ms"] > 0
    assert cached(first) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_of_a_chat_computes_only_what_is_new(chain: Served, stream: bool) -> None:
    """Prompt and answer of the turn before are there, though its lane may still be being cleaned."""
    forget(chain)
    messages, known = question(QUESTIONS[0]), 0
    for text in (*QUESTIONS[1:], None):
        if stream:
            chunks = list(ask(chain, messages, stream=True, stream_options={"include_usage": True}))
            said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            finish = next(
                c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
            )
            answer = chunks[-1]
        else:
            answer = ask(chain, messages)
            said, finish = content(answer), answer.choices[0].finish_reason
        assert cached(answer) == known
        usage = answer.usage
        assert answer.timings["suffix_prefill_n"] == usage.prompt_tokens - 1 - known
        # Of an answer that was cut off, the last token was never computed.
        known = usage.prompt_tokens + usage.completion_tokens - (finish == "length")
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": text or ""},
        ]


def test_tenants_never_share(chain: Served) -> None:
    forget(chain)
    keys = [("a", None), ("b", None), ("a", "k"), ("b", "k"), ("a", "l")]
    for key, cache_key in keys:
        answer = ask(chain, question(QUESTIONS[1]), key=key, extra_body={"prompt_cache_key": cache_key})
        assert cached(answer) == 0, (key, cache_key)
    for key, cache_key in keys:
        answer = ask(chain, question(QUESTIONS[1]), key=key, extra_body={"prompt_cache_key": cache_key})
        assert cached(answer) >= answer.usage.prompt_tokens - 1, (key, cache_key)
    assert [stage["holds"]["namespaces"] for stage in report(chain)["stages"]] == [len(keys)] * 3


def test_clients_that_leave_while_their_prompt_is_restored(chain: Served) -> None:
    forget(chain)
    right = content(ask(chain, question(QUESTIONS[2])))
    body = {"model": chain.model, "messages": question(QUESTIONS[2]), "temperature": 0, "stream": True}
    for number in range(12):
        with httpx.stream("POST", chain.url + "/chat/completions", json=body, timeout=20) as response:
            if number % 2:
                next(response.iter_lines())
    answer = ask(chain, question(QUESTIONS[2]))
    assert content(answer) == right
    assert report(chain)["chain"]["lookup_errors"] == 0


def test_many_clients_over_more_prompts_than_sequences(chain: Served) -> None:
    """Entries go and come, sessions always get a sequence, and no client hears of it."""
    forget(chain)
    prompts = [f"{SYSTEM} Question {number}: {QUESTIONS[number % 4]}" for number in range(16)]

    def client(first: int) -> list[int]:
        with httpx.Client(timeout=120) as http:
            return [
                http.post(
                    chain.url + "/completions",
                    json={"model": chain.model, "prompt": prompts[(first + 5 * step) % 16], "max_tokens": 3},
                ).status_code
                for step in range(4)
            ]

    with ThreadPoolExecutor(8) as pool:
        assert {status for statuses in pool.map(client, range(8)) for status in statuses} == {200}
    seen = report(chain)
    assert [stage["holds"]["live"] for stage in seen["stages"]] == [0] * 3
    assert all(stage["counters"]["evicted_resident"] > 0 for stage in seen["stages"])
    assert seen["chain"]["lookup_errors"] == 0


def test_the_command_that_looks_inside(chain: Served) -> None:
    forget(chain)
    answer = ask(chain, question(QUESTIONS[3]))

    def kv(*arguments: str) -> str:
        with running(["kv", *arguments, "--url", chain.url]) as process:
            assert process.wait(60) == 0, process.output()
        return process.output()

    tokens = answer.usage.total_tokens - (answer.choices[0].finish_reason == "length")
    lines = kv("ls").splitlines()[1:]
    for index, line in enumerate(lines):
        assert re.fullmatch(rf"{index} +[0-9a-f]{{16}} +{tokens} +sequence \d+ .*", line)
    assert len(lines) == 3
    stats = kv("stats")
    assert all(f"stage {index}: holds.entries: 1" in stats for index in range(3))
    assert "stage 0 1 entries" in kv("drop", "--namespace", lines[0].split()[1][:8])
    assert kv("ls").count("\n") == 0
    assert cached(ask(chain, question(QUESTIONS[3]))) == 0


@pytest.mark.slow
def test_what_is_on_disk_outlives_the_chain(bundled_model: Path, tmp_path: Path) -> None:
    """A stop waits for what is being written. Another cut has another identity: nothing of it is read, and
    the answer is the same, also unsplit, cold and known."""
    options = ("--lane-count", "2", "--ctx-size", "1024", "--kv-dir", str(tmp_path))
    with serve(bundled_model, 2, *options) as served:
        answer = ask(served, question(QUESTIONS[0]), prompt_cache_retention="24h")
        right, count = content(answer), answer.usage.prompt_tokens
        assert cached(answer) == 0
    with serve(bundled_model, 2, *options) as served:
        answer = ask(served, question(QUESTIONS[0]))
        assert (content(answer), cached(answer)) == (right, count - 1)
    for stages in (3, 1):
        with serve(bundled_model, stages, *options) as served:
            cold, known = (ask(served, question(QUESTIONS[0])) for _ in range(2))
            assert (content(cold), cached(cold)) == (right, 0)
            assert (content(known), cached(known) >= count - 1) == (right, True)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_has_died_remembers_nothing_and_nobody_notices(bundled_model: Path, index: int) -> None:
    with serve(bundled_model, 3, "--lane-count", "2", "--ctx-size", "1024") as served:
        right = content(ask(served, question(QUESTIONS[0])))
        assert cached(ask(served, question(QUESTIONS[0]))) > 0
        pid = int(served.process.wait_for(rf"stage-{index} .* process (\d+)")[1])
        psutil.Process(pid).kill()
        served.process.wait_for("a stage is up again")
        answer = ask(served, question(QUESTIONS[0]))
        assert cached(answer) == 0
        assert content(answer) == right
        assert cached(ask(served, question(QUESTIONS[0]))) > 0
