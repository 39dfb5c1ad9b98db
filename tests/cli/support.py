"""Running commands in this process and as processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
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
PATIENCE = 60


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


class Command:
    """A running ``skippy`` process; its output is collected by threads."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(process.stderr, self._errors)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in standard output; fails if the process ends before."""

        def find() -> re.Match[str] | None:
            return re.search(pattern, "\n".join(self.lines))

        with self._changed:
            self._changed.wait_for(lambda: find() or not self._threads[0].is_alive(), PATIENCE)
        found = find()
        assert found is not None, (self.lines, self._errors)
        return found

    def wait(self) -> int:
        """Wait for the end and for all output."""
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        return code

    @property
    def err(self) -> str:
        return "\n".join(self._errors)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def start(arguments: Sequence[str | Path], cache: Path) -> Iterator[Command]:
    """Start ``skippy``; leaving the block kills what is left of it, and fails if that is a descendant."""
    process = subprocess.Popen(
        [sys.executable, "-m", "skippy.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SKIPPY_CACHE": str(cache)},
    )
    command = Command(process)
    try:
        yield command
    finally:
        if process.poll() is None:
            for descendant in command.descendants():
                descendant.kill()
            process.kill()
        command.wait()
