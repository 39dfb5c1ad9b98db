"""A served chain of real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import attrs

from tests.support.processes import Process, running


@attrs.define
class Served:
    """A running `skippy run`."""

    process: Process
    url: str
    model: str


@contextlib.contextmanager
def serve(model: Path, stages: int | None, *arguments: str) -> Iterator[Served]:
    """`skippy run` on a port of the system's choice, one thread per stage, ended with the block."""
    command = ["run", "--model", str(model), "--bind", "127.0.0.1:0", "--threads", "1", *arguments]
    if stages is not None:
        command += ["--stages", str(stages)]
    with running(command) as process:
        url = process.wait_for(r"OpenAI endpoint: (\S+)")[1]
        name = process.wait_for(r"serves (\S+) in")[1]
        yield Served(process, url, name)
