"""``python -m tests.support.toy_skippy …``: the ``skippy`` command with toy engines in place of llama.cpp.

What it takes from the environment is described at :class:`Toy`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import trio

from skippy import embed
from skippy.cli.launch import Chain, Child
from skippy.cli.main import main
from skippy.cli.sockets import endpoint_of, listen_on
from skippy.config import Endpoint, OpenAIOptions, StageConfig, StageOptions
from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.topology import make_stage_configs, make_topology, plan_even

if TYPE_CHECKING:
    from skippy.cli.demo import DemoOptions

MODULE = "tests.support.toy_skippy"
VARIABLE = "SKIPPY_TEST_TOY"
SMALL_BUFFER = 4096
LAYERS = 6
CONTEXT = 40_000


@attrs.frozen(kw_only=True)
class Toy:
    """How the engines behave.

    Attributes:
        layers: of the whole model.
        stuck_stage: index of a stage whose native calls do not return; -1: none.
        stuck_after: calls that do, before; 0: not even the load.
        stuck_in: ``"c"``: in a C function, which has let go of the interpreter; ``"sleep"``: in time.sleep;
            ``"crash"``: nowhere, the call reads what is not there.
    """

    layers: int = LAYERS
    stuck_stage: int = -1
    stuck_after: int = 20
    stuck_in: str = "c"

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(attrs.asdict(self))}


def block(how: str) -> None:
    """Never return."""
    if how == "crash":
        ctypes.string_at(0)
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


def toy_chain(stages: int, grace_secs: float) -> Chain:
    """What ``skippy run`` would start."""
    ranges = plan_even(LAYERS, stages)
    listeners = [listen_on(Endpoint("127.0.0.1", 0), "stage") for _ in ranges]
    openai_listener = listen_on(Endpoint("127.0.0.1", 0), "http")
    openai_listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    topology = make_topology(ranges, list(map(endpoint_of, listeners)), topology_id="t", model_id="toy")
    configs = make_stage_configs(topology, run_id="r", model_path="none.gguf", ctx_size=CONTEXT, lane_count=2)
    return Chain(
        children=[
            Child(
                config=config,
                listener=listener,
                openai_listener=openai_listener if config.stage_index == 0 else None,
                command=(sys.executable, "-m", MODULE, "stage-child"),
            )
            for config, listener in zip(configs, listeners, strict=True)
        ],
        topology=topology,
        options=StageOptions(link_token="secret", telemetry_level="off"),
        openai=OpenAIOptions(bind_addr=str(endpoint_of(openai_listener))),
        grace_secs=grace_secs,
    )


def prepare(options: DemoOptions) -> Chain:
    return toy_chain(options.stages or 3, options.grace_secs)


def serve_with_small_buffers() -> None:
    """Have HTTP's accepted sockets hold little: a client that does not read is soon felt."""
    from skippy.frontend import server

    opens = server.open_listeners

    async def open_small_listeners(bind: str | socket.socket, stall_secs: float) -> list[trio.SocketListener]:
        listeners = await opens(bind, stall_secs)
        for listener in listeners:
            listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        return listeners

    server.open_listeners = open_small_listeners


if __name__ == "__main__":
    toy = Toy(**json.loads(os.environ.get(VARIABLE, "{}")))
    embed.open_stage = functools.partial(embed.open_stage, engine_factory=functools.partial(make_engine, toy))
    # A process imports what its command does, and no more: tests start hundreds of them.
    if any("openai" in word for word in sys.argv[1:]):  # a command, or an option with address or socket
        serve_with_small_buffers()
    if sys.argv[1] == "run":
        from skippy.cli import run

        vars(run)["prepare"] = prepare
    main()
