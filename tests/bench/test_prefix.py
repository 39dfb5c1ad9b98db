"""The benchmark of the prefix cache: what it asks, in which order, and how it judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from bench.common import BenchError, Report, Spread
from bench.load import Job, LoadProcess, Outcome
from bench.prefix import (
    CASES,
    COLD,
    FIRST,
    NEXT,
    OTHER,
    SAME,
    SECOND_MESSAGE,
    Client,
    Sample,
    Samples,
    Settings,
    against_arm,
    against_cold,
    goals,
    measure_round,
    rows_of,
    show,
)
from bench.servers import Server
from tests.bench.test_load import HEAD, chunk, scripted

SETTINGS: Any = {
    "model": Path(__file__), "arms": ["a", "b"], "rounds": 1, "prefix": 20, "tail": 3, "tails": 2,
    "threads": 2, "stage_threads": 1, "lanes": 2, "context": 256, "peer_python": "python", "more": [],
}  # fmt: skip


class Load(LoadProcess):
    """Answers at once, and keeps what was asked for."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, job: Job) -> list[Outcome]:
        self.jobs.append(job)
        common: Any = {"client": 0, "status": 200, "started": 1.0, "ended": 3.0, "times": [1.5]}
        return [Outcome(**common, text=f"answer {len(self.jobs)}", prompt_tokens=25, cached_tokens=20)]


def client(name: str, load: LoadProcess, port: int = 1) -> Client:
    return Client(Server(name=name, host="127.0.0.1", port=port, model="m", pid=0, extra={"x": 1}), load)


def empty() -> Samples:
    return {case: {"a": [], "b": []} for case in CASES}


def test_a_round_asks_every_server_the_same_and_nobody_has_seen_it_before() -> None:
    loads, samples = {"a": Load(), "b": Load()}, empty()
    clients = [client(name, load) for name, load in loads.items()]
    for number in range(2):
        measure_round(clients, Settings(**SETTINGS), number, samples)
    bodies = {name: [job.clients[0][0] for job in load.jobs] for name, load in loads.items()}
    assert bodies["a"] == bodies["b"]
    prompts = [body["prompt"] for body in bodies["a"] if "prompt" in body]
    cold, one, again, two, again_two, next_cold = prompts[:6]
    assert one == again
    assert two == again_two
    assert len({cold, one, two, next_cold}) == 4
    prefix = cold.split()[:20]
    assert one.split()[:20] == two.split()[:20] == prefix != next_cold.split()[:20]
    assert [len(prompt.split()) for prompt in prompts] == [23] * 10
    chats = [body["messages"] for body in bodies["a"] if "messages" in body]
    assert chats[0][0]["content"] != chats[2][0]["content"]
    assert chats[1] == [
        *chats[0],
        {"role": "assistant", "content": "answer 6"},
        {"role": "user", "content": SECOND_MESSAGE},
    ]
    assert bodies["a"][0]["stream_options"] == {"include_usage": True}
    assert all(body["x"] == 1 for body in bodies["a"])
    counts = {case: len(samples[case]["a"]) for case in CASES}
    assert counts == {COLD: 2, OTHER: 4, SAME: 4, FIRST: 2, NEXT: 2}
    assert samples[OTHER]["b"][0] == Sample(0.5, 25, 20)


def rounded(spread: Spread) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in attrs.astuple(spread))


def test_ratios_are_of_pairs() -> None:
    samples = empty()
    samples[COLD] = {"a": [Sample(1.0), Sample(2.0)], "b": [Sample(4.0), Sample(4.0)]}
    seconds = {"a": [0.1, 0.3, 0.2, 0.4], "b": [0.2, 0.2, 0.4, 0.4]}
    samples[OTHER] = {arm: [Sample(s, 25, 20) for s in found] for arm, found in seconds.items()}
    assert rounded(against_cold(samples, "a", OTHER)) == (0.15, 0.1, 0.3)
    assert rounded(against_arm(samples, "a", "b", OTHER)) == (0.75, 0.5, 1.5)


def test_the_report_says_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    samples = empty()
    for case, (a, b) in {
        COLD: (1.0, 1.0), OTHER: (0.05, 0.06), SAME: (0.2, 0.05), FIRST: (1.0, 1.0), NEXT: (0.1, 0.1),
    }.items():  # fmt: skip
        samples[case] = {"a": [Sample(a, 25, 20)], "b": [Sample(b)]}
    assert goals(samples, ["a", "b"]) == [
        "a, other tail / cold: 0.050 (0.050 to 0.050), to be at most 0.1: holds",
        "a, other tail / b: 0.833 (0.833 to 0.833), to be at most 1: holds",
        "a, same prompt / cold: 0.200 (0.200 to 0.200), to be at most 0.1: DOES NOT HOLD",
        "a, same prompt / b: 4.000 (4.000 to 4.000), to be at most 1: DOES NOT HOLD",
        "a, next turn / cold: 0.100 (0.100 to 0.100), to be at most 0.1: holds",
        "a, next turn / b: 1.000 (1.000 to 1.000), to be at most 1: holds",
    ]
    assert len(goals(samples, ["a"])) == 3
    rows = rows_of(samples, ["a", "b"])
    other = ["other tail", "a", "50.0 (50.0 to 50.0)", "20 of 25", "0.050 (0.050 to 0.050)"]
    assert rows[2] == [*other, "0.83 (0.83 to 0.83)"]
    assert rows[3][3:] == ["? of ?", "0.060 (0.060 to 0.060)", ""]
    assert rows[0][4] == ""
    show(samples, Settings(**SETTINGS), Report(None, "prefix"))
    assert "a prefix of 20 tokens and tails of 3" in capsys.readouterr().out


def event(**value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_a_chat_is_read_and_what_was_cached_too() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    body = (
        event(choices=[{"delta": {"role": "assistant", "content": None}}])
        + event(choices=[{"delta": {"content": "Hel"}}])
        + event(choices=[{"delta": {"content": "lo"}, "finish_reason": "length"}])
        + event(choices=[], usage=usage)
        + b"data: [DONE]\n\n"
    )
    stream = HEAD + chunk(body) + chunk(b"")
    with scripted([stream, stream]) as (port, requests), LoadProcess() as load:
        asked = client("a", load, port)
        sample = asked.say("Hello?", anew=True)
        asked.say("Again?", anew=False)
    assert (sample.prompt_tokens, sample.cached_tokens) == (9, 7)
    assert sample.seconds > 0
    assert requests[0].startswith(b"POST /v1/chat/completions ")
    sent = json.loads(requests[1].partition(b"\r\n\r\n")[2])
    assert [message["content"] for message in sent["messages"]] == ["Hello?", "Hello", "Again?"]


def test_a_request_that_fails_ends_the_benchmark() -> None:
    failed = Outcome(client=0, status=429, started=0, ended=1, error="full")
    with pytest.raises(BenchError, match="a: a request failed: 429 full"):
        Sample.of("a", failed)
