"""One stage in this process, until a stop or a failure ends it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import trio

from skippy import embed
from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology
from skippy.models import Progress
from skippy.telemetry import STDERR_VARIABLE, Level, Telemetry, configure_logging

from .progress import SliceProgress
from .statistics import answer_statistics_signal, stage_statistics
from .stopping import Stop

ENDING_SECS = 1.5
"""How much of the grace period is kept for the end itself: last words to clients, lanes, the engine."""
FREEING_SECS = 0.5
"""How much of that, at the very end, is kept from the prefix cache, which may write until then."""


class Announce(Protocol):
    """Told how far a stage has come; ``listening``, ``ready`` and ``served`` are called at most once."""

    def loading(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of the model part are loaded. Called from the engine's thread."""

    def listening(self, stage: embed.Stage, url: str | None) -> None:
        """The model is loaded and the ports are bound; ``url`` is the OpenAI endpoint, if there is one."""

    def ready(self) -> None:
        """The stage is ready: with an OpenAI endpoint, the whole chain is."""

    def served(self) -> None:
        """A request has gone through the stage, to a good end."""

    def alone(self) -> None:
        """It is stopping, and no request needs the chain any more."""

    def statistics(self, counts: dict[str, Any]) -> None:
        """Somebody has asked for these with a signal."""


def serve_one(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    openai: OpenAIOptions | None,
    announce: Announce,
    stop: Stop,
    *,
    grace_secs: float,
    stage_socket: socket.socket | None = None,
    openai_socket: socket.socket | None = None,
    outage: Callable[[], str | None] = lambda: None,
    kill_secs: Callable[[], float] = lambda: math.inf,
) -> None:
    """Run the stage until ``stop`` is requested; raises what the stage fails with.

    Args:
        grace_secs: the whole time for a stop. Running requests may go on until ENDING_SECS before its end, or
            for one half of it if it is short.
        outage: as for :func:`skippy.embed.open_openai`.
        kill_secs: how long it is until somebody kills this process, as far as that is known by now.
    """
    telemetry = _start_reporting(config, options)
    stage: embed.Stage | None = None
    stop_by = math.inf

    def ending_secs() -> float:
        return min(stop_by - trio.current_time(), kill_secs()) - FREEING_SECS

    open_endpoint = _endpoint_opener(openai, openai_socket, grace_secs, outage)

    async def serve() -> None:
        nonlocal stage, stop_by
        async with contextlib.AsyncExitStack() as stack:
            with _slice_progress(config, announce) as progress:
                opened = embed.open_stage(
                    config,
                    topology,
                    options,
                    listen_socket=stage_socket,
                    telemetry=telemetry,
                    progress=progress,
                    ending_secs=ending_secs,
                )
                stage = await stack.enter_async_context(opened)
            stack.callback(announce.alone)
            endpoint = await stack.enter_async_context(open_endpoint(stage))
            async with _announced(stage, endpoint, announce):
                # Leaving the blocks is what ends them: the endpoint's lets requests finish.
                stop.in_order()
                await stop.requested.wait()
                stop_by = trio.current_time() + grace_secs

    def tell_statistics() -> None:
        announce.statistics(stage_statistics(config.stage_id, stage))

    trio.run(_run, serve, stop, telemetry, tell_statistics)


def _endpoint_opener(
    openai: OpenAIOptions | None,
    listen_socket: socket.socket | None,
    grace_secs: float,
    outage: Callable[[], str | None],
) -> Callable[[embed.Stage], AbstractAsyncContextManager[embed.OpenAIEndpoint | None]]:
    """What opens the endpoint on the stage, if there is to be one.

    Call it before anything runs: it imports all of HTTP.
    """
    if openai is None:
        return lambda _: contextlib.nullcontext()
    return functools.partial(
        embed.open_openai,
        options=openai,
        listen_socket=listen_socket,
        grace_secs=max(grace_secs - ENDING_SECS, grace_secs / 2),
        outage=outage,
    )


async def _run(
    serve: Callable[[], Awaitable[None]], stop: Stop, telemetry: Telemetry, on_signal: Callable[[], None]
) -> None:
    # Telemetry outlives the stage, so that what happens while it stops is recorded too.
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.serve)
        await nursery.start(answer_statistics_signal, on_signal)
        await stop.run(serve)
        nursery.cancel_scope.cancel()


def _start_reporting(config: StageConfig, options: StageOptions) -> Telemetry:
    """Logs, crashes and telemetry of this process, whose one stage it is."""
    # A native crash says where Python was; the supervisor keeps the last lines of its stages.
    with contextlib.suppress(io.UnsupportedOperation):  # a host's stderr may be no file
        faulthandler.enable(all_threads=False)
    level = Level.parse(options.telemetry_level)
    configure_logging(debug=level is Level.DEBUG or STDERR_VARIABLE in os.environ)
    context = {"run_id": config.run_id, "stage_id": config.stage_id}
    return Telemetry.from_environment(level, capacity=options.telemetry_queue_capacity, context=context)


@contextlib.contextmanager
def _slice_progress(config: StageConfig, announce: Announce) -> Iterator[Progress]:
    """The progress callback of the stage's model part: shown on a terminal, and announced."""
    with SliceProgress(f"layers {config.layer_start}:{config.layer_end}") as progress:

        def report(what: str, done: int, total: int) -> None:
            progress(what, done, total)
            if what == "load":
                announce.loading(done, total)

        yield report


@contextlib.asynccontextmanager
async def _announced(
    stage: embed.Stage, endpoint: embed.OpenAIEndpoint | None, announce: Announce
) -> AsyncIterator[None]:
    """Tell how far the stage, whose ports are bound, comes while the block goes on."""
    announce.listening(stage, None if endpoint is None else endpoint.url)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_announce_ready, endpoint, announce)
        nursery.start_soon(_announce_served, stage, announce)
        yield
        nursery.cancel_scope.cancel()


async def _announce_ready(endpoint: embed.OpenAIEndpoint | None, announce: Announce) -> None:
    if endpoint is not None:
        await endpoint.wait_ready()
    announce.ready()


async def _announce_served(stage: embed.Stage, announce: Announce) -> None:
    await stage.context.served.wait()
    announce.served()
