"""Progress bars: drawn on a terminal, silent anywhere else."""

from __future__ import annotations

import io

from rich.console import Console

from skippy.cli.progress import SliceProgress


def draw(*, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with SliceProgress("layers 0:10", console) as progress:
        progress("hash", 512, 1024)
        progress("hash", 1024, 1024)
        progress("wait", 0, 0)
        progress("write", 2048, 4096)
    return stream.getvalue()


def test_silent_without_a_terminal() -> None:
    assert draw(terminal=False).strip() == ""


def test_every_stage_is_named_on_a_terminal() -> None:
    assert "writing layers 0:10" in draw(terminal=True)
