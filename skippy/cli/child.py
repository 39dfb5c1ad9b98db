"""``skippy stage-child``: one stage of a chain that ``skippy run`` started. Not for people."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from typing import Any

import click

from skippy import embed
from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology, from_json_value
from skippy.workers.obituary import UNRETURNED

from .errors import SettingError
from .serving import serve_one
from .stopping import Stop, end_process, stop_signals

MAX_SETTINGS_BYTES = 1024 * 1024
ORPHAN_SECS = 2.5
_SETTINGS = ("config", "topology", "options", "openai", "grace_secs")


@click.command("stage-child", hidden=True)
@click.option("--listen-fd", type=int, required=True)
@click.option("--status-fd", type=int, required=True)
@click.option("--openai-fd", type=int)
def stage_child(listen_fd: int, status_fd: int, openai_fd: int | None) -> None:
    """Run the stage that the parent process describes on standard input."""
    settings, rest = _read_settings()
    config = from_json_value(settings["config"], StageConfig)
    topology = from_json_value(settings["topology"], StageTopology)
    options = from_json_value(settings["options"], StageOptions)
    openai = None if settings["openai"] is None else from_json_value(settings["openai"], OpenAIOptions)
    grace_secs: float = settings["grace_secs"]
    parent = _Parent(status_fd)
    with stop_signals(grace_secs, patient=True) as stop:
        threading.Thread(target=parent.listen, args=(rest, stop), name="parent watch", daemon=True).start()
        serve_one(
            config,
            topology,
            options,
            openai,
            parent,
            stop,
            grace_secs=grace_secs,
            stage_socket=socket.socket(fileno=listen_fd),
            openai_socket=None if openai_fd is None else socket.socket(fileno=openai_fd),
            outage=lambda: parent.notice,
            kill_secs=parent.kill_secs,
        )
        end_process(0)


class _Parent:
    """The process that started this one: is told on an inherited pipe, and says things on standard input.

    Nothing here waits for it: a line that finds the pipe full is lost.

    Attributes:
        notice: what it has said about an outage of the chain; None while there is none.
    """

    def __init__(self, status_fd: int) -> None:
        os.set_blocking(status_fd, False)
        self._status_fd = status_fd
        self._percent = -1
        self.notice: str | None = None
        self._kill_at = math.inf

    def kill_secs(self) -> float:
        """How long it is until it kills this process; infinite as long as it has not said so."""
        return self._kill_at - time.monotonic()

    def listen(self, data: bytes, stop: Stop) -> None:
        """Take notices, a line of JSON each, until the end of standard input: the parent is gone.

        Then nobody keeps the chain together, and its ports are wanted for the next one: the process ends at
        once, and after ORPHAN_SECS whatever it is doing.
        """
        while True:
            *lines, data = data.split(b"\n")
            for line in lines:
                said = json.loads(line)
                self.notice = said["notice"]
                if said["kill_secs"] is not None:
                    self._kill_at = time.monotonic() + said["kill_secs"]
            if not (chunk := os.read(0, 65536)):
                break
            data += chunk
        stop.request(at_once=True)
        time.sleep(ORPHAN_SECS)
        os._exit(UNRETURNED)

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._status_fd, line + b"\n")

    def loading(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != self._percent:
            self._percent = percent
            self._tell(b"load %d %d" % (done, total))

    def listening(self, stage: embed.Stage, url: str | None) -> None:
        self._tell(b"serving")

    def ready(self) -> None:
        self._tell(b"ready")

    def served(self) -> None:
        self._tell(b"served")

    def alone(self) -> None:
        self._tell(b"alone")

    def statistics(self, counts: dict[str, Any]) -> None:
        self._tell(b"statistics " + json.dumps(counts).encode())


def _read_settings() -> tuple[dict[str, Any], bytes]:
    """One line of JSON from standard input, which stays open, and what was read beyond it."""
    data = bytearray()
    while b"\n" not in data:
        chunk = os.read(0, 65536)
        if not chunk or len(data) > MAX_SETTINGS_BYTES:
            raise _not_for_people()
        data += chunk
    line, _, rest = data.partition(b"\n")
    try:
        settings = json.loads(line)
        return {name: settings[name] for name in _SETTINGS}, bytes(rest)
    except (ValueError, LookupError, TypeError):
        raise _not_for_people() from None


def _not_for_people() -> SettingError:
    return SettingError("stage-child is started by skippy run, which sends it settings; run that instead")
