"""Processes of the command line under test: started, watched by threads, and ended with their block."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import psutil

START_SECS = 120
# Not how long a stop may take (tests/cli/test_bounded_stop.py is for that), but when a test gives up.
PATIENCE_SECS = 60


@attrs.define
class Process:
    """A child whose standard output is read as it comes."""

    popen: subprocess.Popen[str]
    lines: list[str] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)
    _changed: threading.Condition = attrs.field(factory=threading.Condition)
    _readers: list[threading.Thread] = attrs.field(factory=list)
    _open: int = 2

    @classmethod
    def start(
        cls,
        arguments: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        module: str = "skippy.cli",
    ) -> Process:
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        process = cls(popen)
        for stream, target in ((popen.stdout, process.lines), (popen.stderr, process.errors)):
            thread = threading.Thread(target=process._read, args=(stream, target), daemon=True)
            thread.start()
            process._readers.append(thread)
        return process

    def _read(self, stream: Iterator[str], target: list[str]) -> None:
        for line in stream:
            with self._changed:
                target.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout: float = START_SECS) -> re.Match[str]:
        """The first line, on either stream, that matches; AssertionError if there is none in time."""

        def search() -> re.Match[str] | None:
            return next((m for line in [*self.lines, *self.errors] if (m := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: search() or self._open == 0, timeout)
            match = search()
        assert match, f"no line matches {pattern!r} in {self.output()}"
        return match

    def output(self) -> str:
        return "\n".join([*self.lines, *self.errors])

    def stop(self, number: int = signal.SIGINT, timeout: float = PATIENCE_SECS) -> int:
        """Send a signal and wait; fails when the process is not gone in time."""
        self.popen.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = PATIENCE_SECS) -> int:
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"still running after {timeout} s: {self.output()}") from None
        for thread in self._readers:
            thread.join(timeout)
        return code


@contextlib.contextmanager
def running(
    arguments: Sequence[str | Path], env: Mapping[str, str] | None = None, *, module: str = "skippy.cli"
) -> Iterator[Process]:
    process = Process.start(arguments, env, module=module)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.stop()


def until_patience_ends() -> Iterator[None]:
    """Turns of a loop that asks for what must come true, until that has taken too long."""
    deadline = time.monotonic() + PATIENCE_SECS
    while time.monotonic() < deadline:
        yield


def children_of(pid: int) -> list[int]:
    """Every descendant of a process that is still there."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def still_running(
    processes: Sequence[psutil.Process], timeout: float = PATIENCE_SECS
) -> list[psutil.Process]:
    """Those that have not ended in time. Orphans that only wait for the system to collect them have."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.wait_procs(processes, timeout=timeout)[1] if runs(process)]
