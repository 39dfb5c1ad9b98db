"""``skippy run`` with the real model: whole chains as processes, and how they end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes import Process, children_of, running

from .support import STAGE

pytestmark = [pytest.mark.model, pytest.mark.slow]

RUN = ["run", "--bind", "127.0.0.1:0", "--ctx-size", "256", "--lane-count", "1", "--threads", "1"]


PATIENCE = 60


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that share a cache of their own."""
    return {"SKIPPY_CACHE": str(tmp_path_factory.mktemp("slices"))}


def greet(url: str) -> str:
    body = {
        "model": httpx.get(f"{url}/models", timeout=PATIENCE).json()["data"][0]["id"],
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/chat/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def url_of(command: Process) -> str:
    return command.wait_for(r"OpenAI endpoint: (\S+)")[1]


def test_a_chain_from_start_to_end(bundled_model: Path, cache: dict[str, str]) -> None:
    with running([*RUN, "--model", bundled_model], cache) as chain:
        chain.wait_for("Ctrl-C stops everything")
        assert greet(url_of(chain))
        text = "\n".join(chain.lines)
        assert "stage-0  layers 0:10" in text
        assert "stage-1  layers 10:20" in text
        assert "stage-2  layers 20:30" in text
        assert f"curl {url_of(chain)}/chat/completions" in text
        family = [psutil.Process(pid) for pid in children_of(chain.popen.pid)]
        assert len(family) >= 3
        # The link token is in no environment.
        assert not any(
            "TOKEN" in name for one in family for name in one.environ() if name.startswith("SKIPPY")
        )
        assert chain.stop(signal.SIGTERM) == 0
        assert chain.errors == []
        assert psutil.wait_procs(family, PATIENCE)[1] == []


def test_one_stage_from_a_file(tmp_path: Path, bundled_model: Path, cache: dict[str, str]) -> None:
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(STAGE | {"model_path": str(bundled_model), "ctx_size": 256, "lane_count": 1}))
    with running(["run", "--config", path, "--openai-bind-addr", "127.0.0.1:0"], cache) as command:
        command.wait_for("^ready$")
        assert greet(url_of(command))
        assert command.stop(signal.SIGTERM) == 0


def test_a_model_with_fewer_layers_than_the_file_says(
    tmp_path: Path, bundled_model: Path, cache: dict[str, str]
) -> None:
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(STAGE | {"model_path": str(bundled_model), "layer_end": 31}))
    with running(["serve-binary", "--config", path], cache) as command:
        assert command.wait(PATIENCE) == 2
    assert command.errors[0].startswith("error: ")
    assert "30 layers" in command.errors[0]
