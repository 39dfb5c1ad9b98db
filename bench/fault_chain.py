"""A chain of real processes whose every connection goes through a network with faults, and its clients."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from skippy.config import Endpoint, StageConfig, StageTopology, to_json_value
from skippy.models import SliceInfo, ensure_slice
from skippy.topology import make_stage_configs, make_topology, plan_even

from .common import BenchError
from .fault_proxy import Connection, FaultyNetwork, reset
from .ports import reserve_port

LANES = 3
CONTEXT = 512
CHUNK = 16
START_SECS = 120
STOP_SECS = 10


@attrs.frozen(slots=True)
class Ending:
    """How a request ended for its client.

    Attributes:
        status: of the response; 0 where none came.
        finish: the finish reason.
        error: the message of the error body, or of the error event.
        done: the stream's last event was ``[DONE]``.
    """

    status: int
    text: str = ""
    finish: str | None = None
    error: str | None = None
    done: bool = False

    @property
    def kind(self) -> str:
        """One of ``normal``, ``refused`` (an error before the first token), ``error`` (one after it) and
        ``broken``: what must not be."""
        if self.status == 200 and self.done and self.error is None and self.finish is not None:
            return "normal"
        if self.status == 503 and self.error:
            return "refused"
        if self.status == 200 and self.done and self.error and self.finish is None:
            return "error"
        return "broken"


@attrs.define
class StageProcess:
    """One stage; its standard error is kept in a file."""

    command: Sequence[str]
    log: Path
    popen: subprocess.Popen[str] | None = None

    def start(self) -> None:
        with self.log.open("a") as errors:
            self.popen = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def kill(self) -> None:
        assert self.popen is not None
        self.popen.kill()

    def restart(self) -> None:
        """Start it again, once it is gone."""
        assert self.popen is not None
        self.popen.wait(STOP_SECS)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self.start()

    def stop(self) -> None:
        """Ask it to stop, and kill it if it does not; with what it said, if it failed."""
        popen = self.popen
        if popen is None:
            return
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(STOP_SECS)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()

    def find(self, pattern: str) -> str:
        """What the first line of standard output that matches holds. Raises BenchError at its end."""
        assert self.popen is not None
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if match := re.search(pattern, line):
                return match[1]
        raise BenchError(f"{self.command[-1]} ended before it served:\n{self.log.read_text()[-2000:]}")


@attrs.define
class FaultyChain:
    """Running stages, first to last, and the network between them."""

    stages: list[StageProcess]
    network: FaultyNetwork
    url: str
    model: str
    http: httpx.AsyncClient

    async def ask(self, prompt: str, tokens: int) -> Ending:
        """Stream a greedy completion."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with self.http.stream("POST", self.url + "/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    return Ending(response.status_code, error=response.json()["error"]["message"])
                return await _read_events(response)
        except httpx.HTTPError as exc:
            return Ending(0, error=f"{type(exc).__name__}: {exc}")

    async def ready(self) -> bool:
        """What /readyz says."""
        response = await self.http.get(self.url.removesuffix("/v1") + "/readyz")
        return response.status_code == 200

    async def wait_whole(self) -> None:
        """Wait until every lane is connected, through every stage."""
        last = len(self.stages) - 1
        await self.network.wait_until(lambda: all(self.network.admitted(hop) == LANES for hop in range(last)))


async def _read_events(response: httpx.Response) -> Ending:
    pieces: list[str] = []
    finish = error = None
    done = False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        done = line == "data: [DONE]"
        if done:
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            error = event["error"]["message"]
        for choice in event.get("choices", ()):
            pieces.append(choice["text"])
            finish = choice["finish_reason"] or finish
    return Ending(200, "".join(pieces), finish, error, done)


@contextlib.asynccontextmanager
async def open_faulty_chain(
    model: Path,
    folder: Path,
    *,
    stages: int = 3,
    seed: int = 0,
    options: Sequence[str] = (),
    front_options: Sequence[str] = (),
) -> AsyncIterator[FaultyChain]:
    """Stages of ``model`` in processes of their own, ready to serve.

    Args:
        folder: for configuration files and logs.
        options: of every stage's ``skippy serve-binary``.
        front_options: of stage 0's, besides.
    """
    network = FaultyNetwork(random.Random(seed))
    async with trio.open_nursery() as nursery:
        ports = [await _open_hop(nursery, network, hop) for hop in range(stages)]
        # The proxy of hop i is where stage i dials: stage i + 1, and stage 0 for the last one.
        seen = [Endpoint("127.0.0.1", ports[(stage - 1) % stages][0]) for stage in range(stages)]
        own = [f"127.0.0.1:{ports[(stage - 1) % stages][1]}" for stage in range(stages)]
        processes = [
            StageProcess(command, folder / f"stage-{index}.log")
            for index, command in enumerate(_commands(model, folder, seen, own, options, front_options))
        ]
        with contextlib.ExitStack() as stack:
            for process in reversed(processes):
                process.start()
                stack.callback(process.stop)
            async with httpx.AsyncClient(timeout=START_SECS) as http:
                url = await trio.to_thread.run_sync(processes[0].find, r"(http://\S+/v1)")
                chain = FaultyChain(processes, network, url, "chain", http)
                with trio.fail_after(START_SECS):
                    await chain.wait_whole()
                yield chain
        nursery.cancel_scope.cancel()


async def _open_hop(nursery: trio.Nursery, network: FaultyNetwork, hop: int) -> tuple[int, int]:
    """Listen for a hop's dialer; returns that port, and the one of the stage that it means."""
    target = reserve_port()

    async def serve(stream: trio.SocketStream) -> None:
        try:
            below = await trio.open_tcp_stream("127.0.0.1", target)
        except OSError:
            reset(stream)
            return
        await Connection(network, hop, stream, below).run()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    return listeners[0].socket.getsockname()[1], target


def _commands(
    model: Path,
    folder: Path,
    seen: Sequence[Endpoint],
    own: Sequence[str],
    options: Sequence[str],
    front_options: Sequence[str],
) -> list[list[str]]:
    """One command per stage: each knows the others by the proxies in front of them."""
    info = SliceInfo.from_file(model)
    plan = plan_even(info.layer_count, len(seen))
    topology = make_topology(plan, seen, topology_id="faults", model_id="chain")
    (folder / "topology.json").write_text(json.dumps(to_json_value(topology)))
    for placement in topology.stages:  # cut before anyone is waited for
        ensure_slice(model, placement.layer_start, placement.layer_end)
    commands = []
    for index, config in enumerate(_configs(topology, model)):
        path = folder / f"stage-{index}.json"
        path.write_text(json.dumps({**to_json_value(config), "bind_addr": own[index]}))
        command = [sys.executable, "-P", "-m", "skippy.cli", "serve-binary", "--config", str(path)]
        command += ["--topology", str(folder / "topology.json"), *options]
        if index == 0:
            command += ["--openai-bind-addr", "127.0.0.1:0", "--openai-prefill-chunk-policy", "fixed"]
            command += ["--openai-prefill-chunk-size", str(CHUNK), *front_options]
        commands.append(command)
    return commands


def _configs(topology: StageTopology, model: Path) -> list[StageConfig]:
    settings: dict[str, Any] = {"ctx_size": CONTEXT, "lane_count": LANES, "n_threads": 1}
    return make_stage_configs(topology, run_id="faults", model_path=str(model), **settings)
