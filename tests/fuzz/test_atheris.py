"""A short coverage-guided run of every target, where atheris is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import fuzz
from fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs pip install -e '.[fuzz]'"),
]
SECONDS = 1
ROOT = Path(fuzz.__file__).parents[1]
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Two at a time: most of a short run is the start of its process."""

    def run(name: str) -> Run:
        command = [sys.executable, "-m", "fuzz", name, "--atheris", "--seconds", str(SECONDS)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        folder = tmp_path_factory.mktemp(name)  # where a finding is kept
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in sorted(TARGETS)}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_short_run_finds_nothing(runs: dict[str, Future[Run]], name: str) -> None:
    run = runs[name].result()
    assert run.returncode == 0, run.stderr[-5000:]
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done is not None, run.stderr[-5000:]
    assert int(done[1]) > len(list((fuzz.CORPUS / name).iterdir()))
