"""Slices run in a process of their own: llama.cpp may end its process over one that is wrong.

``python -m skippy.engine.apart`` is that process. It takes a line of JSON on standard input, which then stays
open as long as whoever started it lives, and writes the logits to a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from skippy.engine.base import EngineError, StageEngine
from skippy.engine.certify import SEQUENCES, run_chain
from skippy.engine.options import EngineOptions
from skippy.models import ModelError, SliceInfo
from skippy.workers.obituary import obituary

COMMAND: Final = (sys.executable, "-P", "-m", "skippy.engine.apart")
MAX_SETTINGS_BYTES: Final = 1024 * 1024
_SETTINGS: Final = ("files", "out", "expected", "steps", "threads")
_TAIL_BYTES, _TAIL_LINES = 64 * 1024, 3
_REPORT_SECS: Final = 0.25


class ChildFailed(Exception):
    """The slices could not be run; the text says how the process ended."""


def run_apart(
    files: Sequence[Path],
    out: Path,
    expected: Path | None,
    *,
    steps: int,
    threads: int,
    timeout: float,
    waiting: Callable[[], None] = lambda: None,
    command: Sequence[str] = COMMAND,
) -> None:
    """Run a chain of files in a process of its own, which writes the logits to ``out`` (``.npy``).

    An exception while it blocks, as of Ctrl-C, ends the process. It ends by itself when this one is gone.

    Args:
        expected: logits of the unsplit model for the same steps; None: this is it.
        timeout: seconds until it is killed.
        waiting: called a few times each second; an exception of it ends the process and comes out.

    Raises:
        ChildFailed: it died, said that something is wrong, or took too long.
    """
    names = [str(path.absolute()) for path in files]
    values = (names, str(out), None if expected is None else str(expected), steps, threads)
    line = json.dumps(dict(zip(_SETTINGS, values, strict=True))).encode() + b"\n"
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment())
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(line)
                child.stdin.flush()
            code = _wait(child, timeout, waiting)  # its standard input stays open as long as this one lives
        finally:
            child.kill()
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        if code != 0:
            raise ChildFailed(f"the process {obituary(code, _last_lines(log))}")


def _environment() -> dict[str, str]:
    """Without the debugger that ggml starts to show where a failed assertion was."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}


def _wait(child: subprocess.Popen[bytes], timeout: float, waiting: Callable[[], None]) -> int:
    deadline = time.monotonic() + timeout
    while True:
        waiting()
        left = deadline - time.monotonic()
        if left <= 0:
            raise ChildFailed(f"did not end within {timeout:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(left, _REPORT_SECS))


def _last_lines(log: IO[bytes]) -> list[str]:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _TAIL_BYTES))
    lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error: ") or "GGML_ASSERT" in line]
    return said[:_TAIL_LINES] or lines[-_TAIL_LINES:]


def run_files(files: Sequence[str], out: str, expected: str | None, steps: int, threads: int) -> None:
    """Run a chain of files here; the arguments are those of :func:`run_apart`.

    Raises:
        ModelError, EngineError: a file cannot be loaded, or not be run.
    """
    # Imported here: whoever only starts processes needs no llama.cpp.
    from skippy.engine.llama import LlamaEngine

    options = EngineOptions(
        context_length=128,
        max_sequences=SEQUENCES,
        n_batch=128,
        n_ubatch=48,
        n_threads=threads,
        n_threads_batch=threads,
    )
    with contextlib.ExitStack() as stack:
        chain: list[StageEngine] = []
        for path in files:
            chain.append(LlamaEngine.load(SliceInfo.from_file(path), options))
            stack.callback(chain[-1].close)
        logits = run_chain(chain, steps, () if expected is None else np.load(expected))
        np.save(out, np.stack(logits))


def _read_settings() -> dict[str, Any] | None:
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk or len(data) > MAX_SETTINGS_BYTES:
            return None
        data += chunk
    try:
        settings = json.loads(data)
        return {name: settings[name] for name in _SETTINGS}
    except (ValueError, LookupError, TypeError):
        return None


def _end_with_parent() -> None:
    while os.read(0, 65536):
        pass
    os._exit(1)


def main() -> None:
    """Run the slices that the parent process describes on standard input."""
    settings = _read_settings()
    if settings is None:
        sys.exit("error: skippy.engine.apart is started by skippy; run `skippy certify` instead")
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    try:
        run_files(**settings)
    except (EngineError, ModelError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
