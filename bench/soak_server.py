"""A chain of processes under ``skippy run``, as the soak starts it, and what each says that it holds."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import trio

from .common import BenchError
from .servers import skippy_command
from .soak_clients import Target

LANES: Final = 4
CONTEXT: Final = 1024
START_SECS: Final = 120
STATISTICS_SECS: Final = 10.0


@attrs.frozen(slots=True)
class Sample:
    """What one process said of itself.

    Attributes:
        at: seconds since the soak began.
        name: of the stage; ``run`` for the process that started them.
        rest: nobody asked anything.
    """

    at: float
    name: str
    pid: int
    lanes: Mapping[str, int]
    sequences: int | None
    free_sequences: int | None
    tasks: int
    threads: int
    descriptors: int
    resident: int
    rest: bool

    @property
    def idle(self) -> bool:
        """Every lane is idle, of stages that have some, and every sequence is free."""
        if self.name == "run":
            return True
        return set(self.lanes) == {"idle"} and self.free_sequences == self.sequences is not None


class Server:
    """A running ``skippy run``.

    Attributes:
        lines: what it has written to stderr that is no statistics, the last of it.
    """

    def __init__(self, process: trio.Process, stages: int) -> None:
        self.process = process
        self.stages = stages
        self.lines: list[str] = []
        self.url = ""
        self.model = ""
        self._answers, self._statistics = trio.open_memory_channel[dict[str, Any]](1000)
        self._up = trio.Event()

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        """Take lines of one of its outputs until it ends."""
        rest = b""
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if match := re.search(r"serves (\S+) in", line):
            self.model = match[1]
        if match := re.search(r"OpenAI endpoint: (\S+)", line):
            self.url = match[1]
            self._up.set()
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == "statistics":
                    self._answers.send_nowait(entry)
                    return
        self.lines = [*self.lines[-200:], line]

    async def wait_up(self) -> Target:
        with trio.move_on_after(START_SECS):
            await self._up.wait()
        if not self.url:
            raise BenchError("the chain did not start:\n" + "\n".join(self.lines))
        where = urlsplit(self.url)
        assert where.hostname is not None
        assert where.port is not None
        return Target(where.hostname, where.port, self.model)

    async def statistics(self) -> list[dict[str, Any]]:
        """What every process says of itself now; those that are being started may be missing."""
        with contextlib.suppress(trio.WouldBlock):
            while True:
                self._statistics.receive_nowait()
        self.process.send_signal(signal.SIGUSR1)
        entries: list[dict[str, Any]] = []
        with trio.move_on_after(STATISTICS_SECS):
            while len(entries) < self.stages + 1:
                entries.append(await self._statistics.receive())
        return entries


@contextlib.asynccontextmanager
async def serving(model: Path, stages: int) -> AsyncIterator[Server]:
    """``skippy run``, stopped with the block."""
    # It would take a stage that is killed so often for one that cannot be helped.
    command = skippy_command(model, stages, 1, LANES, CONTEXT, ["--max-restarts", "100000"], cached=True)
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        server = Server(process, stages)
        assert process.stdout is not None
        assert process.stderr is not None
        nursery.start_soon(server.read, process.stdout)
        nursery.start_soon(server.read, process.stderr)
        try:
            yield server
        finally:
            process.terminate()
            with trio.move_on_after(15, shield=True):
                await process.wait()
            if process.returncode is None:
                process.kill()
            nursery.cancel_scope.cancel()
