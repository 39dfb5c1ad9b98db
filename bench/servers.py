"""Servers under measurement as child processes, each ended with its block."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import attrs
import httpx

from .common import BenchError

try:
    import psutil
except ImportError:
    raise SystemExit("error: this benchmark needs psutil; pip install -e '.[bench]' brings it") from None

START_SECS = 180
STOP_SECS = 10
NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")


@attrs.frozen(slots=True, kw_only=True)
class Server:
    """A running OpenAI endpoint.

    Attributes:
        name: of the arm.
        model: what requests must ask for.
        extra: fields that every request to this server needs.
        sequential: it answers one request at a time.
    """

    name: str
    host: str
    port: int
    model: str
    pid: int
    extra: Mapping[str, object] = attrs.field(factory=dict)
    sequential: bool = False

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        top = psutil.Process(self.pid)
        return [top, *top.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Processor time that the server has used so far, all its processes together."""
        times = [process.cpu_times() for process in self.processes()]
        return sum(t.user + t.system for t in times)

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(process.memory_info().rss for process in self.processes())


class Elsewhere:
    """How much of the machine neither this process nor any it has started used, since this was made.

    Time that a hypervisor has given to others counts, where the system knows of it.
    """

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """The time, and the processor seconds that everything which is not ours has used so far."""
        times = psutil.cpu_times()._asdict()
        busy = sum(value for name, value in times.items() if name not in NOT_BUSY)
        own = psutil.Process()
        spent = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return time.perf_counter(), busy - sum(t.user + t.system for t in spent)

    def share(self) -> float:
        """0 to 1, of all cores."""
        (began, before), (now, after) = self._began, self._now()
        return max(0.0, (after - before) / (now - began) / (psutil.cpu_count() or 1))


def completion_body(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    """A greedy stream of ``tokens`` tokens, no fewer where the server can be told so."""
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.extra,
    }


def chat_body(server: Server, messages: Sequence[Mapping[str, str]], tokens: int) -> dict[str, Any]:
    """As :func:`completion_body`, for a conversation."""
    body = completion_body(server, "", tokens)
    del body["prompt"]
    return {**body, "messages": list(messages)}


def skippy_command(
    model: Path,
    stages: int,
    threads: int,
    lanes: int,
    context: int,
    more: Sequence[str] = (),
    *,
    cached: bool = False,
) -> list[str]:
    """``skippy run``; ``cached``: it remembers prompts, as it does by default."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "skippy.cli",
        "run",
        "--bind",
        "127.0.0.1:0",
        "--model",
        str(model),
    ]
    options = {"stages": stages, "threads": threads, "lane-count": lanes, "ctx-size": context}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return [*command, *([] if cached else ["--kv-cache", "disabled"]), *more]


@contextlib.contextmanager
def skippy_server(
    name: str,
    model: Path,
    *,
    stages: int,
    threads: int,
    lanes: int,
    context: int,
    more: Sequence[str] = (),
    cached: bool = False,
) -> Iterator[Server]:
    """``skippy run`` on a free port; ``more`` are further options of it; ``cached``: it remembers prompts."""
    command = skippy_command(model, stages, threads, lanes, context, more, cached=cached)
    with child(name, command, r"OpenAI endpoint: (\S+)") as (process, url):
        yield _server(name, url, model.stem, process.pid, extra={"ignore_eos": True})


@contextlib.contextmanager
def llamacpp_server(
    name: str, model: Path, *, python: str, threads: int, lanes: int, context: int, cached: bool = False
) -> Iterator[Server]:
    """llama.cpp's server, run by ``python``, which must have xllamacpp. ``cached``: with prompt caches."""
    script = Path(__file__).with_name("llamacpp_server.py")
    command = [python, "-P", str(script), str(model), "--threads", str(threads)]
    command += ["--lanes", str(lanes), "--context", str(context), *(["--cache"] if cached else [])]
    with child(name, command, r"(http://\S+)") as (process, url):
        yield _server(name, url, "any", process.pid, extra={"ignore_eos": True, "cache_prompt": cached})


@contextlib.contextmanager
def llama_cpp_python_server(
    name: str, model: Path, *, python: str, threads: int, context: int
) -> Iterator[Server]:
    """llama-cpp-python's own server, run by ``python``, which must have its extra ``server``."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [python, "-P", "-m", "llama_cpp.server", "--host", "127.0.0.1", "--port", str(port)]
    options = {"model": model, "n_ctx": context, "n_threads": threads, "n_threads_batch": threads}
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    # It makes all logits of a prompt unless told not to, and has no ignore_eos.
    command += ["--logits_all", "false", "--verbose", "false"]
    with child(name, command, None) as (process, _):
        url = f"http://127.0.0.1:{port}"
        _wait_answering(name, url, process)
        # Its own default penalises repetition.
        yield _server(name, url, "any", process.pid, extra={"repeat_penalty": 1.0}, sequential=True)


def _server(
    name: str, url: str, model: str, pid: int, extra: Mapping[str, object] = {}, sequential: bool = False
) -> Server:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Server(
        name=name,
        host=parts.hostname,
        port=parts.port,
        model=model,
        pid=pid,
        extra=extra,
        sequential=sequential,
    )


@contextlib.contextmanager
def child(
    name: str, command: Sequence[str], pattern: str | None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and what the first line of its standard output that matches ``pattern`` holds.

    Raises BenchError, with its last words, when it ends before that.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield process, _found(name, process, pattern, errors) if pattern else ""
        finally:
            _stop(process)


def _found(name: str, process: subprocess.Popen[str], pattern: str, errors: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match[1]
    code = process.wait()
    errors.seek(0)
    raise BenchError(f"{name} ended with exit code {code} before it served:\n{errors.read()[-2000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_answering(name: str, url: str, process: subprocess.Popen[str]) -> None:
    """Wait until GET /v1/models is answered: there is no other sign of readiness."""
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"{name} ended with exit code {process.returncode} before it served")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models").status_code == 200:
                return
        time.sleep(0.2)
    raise BenchError(f"{name} did not answer within {START_SECS} s")
