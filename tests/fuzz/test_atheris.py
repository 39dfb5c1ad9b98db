"""A short coverage-guided run of every target, where atheris is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz
from fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs pip install -e '.[fuzz]'"),
]
ROOT = Path(fuzz.__file__).parents[1]


def test_a_short_run_of_each_target_finds_nothing(tmp_path: Path) -> None:
    """In a folder of its own, where a finding is kept."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "all", "--atheris", "--seconds", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    names = sorted(TARGETS)
    parts = re.split(r"^(\w+): coverage-guided, 1 s$", done.stderr, flags=re.MULTILINE)
    assert parts[1::2] == names, done.stderr[-5000:]
    for name, said in zip(names, parts[2::2], strict=True):
        runs = re.search(r"Done (\d+) runs", said)
        assert runs is not None, said[-5000:]
        assert int(runs[1]) > len(list((fuzz.CORPUS / name).iterdir()))
    assert done.returncode == 0


def test_a_finding_of_one_target_is_told(tmp_path: Path) -> None:
    """And the others are still run."""
    program = (
        "import sys; from fuzz.__main__ import run_atheris; from fuzz.targets import TARGETS;"
        "TARGETS['annex'] = lambda data: 1 / 0; sys.exit(not run_atheris(['annex', 'replies'], 1, None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-5000:]
    assert "replies: coverage-guided, 1 s" in done.stderr
    assert "ZeroDivisionError" in done.stdout + done.stderr
    assert list(tmp_path.glob("crash-*"))
