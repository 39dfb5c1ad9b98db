"""A stage is killed in the middle of an answer: the supervisor brings it back, and the answer goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from skippy.engine import EngineOptions
from skippy.engine.llama import LlamaEngine
from skippy.frontend.fields import Fields
from skippy.frontend.sampling import parse_sampling
from skippy.models import ensure_slice
from tests.support.processes import until_patience_ends
from tests.support.whole_model import WholeModel

from .support import LAYERS, Served, serve

CONTEXT = 256
TOKENS = 150
GREEDY = {"temperature": 0, "ignore_eos": True}
KILL_AFTER = 12
"""Pieces of text that the client has when the stage is killed."""


@pytest.fixture(scope="module")
def whole(bundled_model: Path) -> Iterator[WholeModel]:
    options = EngineOptions(context_length=CONTEXT, max_sequences=1, n_threads=1)
    engine = LlamaEngine.load(ensure_slice(bundled_model, 0, LAYERS), options)
    model = WholeModel(engine, parse_sampling(Fields(dict(GREEDY))), CONTEXT)
    yield model
    model.close()


@pytest.fixture(scope="module")
def chain(bundled_model: Path) -> Iterator[Served]:
    """Three stages, one request at a time: batches have the shapes that the prediction has."""
    sizes = ("--lane-count", "1", "--ctx-size", str(CONTEXT))
    with serve(bundled_model, 3, *sizes, "--kv-cache", "disabled", "-v") as served:
        yield served


def pid_of(served: Served, index: int) -> int:
    """Of the present life of a stage."""
    pid = int(served.process.wait_for(rf"stage-{index} .* process (\d+)")[1])
    for line in served.process.errors:
        if f'"stage-{index}"' in line and (again := re.search(r'"pid": (\d+).*"a stage is up again"', line)):
            pid = int(again[1])
    return pid


def replays_of(served: Served, since: int) -> list[int]:
    """How many tokens there were when a request was taken up again, of all log lines after the first ones."""
    lines = [line for line in served.process.errors[since:] if "is replayed on another one" in line]
    return [int(match[1]) for line in lines if (match := re.search(r'"generated": (\d+)', line))]


def body(served: Served, prompt: Sequence[int]) -> dict[str, Any]:
    return {
        "model": served.model,
        "prompt": list(prompt),
        "max_tokens": TOKENS,
        "stream": True,
        **GREEDY,
    }


def read_stream(response: httpx.Response, victim: int | None) -> tuple[list[dict[str, Any]], bool]:
    """The events of a stream, in the middle of which a process is killed; and whether ``[DONE]`` came."""
    events: list[dict[str, Any]] = []
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return events, True
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == KILL_AFTER and victim is not None:
                psutil.Process(victim).kill()
    return events, False


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 2])
def test_the_answer_goes_on_to_its_normal_end(chain: Served, whole: WholeModel, index: int) -> None:
    prompt = whole.vocabulary.tokenize("Once upon a time, in a", add_special=True, parse_special=False)
    logged = len(chain.process.errors)
    with httpx.stream("POST", chain.url + "/completions", json=body(chain, prompt), timeout=120) as response:
        assert response.status_code == 200
        events, done = read_stream(response, pid_of(chain, index))
    assert done
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    replays = replays_of(chain, logged)
    assert replays
    assert all(KILL_AFTER <= count < TOKENS for count in replays)
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == whole.text(whole.answer(prompt, TOKENS, replays))


@pytest.mark.model
@pytest.mark.slow
def test_stage_0_takes_its_clients_with_it_and_serves_the_next_ones(chain: Served, whole: WholeModel) -> None:
    """The connection is its own, so it breaks, without an end that looks like one; the port stays."""
    prompt = whole.vocabulary.tokenize("The sky is", add_special=True, parse_special=False)
    with (
        httpx.stream("POST", chain.url + "/completions", json=body(chain, prompt), timeout=120) as response,
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
    ):
        read_stream(response, pid_of(chain, 0))
    # A connection is not refused while it is away: it waits for the next life of stage 0.
    readiness = chain.url.removesuffix("/v1") + "/readyz"
    assert any(httpx.get(readiness, timeout=120).status_code == 200 for _ in until_patience_ends())
    with httpx.stream("POST", chain.url + "/completions", json=body(chain, prompt), timeout=120) as response:
        assert response.status_code == 200
        events, done = read_stream(response, None)
    assert done
    assert "".join(event["choices"][0]["text"] for event in events) == whole.text(
        whole.answer(prompt, TOKENS)
    )
