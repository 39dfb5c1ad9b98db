"""The commands that cut a model try the cuts out first, and do not with ``--no-precheck``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from skippy.cli.demo import DemoOptions, prepare
from skippy.cli.main import cli
from skippy.engine import precheck as module
from skippy.engine.precheck import PrecheckError
from skippy.models.tiny import write_tiny_model
from tests.cli.support import run_cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without a record; and what is cut gives other logits than what is not."""

    def run(_files: Sequence[Path], out: Path, expected: Path | None, **_: Any) -> None:
        np.save(out, np.full((11, 8), 0.0 if expected is None else 0.5, np.float32))

    monkeypatch.setattr(module, "run_apart", run)
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return write_tiny_model(tmp_path / "llama.gguf", "llama", metadata={"novel_key": 1})


def test_skippy_run_tries_all_its_cuts(model: Path) -> None:
    with pytest.raises(PrecheckError, match="not cut at layers 2 and 4: .* by up to 0.5; 11 of 11 tok"):
        prepare(DemoOptions(model=model, bind="127.0.0.1:0"))
    chain = prepare(DemoOptions(model=model, bind="127.0.0.1:0", precheck=False))
    assert not chain.options.precheck  # so the stages do not try either
    for child in chain.children:
        for listener in child.sockets:
            listener.close()


def test_skippy_slice(capsys: Capture, model: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--out", tmp_path / "part.gguf"]):
        outcome = run_cli(capsys, "slice", model, "--layers", "2:4", *arguments)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err.startswith(f"error: {model}: not cut at layers 2 and 4: a small random model")
    assert not (tmp_path / "part.gguf").exists()
    outcome = run_cli(capsys, "slice", model, "--layers", "2:4", "--no-precheck")
    assert outcome.code == 0
    assert Path(outcome.out.strip()).exists()


def test_all_commands_that_load_a_stage_have_the_flag() -> None:
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    having = {
        name
        for name, command in commands.items()
        if command is not None and any("--no-precheck" in parameter.opts for parameter in command.params)
    }
    assert having == {"run", "serve-binary", "serve-openai", "slice"}
