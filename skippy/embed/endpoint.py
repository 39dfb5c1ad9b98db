"""The OpenAI endpoint of a stage 0 for the length of a block."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
from collections.abc import AsyncIterator, Callable

import attrs
import trio

from skippy.config import Endpoint, OpenAIOptions
from skippy.config.access import ANY
from skippy.frontend.app import create_app
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.frontend.options import FrontendOptions
from skippy.frontend.server import serve_http
from skippy.stage import Stage, StageStartError
from skippy.stage.nurseries import open_hidden_nursery
from skippy.telemetry import get_logger, names

CLEAN_SECS = 0.5
"""How long lanes may take to end in order, once no request is left."""


@attrs.frozen(slots=True)
class OpenAIEndpoint:
    """A running OpenAI endpoint.

    Attributes:
        host, port: where it listens.
    """

    host: str
    port: int
    _pool: LanePool

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients, ending in ``/v1``."""
        return f"http://{Endpoint(self.host, self.port)}/v1"

    @property
    def ready(self) -> bool:
        """Whether every stage of the chain is loaded and connected."""
        return self._pool.ready

    async def wait_ready(self) -> None:
        """Wait until the chain is ready.

        Has no deadline and raises nothing of its own: what keeps the chain from being ready is logged, and in
        :attr:`last_error`, while the lanes go on trying. Put it in ``trio.fail_after`` to give up.
        """
        await self._pool.wait_ready()

    @property
    def last_error(self) -> str | None:
        """Why the chain is not ready; None while it is, or before the first attempt has come to anything."""
        return self._pool.last_error


@contextlib.asynccontextmanager
async def open_openai(
    stage: Stage,
    options: OpenAIOptions | None = None,
    *,
    listen_socket: socket.socket | None = None,
    grace_secs: float = 1.0,
    outage: Callable[[], str | None] = lambda: None,
) -> AsyncIterator[OpenAIEndpoint]:
    """Serve the OpenAI API on a stage 0 for the length of the block; inside it HTTP is bound.

    The chain below may still be connecting: see ``endpoint.wait_ready``. Until then requests are answered
    with 503.

    When the block is left, new requests are answered with 503 and running ones have ``grace_secs`` to finish;
    then they end with an error. Cancelled, they end at once.

    Args:
        listen_socket: an already listening TCP socket to use instead of binding ``options.bind_addr``.
        outage: asked, while no lane is connected, what the host knows about why; None lets the lanes say what
            they have found.

    Raises:
        StageStartError: the stage does not own layer 0, or the concurrency exceeds its lanes.
        OSError: the address cannot be bound.
    """
    options = options or OpenAIOptions()
    config, telemetry = stage.config, stage.context.telemetry
    lanes = _lanes_of(stage, options)
    pool = LanePool(stage, lanes, outage)
    generator = ChainGenerator(stage, pool, options.model_id or config.model_id, options)
    app = create_app(generator, _frontend_options(stage, options))
    shutdown = trio.Event()
    serve = functools.partial(
        serve_http,
        app,
        listen_socket or str(options.bind_endpoint),
        shutdown=shutdown,
        grace_secs=grace_secs,
    )
    # HTTP ends before the lanes do, so that open streams end with a word about the shutdown.
    async with _pool_running(pool), open_hidden_nursery() as nursery:
        host, port = await nursery.start(serve)
        _warn_if_open(Endpoint(host, port), options)
        telemetry.emit(
            names.STAGE_OPENAI_SERVER_START, bind_addr=f"{host}:{port}", generation_concurrency=lanes
        )
        try:
            yield OpenAIEndpoint(host, port, pool)
        finally:
            shutdown.set()


def _lanes_of(stage: Stage, options: OpenAIOptions) -> int:
    """How many lanes the endpoint is to have. Raises StageStartError where the stage cannot give it these."""
    config = stage.config
    if not stage.info.is_first or config.stage_index != 0:
        raise StageStartError(
            f"{config.stage_id}: only stage 0, which owns layer 0, can serve OpenAI; "
            f"this is stage {config.stage_index} with layers {config.layer_start}:{config.layer_end}"
        )
    lanes = options.generation_concurrency or config.lane_count
    least = options.adaptive_generation_min_concurrency or 1
    for what, wanted in (("generation concurrency", lanes), ("adaptive generation min concurrency", least)):
        if wanted > config.lane_count:
            raise StageStartError(
                f"{config.stage_id}: {what} {wanted} is more than lane_count {config.lane_count}"
            )
    return lanes


def _frontend_options(stage: Stage, options: OpenAIOptions) -> FrontendOptions:
    cache = stage.context.cache
    return FrontendOptions(
        default_max_tokens=options.default_max_tokens,
        keep_alive_secs=options.stream_keep_alive_secs or math.inf,
        allows_chat_templates=options.allow_chat_templates,
        max_stored_responses=options.stored_responses,
        keeps_prompts_on_disk=cache is not None and cache.settings.directory is not None,
        telemetry=stage.context.telemetry,
        access=options,
        host_names=() if options.bind_endpoint.ip is not None else (options.bind_endpoint.host,),
    )


def _warn_if_open(endpoint: Endpoint, options: OpenAIOptions) -> None:
    """Say so where anyone may use the model, from a network or by a web page."""
    if options.api_keys:
        return
    if endpoint.beyond_loopback:
        get_logger("skippy").warning(
            "ANYONE WHO REACHES THIS ADDRESS CAN USE THE MODEL: the OpenAI endpoint listens beyond loopback "
            "and asks for no API key; give --api-key-file, or bind it to 127.0.0.1",
            endpoint=str(endpoint),
        )
    for option in ("cors_origins", "allowed_hosts"):
        if ANY in getattr(options, option):
            get_logger("skippy").warning(
                f"ANY WEB PAGE CAN USE THE MODEL: {option} has '*', and the OpenAI endpoint asks for no API "
                f"key; give --api-key-file, or name what is to be allowed",
                endpoint=str(endpoint),
            )


@contextlib.asynccontextmanager
async def _pool_running(pool: LanePool) -> AsyncIterator[None]:
    """The pool's lanes for the length of the block, which outlive a cancelled block by what it still does.

    Leaving it waits for a moment for lanes that are being cleaned, so that stages keep what requests leave.
    """
    async with open_hidden_nursery() as nursery:
        scope = trio.CancelScope(shield=True)

        async def keep_lanes() -> None:
            with scope:
                await pool.serve()

        nursery.start_soon(keep_lanes)
        try:
            yield
            with trio.move_on_after(CLEAN_SECS):
                await pool.wait_clean()
        finally:
            scope.cancel()
