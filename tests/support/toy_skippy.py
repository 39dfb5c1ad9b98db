"""``python -m tests.support.toy_skippy …``: the ``skippy`` command with toy engines in place of llama.cpp.

What it takes from the environment is described at :class:`Toy`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from skippy import embed
from skippy.cli.main import main
from skippy.config import StageConfig
from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.frontend import server

VARIABLE = "SKIPPY_TEST_TOY"
SMALL_BUFFER = 4096


@attrs.frozen(kw_only=True)
class Toy:
    """How the engines behave.

    Attributes:
        layers: of the whole model.
        stuck_stage: index of a stage whose native calls do not return; -1: none.
        stuck_after: calls that do, before; 0: not even the load.
        stuck_in: ``"c"``: in a C function, which has let go of the interpreter; ``"sleep"``: in time.sleep.
    """

    layers: int = 6
    stuck_stage: int = -1
    stuck_after: int = 20
    stuck_in: str = "c"

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(attrs.asdict(self))}


def block(how: str) -> None:
    """Never return."""
    sleep = ctypes.CDLL(None).sleep if how == "c" else time.sleep
    while True:
        sleep(600)


class StuckEngine(ToyEngine):
    """One whose native call does not come back, and that no abort reaches."""

    def __init__(self, *arguments: Any, after: int, how: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left = after
        self._how = how
        if not after:
            block(how)

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        if not self._left:
            block(self._how)
        self._left -= 1
        super().decode(segments, output)


def make_engine(toy: Toy, config: StageConfig) -> ToyEngine:
    make: Any = ToyEngine
    if toy.stuck_stage == config.stage_index:
        make = functools.partial(StuckEngine, after=toy.stuck_after, how=toy.stuck_in)
    engine: ToyEngine = make(
        config.layer_start,
        config.layer_end,
        toy.layers,
        context_length=config.ctx_size,
        max_sequences=config.lane_count,
    )
    return engine


async def open_small_listeners(bind: str | socket.socket, stall_secs: float) -> list[trio.SocketListener]:
    """As the server, but accepted sockets hold little: a client that does not read is soon felt."""
    listeners = await _open_listeners(bind, stall_secs)
    for listener in listeners:
        listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    return listeners


_open_listeners = server.open_listeners

if __name__ == "__main__":
    toy = Toy(**json.loads(os.environ.get(VARIABLE, "{}")))
    embed.open_stage = functools.partial(embed.open_stage, engine_factory=functools.partial(make_engine, toy))
    server.open_listeners = open_small_listeners
    main()
