"""``skippy stage-child``: one stage of a chain that ``skippy run`` started. Not for people."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from typing import Any

import click

from skippy import embed
from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology, from_json_value

from .errors import SettingError
from .serving import exit_after, serve_one

MAX_SETTINGS_BYTES = 1024 * 1024
GRACE_SECONDS = 2.5  # less than what the parent gives before it kills


@click.command("stage-child", hidden=True)
@click.option("--listen-fd", type=int, required=True)
@click.option("--status-fd", type=int, required=True)
@click.option("--openai-fd", type=int)
def stage_child(listen_fd: int, status_fd: int, openai_fd: int | None) -> None:
    """Run the stage that the parent process describes on standard input."""
    settings = _read_settings()
    config = from_json_value(settings["config"], StageConfig)
    topology = from_json_value(settings["topology"], StageTopology)
    options = from_json_value(settings["options"], StageOptions)
    openai = None if settings["openai"] is None else from_json_value(settings["openai"], OpenAIOptions)
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()

    serve_one(
        config,
        topology,
        options,
        openai,
        _TellParent(status_fd),
        stage_socket=socket.socket(fileno=listen_fd),
        openai_socket=None if openai_fd is None else socket.socket(fileno=openai_fd),
        grace_seconds=GRACE_SECONDS,
    )


class _TellParent:
    """Announces on an inherited pipe, a line each.

    Nothing here waits for the parent: a line that finds the pipe full is lost.
    """

    def __init__(self, status_fd: int) -> None:
        os.set_blocking(status_fd, False)
        self._status_fd = status_fd
        self._percent = -1

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._status_fd, line + b"\n")

    def loading(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != self._percent:
            self._percent = percent
            self._tell(b"load %d %d" % (done, total))

    def listening(self, stage: embed.Stage, url: str | None) -> None:
        """Not told: the parent made the sockets, so it knows the addresses."""

    def ready(self) -> None:
        self._tell(b"ready")

    def statistics(self, counts: dict[str, Any]) -> None:
        self._tell(b"statistics " + json.dumps(counts).encode())


def _read_settings() -> dict[str, Any]:
    """One line of JSON from standard input, which stays open."""
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk or len(data) > MAX_SETTINGS_BYTES:
            raise SettingError(
                "stage-child is started by skippy run, which sends it settings; run that instead"
            )
        data += chunk
    try:
        settings = json.loads(data)
        return {name: settings[name] for name in ("config", "topology", "options", "openai")}
    except (ValueError, LookupError, TypeError):
        raise SettingError(
            "stage-child is started by skippy run, which sends it settings; run that instead"
        ) from None


def _end_with_parent() -> None:
    """Stop as for SIGTERM once the parent, which holds the other end of standard input, is gone."""
    while os.read(0, 4096):
        pass
    exit_after(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
