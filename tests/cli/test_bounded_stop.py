"""SIGTERM ends real processes within the grace period + 1 s, whoever does not answer.

The engines are toys; processes, signals, sockets and links are real.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import httpx
import psutil
import pytest
import trio

from bench.ports import reserve_port
from skippy.cli.child import ORPHAN_SECS
from skippy.cli.launch import Chain
from skippy.cli.stopping import INSIST_SECS
from skippy.cli.supervise import Supervisor
from skippy.config import to_json_value
from tests.support.cluster import ranges_of, toy_config
from tests.support.processes import (
    Process,
    children_of,
    running,
    still_running,
    until_patience_ends,
)
from tests.support.toy_skippy import CONTEXT, MODULE, SMALL_BUFFER, Toy, toy_chain

pytestmark = pytest.mark.slow

GRACE = 2.0
BOUND = GRACE + 1


@contextlib.contextmanager
def stage(
    folder: Path, index: int = 0, endpoints: tuple[str, ...] = ("",), toy: Toy | None = None
) -> Iterator[Process]:
    """A stage of a chain as a process of its own; stage 0 serves OpenAI, too."""
    config = toy_config(index, ranges_of(len(endpoints)), endpoints, ctx_size=CONTEXT, lane_count=2)
    path = folder / f"stage-{index}.json"
    path.write_text(json.dumps(to_json_value(config)))
    command: list[str | Path] = ["serve-binary", "--config", path, "--shutdown-grace-secs", str(GRACE)]
    if index == 0:
        command += ["--openai-bind-addr", "127.0.0.1:0"]
    with running(command, (toy or Toy()).environment(), module=MODULE) as process:
        try:
            yield process
        finally:
            process.popen.send_signal(signal.SIGCONT)


def free_endpoint() -> str:
    return f"127.0.0.1:{reserve_port()}"


@attrs.define
class Client:
    """One that asks for a stream that never ends by itself."""

    connection: socket.socket

    @classmethod
    def ask(cls, url: str) -> Client:
        """Ask, and read the beginning of the stream."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.settimeout(30)
        target = urlsplit(url)
        assert target.hostname is not None
        assert target.port is not None
        connection.connect((target.hostname, target.port))
        body = json.dumps(
            {"model": "toy", "prompt": "a", "max_tokens": CONTEXT - 10, "stream": True, "temperature": 0}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body.encode())
        begin = connection.recv(200)
        assert begin.startswith(b"HTTP/1.1 200"), begin
        return cls(connection)

    def read_to_end(self) -> bytes:
        received = bytearray()
        with self.connection, contextlib.suppress(ConnectionResetError):
            while data := self.connection.recv(65536):
                received += data
        return bytes(received)


def url_of(process: Process) -> str:
    return process.wait_for(r"(http://\S+/v1)")[1]


def stop(process: Process) -> int:
    """Send SIGTERM; the process must be gone within the bound."""
    return process.stop(signal.SIGTERM, BOUND)


class TestServe:
    def test_without_requests(self, tmp_path: Path) -> None:
        with stage(tmp_path) as process:
            process.wait_for("^ready$")
            assert stop(process) == 0

    def test_a_stream_that_does_not_end_gets_an_error_and_done(self, tmp_path: Path) -> None:
        with stage(tmp_path) as process:
            process.wait_for("^ready$")
            client = Client.ask(url_of(process))
            process.popen.send_signal(signal.SIGTERM)
            received = client.read_to_end()
            assert process.wait(BOUND) == 0
        assert b"the server is shutting down" in received
        assert b"data: [DONE]" in received

    def test_a_client_that_does_not_read(self, tmp_path: Path) -> None:
        with stage(tmp_path) as process:
            process.wait_for("^ready$")
            client = Client.ask(url_of(process))
            assert stop(process) == 0
            client.connection.close()

    @pytest.mark.parametrize("how", ["c", "sleep"])
    def test_a_native_call_that_does_not_return(self, tmp_path: Path, how: str) -> None:
        with stage(tmp_path, toy=Toy(stuck_stage=0, stuck_in=how)) as process:
            process.wait_for("^ready$")
            client = Client.ask(url_of(process))
            process.popen.send_signal(signal.SIGTERM)
            received = client.read_to_end()
            assert process.wait(BOUND) == 70
        assert b"the server is shutting down" in received

    @pytest.mark.parametrize("how", ["c", "sleep"])
    def test_a_load_that_does_not_return(self, tmp_path: Path, how: str) -> None:
        with stage(tmp_path, toy=Toy(stuck_stage=0, stuck_after=0, stuck_in=how)) as process:
            # It handles signals from before it begins to load.
            process.wait_for("runtime_load_start")
            assert stop(process) == 70

    def test_a_peer_that_accepts_and_never_answers(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoints = ("127.0.0.1:0", "127.0.0.1:{}".format(*silent.getsockname()[1:]))
            with stage(tmp_path, 0, endpoints) as process:
                url_of(process)
                accepted, _ = silent.accept()
                with accepted:
                    assert stop(process) == 0

    @pytest.mark.parametrize("stopped", [0, 1])
    def test_a_neighbour_that_stands_still_in_mid_stream(self, tmp_path: Path, stopped: int) -> None:
        endpoints = (free_endpoint(), free_endpoint())
        with stage(tmp_path, 1, endpoints) as last, stage(tmp_path, 0, endpoints) as first:
            first.wait_for("^ready$")
            client = Client.ask(url_of(first))
            still, other = (first, last) if stopped == 0 else (last, first)
            still.popen.send_signal(signal.SIGSTOP)
            assert stop(other) == 0
            if stopped == 1:
                assert b"the server is shutting down" in client.read_to_end()
            client.connection.close()


@attrs.define
class Run:
    """A supervised chain that is ready."""

    chain: Chain
    supervisor: Supervisor

    def process(self, index: int) -> trio.Process:
        process = self.chain.children[index].process
        assert process is not None
        return process

    async def ask(self) -> Client:
        return await trio.to_thread.run_sync(Client.ask, f"http://{self.chain.openai.bind_addr}")


@contextlib.asynccontextmanager
async def running_chain(monkeypatch: pytest.MonkeyPatch, toy: Toy) -> AsyncIterator[Run]:
    """A chain of three for the length of the block; then it is stopped, and must be gone within the bound."""
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    ready = trio.Event()
    chain = toy_chain(3, GRACE)
    supervisor = Supervisor(chain, relay=False, ready=ready.set, loading=lambda: None)
    with trio.fail_after(60) as patience:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await ready.wait()
            yield Run(chain, supervisor)
            patience.deadline = trio.current_time() + BOUND
            nursery.cancel_scope.cancel()
    assert all(child.process is not None and child.process.returncode is not None for child in chain.children)


class TestRun:
    async def test_without_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running_chain(monkeypatch, Toy()) as run:
            pass
        assert not run.supervisor.unreturned
        assert [run.process(index).returncode for index in range(3)] == [0, 0, 0]

    async def test_a_client_that_does_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with running_chain(monkeypatch, Toy()) as run:
            client = await run.ask()
        client.connection.close()

    @pytest.mark.parametrize("index", [0, 1, 2])
    async def test_a_stage_that_stands_still_in_mid_stream(
        self, monkeypatch: pytest.MonkeyPatch, index: int
    ) -> None:
        async with running_chain(monkeypatch, Toy()) as run:
            client = await run.ask()
            run.process(index).send_signal(signal.SIGSTOP)
        assert run.supervisor.unreturned
        assert run.process(index).returncode == -signal.SIGKILL
        if index:
            assert b"the server is shutting down" in await trio.to_thread.run_sync(client.read_to_end)
        client.connection.close()

    @pytest.mark.parametrize("index", [0, 1, 2])
    async def test_a_native_call_that_does_not_return(
        self, monkeypatch: pytest.MonkeyPatch, index: int
    ) -> None:
        async with running_chain(monkeypatch, Toy(stuck_stage=index)) as run:
            client = await run.ask()
        assert run.supervisor.unreturned
        assert run.process(index).returncode in (70, -signal.SIGKILL)
        received = await trio.to_thread.run_sync(client.read_to_end)
        assert b"the server is shutting down" in received
        assert b"data: [DONE]" in received


@contextlib.contextmanager
def toy_run(*arguments: str, toy: Toy | None = None) -> Iterator[Process]:
    """``skippy run`` over three toy stages, serving."""
    command = ["run", "--shutdown-grace-secs", str(GRACE), *arguments]
    with running(command, (toy or Toy()).environment(), module=MODULE) as process:
        process.wait_for("Ctrl-C stops everything")
        yield process


class TestCommand:
    def test_a_signal(self) -> None:
        with toy_run() as process:
            children = children_of(process.popen.pid)
            assert len(children) == 3
            assert stop(process) == 0
        assert not any(map(psutil.pid_exists, children))

    def test_a_second_signal_ends_everything_at_once(self) -> None:
        with toy_run("--shutdown-grace-secs", "600") as process:
            children = [psutil.Process(pid) for pid in children_of(process.popen.pid)]
            client = Client.ask(url_of(process))
            process.popen.send_signal(signal.SIGTERM)
            ready = url_of(process).removesuffix("/v1") + "/readyz"
            # Until it has heard the first one.
            assert any(httpx.get(ready, timeout=60).status_code == 503 for _ in until_patience_ends())
            with pytest.raises(subprocess.TimeoutExpired):
                process.popen.wait(INSIST_SECS)
            assert process.stop(signal.SIGINT) == 130
            client.connection.close()
            assert still_running(children) == []

    def test_a_killed_supervisor_takes_a_stage_with_it_that_does_not_return(self) -> None:
        with toy_run(toy=Toy(stuck_stage=1)) as process:
            children = [psutil.Process(pid) for pid in children_of(process.popen.pid)]
            client = Client.ask(url_of(process))
            process.popen.kill()
            assert still_running(children, ORPHAN_SECS + 1) == []
            client.connection.close()

    def test_a_native_crash_is_told_as_one(self) -> None:
        with toy_run("--max-restarts", "0", toy=Toy(stuck_stage=1, stuck_in="crash")) as process:
            client = Client.ask(url_of(process))
            assert process.wait() == 1
            client.connection.close()
        error = next(line for line in process.errors if line.startswith("error: "))
        assert error == (
            "error: stage-1 (layers 2:4) was killed by signal SIGSEGV (a crash in native code); "
            "its last lines were:"
        )
        assert "  Fatal Python error: Segmentation fault" in process.errors
        assert any("in string_at" in line for line in process.errors)
