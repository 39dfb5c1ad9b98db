"""Running commands in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from skippy.cli.main import main

STAGE: dict[str, Any] = {
    "run_id": "run",
    "topology_id": "cut",
    "model_id": "model",
    "stage_id": "stage-0",
    "stage_index": 0,
    "layer_start": 0,
    "layer_end": 30,
    "load_mode": "runtime-slice",
    "bind_addr": "127.0.0.1:0",
    "model_path": "model.gguf",
}


@attrs.frozen
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Outcome:
    """Run ``skippy`` with arguments in this process."""
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = exited.value.code
    assert isinstance(code, int)
    return Outcome(code, captured.out, captured.err)
