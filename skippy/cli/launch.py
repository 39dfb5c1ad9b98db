"""A chain of child processes: started, watched and stopped together.

Each child gets its settings, with the link token, as one line on standard input, and its listening sockets by
inheritance. Standard input then stays open: a child that reads its end knows that this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import click
import trio

from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology, to_json_value

from .errors import CliError
from .statistics import STATISTICS_SIGNAL, answer_statistics_signal, log_statistics, process_statistics

KILL_AFTER_SECONDS = 3.5
FRONT_SECONDS = 2.0
"""How long stage 0 may take to finish or refuse its requests while the stages they need still run."""
LAST_LINES = 12
MAX_LINE = 2000


@attrs.define(slots=True, kw_only=True)
class Child:
    """One stage process.

    Attributes:
        config: its stage.
        listener: its listening socket; handed over at the start.
        openai_listener: the HTTP socket (stage 0 only).
        command: what to run; the child's options are appended. (``-P``: a module in the working directory
            must not stand in for one of ours.)
        tail: the last lines it wrote to stderr.
        loaded: bytes of its model part that are loaded, and all of them; zeros before it has begun.
        handles_signals: it has come so far that SIGUSR1 does not kill it.
    """

    config: StageConfig
    listener: socket.socket
    openai_listener: socket.socket | None = None
    command: Sequence[str] = (sys.executable, "-P", "-m", "skippy.cli", "stage-child")
    tail: deque[str] = attrs.field(factory=lambda: deque(maxlen=LAST_LINES))
    process: trio.Process | None = None
    loaded: tuple[int, int] = (0, 0)
    handles_signals: bool = False

    @property
    def name(self) -> str:
        return f"{self.config.stage_id} (layers {self.config.layer_start}:{self.config.layer_end})"


@attrs.frozen(slots=True, kw_only=True)
class Chain:
    """All children and what they have in common."""

    children: Sequence[Child]
    topology: StageTopology
    options: StageOptions
    openai: OpenAIOptions

    def setup_line(self, child: Child) -> bytes:
        """What a child reads from its standard input."""
        has_endpoint = child.openai_listener is not None
        return (
            json.dumps(
                {
                    "config": to_json_value(child.config),
                    "topology": to_json_value(self.topology),
                    "options": to_json_value(self.options),
                    "openai": to_json_value(self.openai) if has_endpoint else None,
                }
            ).encode()
            + b"\n"
        )


async def run_chain(
    chain: Chain, *, relay: bool, ready: Callable[[], None], loading: Callable[[], None]
) -> None:
    """Start all children and watch them until cancelled; leaving, on any path, leaves no child behind.

    Args:
        chain: what to run. Its sockets are closed here once the children have them.
        relay: copy what children write to stderr to this process's stderr.
        ready: called once stage 0, and with it the whole chain, is ready.
        loading: called when a child's ``loaded`` has changed.

    Raises:
        CliError: a child ended; says which, how, and with which last words. The others were stopped.
    """
    async with trio.open_nursery() as nursery:
        await nursery.start(answer_statistics_signal, partial(_tell_statistics, chain))
        for child in chain.children:
            await _start(nursery, chain, child, relay=relay, ready=ready, loading=loading)


def _tell_statistics(chain: Chain) -> None:
    """Log counts of this process, and ask the stages, whose answers come on their status pipes."""
    log_statistics({"stage_id": None, "children": len(chain.children)} | process_statistics())
    for child in chain.children:
        if child.handles_signals and child.process is not None and STATISTICS_SIGNAL is not None:
            child.process.send_signal(STATISTICS_SIGNAL)


async def _start(
    nursery: trio.Nursery,
    chain: Chain,
    child: Child,
    *,
    relay: bool,
    ready: Callable[[], None],
    loading: Callable[[], None],
) -> None:
    """Start one child and the tasks that belong to it."""
    status_read, status_write = os.pipe()
    status = trio.lowlevel.FdStream(status_read)
    listeners = [listener for listener in (child.listener, child.openai_listener) if listener is not None]
    command = [*child.command, "--listen-fd", str(child.listener.fileno()), "--status-fd", str(status_write)]
    if child.openai_listener is not None:
        command += ["--openai-fd", str(child.openai_listener.fileno())]
    try:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
                deliver_cancel=partial(_stop, chain.children[0]),
                pass_fds=[status_write, *(listener.fileno() for listener in listeners)],
                # Not in the terminal's foreground group: Ctrl-C is for this process, which stops them then.
                process_group=0,
            )
        )
    finally:
        os.close(status_write)
        for listener in listeners:
            listener.close()
    child.process = process
    nursery.start_soon(_watch, child, process, relay)
    nursery.start_soon(_read_status, status, child, ready, loading)
    nursery.start_soon(_send_setup, process, chain.setup_line(child))


async def _stop(front: Child, process: trio.Process) -> None:
    """Ask a child to stop, the front one first; kill it if it does not."""
    deadline = trio.current_time() + KILL_AFTER_SECONDS
    if front.process is not None and front.process is not process:
        with trio.move_on_after(FRONT_SECONDS):
            await front.process.wait()
    process.terminate()
    await trio.sleep_until(deadline)
    process.kill()


async def _send_setup(process: trio.Process, line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(trio.BrokenResourceError):  # the child is gone; its watcher says so
        await process.stdin.send_all(line)


async def _read_status(
    status: trio.lowlevel.FdStream, child: Child, ready: Callable[[], None], loading: Callable[[], None]
) -> None:
    """A child writes ``load DONE TOTAL`` while it loads, ``ready``, and ``statistics JSON``, a line each."""
    rest = b""
    async with status:
        async for chunk in status:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                child.handles_signals = True
                word, _, rest_of_line = line.partition(b" ")
                if word == b"load":
                    done, total = map(int, rest_of_line.split())
                    child.loaded = (done, total)
                    loading()
                elif word == b"statistics":
                    log_statistics(json.loads(rest_of_line))
                elif child.config.stage_index == 0:
                    ready()


async def _watch(child: Child, process: trio.Process, relay: bool) -> None:
    """Wait for the child's end, which is an error whenever this task is not cancelled first."""
    async with trio.open_nursery() as nursery:
        read_all = trio.Event()
        nursery.start_soon(_read_stderr, child, process, relay, read_all)
        await process.wait()
        # What it spawned may hold the pipe open, so its end is not waited for without limit.
        with trio.move_on_after(1):
            await read_all.wait()
        nursery.cancel_scope.cancel()
    raise CliError(obituary(child.name, process.returncode or 0, child.tail))


async def _read_stderr(child: Child, process: trio.Process, relay: bool, done: trio.Event) -> None:
    assert process.stderr is not None
    rest = b""
    async for chunk in process.stderr:
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[-MAX_LINE:]
        _take_lines(child, lines, relay)
    _take_lines(child, [rest] if rest else [], relay)
    done.set()


def _take_lines(child: Child, lines: Sequence[bytes], relay: bool) -> None:
    for line in lines:
        text = line[-MAX_LINE:].decode(errors="replace").rstrip()
        child.tail.append(text)
        if relay:
            click.echo(f"[{child.config.stage_id}] {text}", err=True)


def obituary(name: str, code: int, tail: Sequence[str]) -> str:
    """How a child ended, with its own error if it gave one, else its last lines."""
    ended = f"{name} was killed by {_signal_name(-code)}" if code < 0 else f"{name} exited with code {code}"
    words = [line for line in tail if line.strip()]
    for line in reversed(words):
        if line.startswith("error: "):
            return f"{ended}: {line.removeprefix('error: ')}"
    return ended + ("; its last lines were:\n" + "\n".join(f"  {line}" for line in words) if words else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
