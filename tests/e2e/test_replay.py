"""A stage of a chain dies in the middle of an answer and is started again by hand: the answer goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from skippy.engine import EngineOptions
from skippy.engine.llama import LlamaEngine
from skippy.frontend.fields import Fields
from skippy.frontend.sampling import parse_sampling
from skippy.models import ensure_slice
from tests.support.processes import Process
from tests.support.whole_model import WholeModel

from .support import LAYERS, ServedChain, serve_chain, write_chain

TOKENS = 90
KILL_AFTER = 20
"""Events that the client has when the stage is killed."""
SETTINGS = {
    "seed": 41,
    "temperature": 0.9,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "dry": {"multiplier": 0.5},
    "ignore_eos": True,
}
WHOLE_PROMPT = 256
"""Tokens of a request that go as one chunk."""


@pytest.fixture
def whole(bundled_model: Path) -> Iterator[WholeModel]:
    options = EngineOptions(context_length=512, max_sequences=1, n_threads=1)
    engine = LlamaEngine.load(ensure_slice(bundled_model, 0, LAYERS), options)
    model = WholeModel(engine, parse_sampling(Fields(dict(SETTINGS))), WHOLE_PROMPT)
    yield model
    model.close()


def replays_of(stage_zero: Process) -> list[int]:
    """How many tokens there were each time that a request was taken up again."""
    found = (re.search(r'"generated": (\d+).*is replayed on another one', line) for line in stage_zero.errors)
    return [int(match[1]) for match in found if match]


def text_of(chain: ServedChain, prompt: list[int], command: list[str]) -> tuple[str, str]:
    """The text of an answer in the middle of which stage 1 dies, and its finish reason."""
    body = {"model": chain.model, "prompt": prompt, "max_tokens": TOKENS, "stream": True, **SETTINGS}
    text, reason, count = "", "", 0
    again: Process | None = None
    try:
        with httpx.stream("POST", chain.url + "/completions", json=body, timeout=120) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return text, reason
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                text, reason, count = text + choice["text"], choice["finish_reason"], count + 1
                if count == KILL_AFTER:
                    chain.stages[1].popen.kill()
                    chain.stages[1].wait()
                    again = Process.start(command)
        raise AssertionError(f"the stream has no end: {text!r}")
    finally:
        if again is not None:
            chain.stages[1] = again


@pytest.mark.model
@pytest.mark.slow
def test_an_answer_goes_on_with_the_draws_that_it_would_have_had(
    bundled_model: Path, tmp_path: Path, whole: WholeModel
) -> None:
    """Penalties, DRY and seed as in the whole model, where everything is computed again at the same token."""
    prompt = whole.vocabulary.tokenize("A recipe for bread:", add_special=True, parse_special=False)
    commands = write_chain(tmp_path, bundled_model, ["127.0.0.1"] * 3, lane_count=1)
    with serve_chain(commands) as chain:
        try:
            text, reason = text_of(chain, prompt, ["serve-binary", *commands[1][1:]])
        finally:
            if chain.stages[1].popen.poll() is None:
                chain.stages[1].stop()
        replays = replays_of(chain.process)
    assert reason == "length"
    assert len(replays) == 1
    assert KILL_AFTER <= replays[0] < TOKENS
    assert text == whole.text(whole.answer(prompt, TOKENS, replays))
