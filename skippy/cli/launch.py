"""A chain of child processes, one for each stage: what each is, and one life of it.

Each child gets its settings, with the link token, as one line on standard input, and its listening sockets by
inheritance. Standard input then stays open: it brings notices, and its end means that this process is gone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import attrs
import trio

from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology, to_json_value
from skippy.workers.obituary import obituary

from .stage_lines import StageLine

LAST_LINES = 12
MAX_LINE = 8192
CRASH = "Fatal Python error"
"""How the word begins that Python leaves when native code crashes; its stack follows."""


class Notice:
    """What each life of a child is told, and told of changes.

    Attributes:
        text: what the supervisor knows of an outage.
        kill_secs: once the chain stops: how long a child has to end, from then on.
    """

    def __init__(self) -> None:
        self.text: str | None = None
        self.kill_secs: float | None = None
        self._changed = trio.Event()

    def set(self, text: str | None) -> None:
        self.text = text
        self._tell()

    def stopping(self, kill_secs: float) -> None:
        self.kill_secs = kill_secs
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        await self._changed.wait()


@attrs.define(slots=True, kw_only=True, eq=False)
class Child:
    """One stage, as this process sees it through all its lives.

    Attributes:
        config: its stage.
        listener: its listening socket, which every life of it inherits: who dials while it is away waits.
        openai_listener: the HTTP socket (stage 0 only).
        command: what to run; the child's options are appended. (``-P``: a module in the working directory
            must not stand in for one of ours.)
        tail: the last lines it wrote to stderr that may say why it ends; after a crash, the first ones about
            that.
        process: its last life; None before the first.
        alive: whether that goes on.
        loaded: bytes of its model part that are loaded, and all of them; zeros before it has begun.
        handles_signals: it has come so far that SIGUSR1 does not kill it.
        served_since: when its model was loaded and its port was served, on Trio's clock; None before.
        served: a request has gone through it, to a good end.
        overdue: it was killed by this process, because it did not stop in time.
    """

    config: StageConfig
    listener: socket.socket
    openai_listener: socket.socket | None = None
    command: Sequence[str] = (sys.executable, "-P", "-m", "skippy.cli", "stage-child")
    tail: deque[str] = attrs.field(factory=lambda: deque(maxlen=LAST_LINES))
    process: trio.Process | None = None
    alive: bool = False
    loaded: tuple[int, int] = (0, 0)
    handles_signals: bool = False
    served_since: float | None = None
    served: bool = False
    overdue: bool = False

    @property
    def name(self) -> str:
        return f"{self.config.stage_id} (layers {self.config.layer_start}:{self.config.layer_end})"

    @property
    def sockets(self) -> list[socket.socket]:
        return [sock for sock in (self.listener, self.openai_listener) if sock is not None]


@attrs.frozen(slots=True, kw_only=True)
class Chain:
    """All children and what they have in common.

    Attributes:
        grace_secs: from the request to stop to the end of the last child.
    """

    children: Sequence[Child]
    topology: StageTopology
    options: StageOptions
    openai: OpenAIOptions
    grace_secs: float

    def setup_line(self, child: Child) -> bytes:
        """What a child reads first from its standard input."""
        has_endpoint = child.openai_listener is not None
        settings = {
            "config": to_json_value(child.config),
            "topology": to_json_value(self.topology),
            "options": to_json_value(self.options),
            "openai": to_json_value(self.openai) if has_endpoint else None,
            "grace_secs": self.grace_secs,
        }
        return json.dumps(settings).encode() + b"\n"

    def kill(self) -> None:
        """Kill every child that lives. Does not wait; safe in a signal handler."""
        for child in self.children:
            if child.alive and child.process is not None:
                child.process.kill()


class Observer(Protocol):
    """Told what a child does. Each method returns at once."""

    def loading(self, child: Child) -> None:
        """``child.loaded`` has changed."""

    def serving(self, child: Child) -> None:
        """Its model is loaded and its port is served."""

    def ready(self, child: Child) -> None:
        """The same; of stage 0: the whole chain is ready."""

    def alone(self, child: Child) -> None:
        """It is stopping, and no request needs the chain any more."""

    def statistics(self, counts: dict[str, Any]) -> None:
        """The answer to SIGUSR1."""

    def line(self, child: Child, line: StageLine) -> None:
        """It has written to stderr."""


@attrs.frozen(slots=True, kw_only=True)
class End:
    """How a life ended.

    Attributes:
        returncode: as :class:`subprocess.Popen` has it.
        words: how it ended and what it said last.
        served_secs: how long its port was served; None: never.
        served: a request has gone through it, to a good end.
    """

    returncode: int
    words: str
    served_secs: float | None
    served: bool


async def live(
    chain: Chain,
    child: Child,
    notice: Notice,
    observer: Observer,
    stop: Callable[[trio.Process], Awaitable[None]],
) -> End:
    """One life of a child, from its start to its end.

    Nothing of it is left after this call, on any path: a cancelled one kills it.

    Args:
        notice: what its standard input brings beyond the settings.
        stop: an async function of the process, which runs beside it and may end it.

    Raises:
        OSError: it cannot be started.
    """
    child.tail.clear()
    child.handles_signals, child.served_since = False, None
    child.served = child.overdue = False
    status_read, status_write = os.pipe()
    status = trio.lowlevel.FdStream(status_read)
    async with status:
        try:
            process = await _spawn(child, status_write)
        finally:
            os.close(status_write)
        child.process, child.alive = process, True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_write_stdin, process, chain.setup_line(child), notice)
                nursery.start_soon(_read_status, status, child, observer)
                nursery.start_soon(stop, process)
                heard_all = trio.Event()
                nursery.start_soon(_read_stderr, child, process, observer, heard_all)
                await process.wait()
                # What it spawned may hold the pipe open, so its end is not waited for without limit.
                with trio.move_on_after(1):
                    await heard_all.wait()
                nursery.cancel_scope.cancel()
        finally:
            child.alive = False
            await _bury(process)
    since = child.served_since
    return End(
        returncode=process.returncode or 0,
        words=obituary(process.returncode or 0, child.tail, overdue=child.overdue),
        served_secs=None if since is None else trio.current_time() - since,
        served=child.served,
    )


async def _spawn(child: Child, status_fd: int) -> trio.Process:
    command = [*child.command, "--listen-fd", str(child.listener.fileno()), "--status-fd", str(status_fd)]
    if child.openai_listener is not None:
        command += ["--openai-fd", str(child.openai_listener.fileno())]
    return await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[status_fd, *(sock.fileno() for sock in child.sockets)],
        # Not in the terminal's foreground group: Ctrl-C is for this process, which stops them then.
        process_group=0,
    )


async def _bury(process: trio.Process) -> None:
    """Kill it if it still lives, collect it, close its pipes."""
    with trio.CancelScope(shield=True):
        process.kill()
        await process.wait()
        for stream in (process.stdin, process.stderr):
            assert stream is not None
            await stream.aclose()


async def _write_stdin(process: trio.Process, settings: bytes, notice: Notice) -> None:
    assert process.stdin is not None
    try:
        await process.stdin.send_all(settings)
        told: dict[str, Any] = {"notice": None, "kill_secs": None}
        while True:
            if (now := {"notice": notice.text, "kill_secs": notice.kill_secs}) != told:
                await process.stdin.send_all(json.dumps(now).encode() + b"\n")
                told = now
            else:
                await notice.wait_changed()
    except trio.BrokenResourceError:
        pass  # the child is gone, or about to go: its end says why


async def _read_status(status: trio.lowlevel.FdStream, child: Child, observer: Observer) -> None:
    """A child writes ``load DONE TOTAL``, ``serving``, ``ready``, ``served``, ``alone``, ``statistics …``."""
    rest = b""
    async for chunk in status:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            child.handles_signals = True
            word, _, value = line.partition(b" ")
            if word == b"load":
                done, total = map(int, value.split())
                child.loaded = (done, total)
                observer.loading(child)
            elif word == b"serving":
                child.served_since = trio.current_time()
                observer.serving(child)
            elif word == b"served":
                child.served = True
            elif word == b"ready":
                observer.ready(child)
            elif word == b"alone":
                observer.alone(child)
            elif word == b"statistics":
                observer.statistics(json.loads(value))


async def _read_stderr(child: Child, process: trio.Process, observer: Observer, done: trio.Event) -> None:
    assert process.stderr is not None
    rest = b""
    async for chunk in process.stderr:
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[-MAX_LINE:]
        _take_lines(child, lines, observer)
    _take_lines(child, [rest] if rest else [], observer)
    done.set()


def _take_lines(child: Child, lines: Sequence[bytes], observer: Observer) -> None:
    for line in lines:
        text = line[-MAX_LINE:].decode(errors="replace").rstrip()
        if text.startswith(CRASH):
            child.tail.clear()
        parsed = StageLine.parse(text)
        # A crash's first lines say most: its stack begins where it happened.
        full = len(child.tail) == LAST_LINES and child.tail[0].startswith(CRASH)
        if parsed.may_explain_an_end and not full:
            child.tail.append(text)
        observer.line(child, parsed)
