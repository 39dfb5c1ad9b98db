"""One stage in this process, until a signal or a failure ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import trio

from skippy import embed
from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology
from skippy.telemetry import STDERR_VARIABLE, Level, Telemetry, configure_logging

from .errors import FAILURE
from .progress import SliceProgress
from .statistics import answer_statistics_signal, stage_statistics

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 4.0
"""After this long a stop becomes an exit without clean-up."""


class Announce(Protocol):
    """Told how far a stage has come; ``listening`` and ``ready`` are called at most once, in this order."""

    def loading(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of the model part are loaded. Called from the engine's thread."""

    def listening(self, stage: embed.Stage, url: str | None) -> None:
        """The model is loaded and the ports are bound; ``url`` is the OpenAI endpoint, if there is one."""

    def ready(self) -> None:
        """The stage is ready: with an OpenAI endpoint, the whole chain is."""

    def statistics(self, counts: dict[str, Any]) -> None:
        """Somebody has asked for these with a signal."""


def serve_one(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    openai: OpenAIOptions | None,
    announce: Announce,
    *,
    stage_socket: socket.socket | None = None,
    openai_socket: socket.socket | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> None:
    """Run the stage until SIGINT, SIGTERM or SIGHUP; raises what the stage fails with."""
    level = Level.parse(options.telemetry_level)
    configure_logging(debug=level is Level.DEBUG or STDERR_VARIABLE in os.environ)
    context = {"run_id": config.run_id, "stage_id": config.stage_id}
    telemetry = Telemetry.from_environment(level, capacity=options.telemetry_queue_capacity, context=context)

    stage: embed.Stage | None = None

    async def serve() -> None:
        nonlocal stage
        async with contextlib.AsyncExitStack() as stack:
            with SliceProgress(f"layers {config.layer_start}:{config.layer_end}") as progress:

                def report(what: str, done: int, total: int) -> None:
                    progress(what, done, total)
                    if what == "load":
                        announce.loading(done, total)

                opened = embed.open_stage(
                    config,
                    topology,
                    options,
                    listen_socket=stage_socket,
                    telemetry=telemetry,
                    progress=report,
                )
                stage = await stack.enter_async_context(opened)
            if openai is None:
                announce.listening(stage, None)
            else:
                endpoint = await stack.enter_async_context(
                    embed.open_openai(stage, openai, listen_socket=openai_socket)
                )
                announce.listening(stage, endpoint.url)
                await endpoint.wait_ready()
            announce.ready()
            await trio.sleep_forever()

    async def main() -> None:
        # Telemetry outlives the stage, so that what happens while it stops is recorded too.
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            await nursery.start(
                answer_statistics_signal,
                lambda: announce.statistics(stage_statistics(config.stage_id, stage)),
            )
            await run_until_signal(serve, grace_seconds)
            nursery.cancel_scope.cancel()

    trio.run(main)


async def run_until_signal(main: Callable[[], Awaitable[None]], grace_seconds: float | None) -> None:
    """Run ``main``; a stop signal cancels it, and further ones change nothing.

    If the process is still there ``grace_seconds`` after the signal, it exits without clean-up (None: never).
    """
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:
            # Read to the end: a signal that nobody reads gets its default action when the receiver closes.
            reading = trio.CancelScope(shield=True)
            stopping = trio.CancelScope()
            nursery.start_soon(_cancel_on_signal, signals, reading, stopping, grace_seconds)
            try:
                with stopping:
                    await main()
            finally:
                reading.cancel()


async def _cancel_on_signal(
    signals: AsyncIterator[int],
    reading: trio.CancelScope,
    stopping: trio.CancelScope,
    grace_seconds: float | None,
) -> None:
    with reading:
        async for _ in signals:
            if grace_seconds is not None and not stopping.cancel_called:
                exit_after(grace_seconds)
            stopping.cancel()


def exit_after(seconds: float) -> None:
    """End the process ``seconds`` from now, whatever it is doing, unless it ended before."""
    timer = threading.Timer(seconds, os._exit, (FAILURE,))
    timer.daemon = True
    timer.start()
