"""A running stage: engine, listener and all between them, for the length of an ``async with`` block."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import trio

from skippy.config import Endpoint, StageConfig, StageOptions, StageTopology, check_links
from skippy.config.links import TLS_SCHEMES
from skippy.engine import EngineInfo, StageEngine, Vocabulary, usable_cores
from skippy.telemetry import NULL_TELEMETRY, Telemetry, names

from .accepting import serve_listener
from .admission import ModelIdentity, identify_engine, make_admission
from .caching import open_cache
from .context import StageContext, find_neighbours, log
from .errors import StageStartError
from .grammars import Grammars, open_grammars
from .keeping import StageCache
from .links import Listener, StageLinks, Transport, open_links
from .liveness import Liveness
from .nurseries import open_hidden_nursery
from .returns import ReturnHub
from .runtime import InlineRuntime, Runtime, open_runtime_thread
from .scheduler import ChainShape, Scheduler, open_scheduler
from .tokenizer import Tokenizer, TokenizerError

ENDING_SECS = 1.0
"""How long a stage that ends goes on writing states of its prefix cache, where nobody says."""


class Stage:
    """One stage that is loaded and listening. Made by :func:`open_stage`."""

    def __init__(
        self,
        context: StageContext,
        endpoint: Endpoint,
        tokenizer: Tokenizer | None = None,
        topology: StageTopology | None = None,
    ) -> None:
        self.context = context
        self.topology = topology
        """The chain as a whole, where it was given."""
        self.endpoint = endpoint
        """Where it listens, with the real port."""
        self._tokenizer = tokenizer

    @property
    def config(self) -> StageConfig:
        return self.context.config

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer; None on a middle stage."""
        return self.context.scheduler.vocabulary

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer as a capability of its own, on stage 0.

        Raises:
            TokenizerError: ``stage_zero_required``.
        """
        if self._tokenizer is None:
            text = f"{self.config.stage_id} is not stage 0, which alone serves its tokenizer"
            raise TokenizerError("stage_zero_required", text)
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        return self.context.info

    def lane_states(self) -> dict[str, int]:
        """How many lanes there are in each state; states without a lane are left out."""
        return dict(Counter(lane.state.value for lane in self.context.lanes))


@contextlib.asynccontextmanager
async def open_stage(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    make_engine: Callable[[], StageEngine],
    *,
    transport: Transport | None = None,
    listen_socket: socket.socket | None = None,
    telemetry: Telemetry = NULL_TELEMETRY,
    identity: ModelIdentity | None = None,
    inline: bool = False,
    ending_secs: Callable[[], float] = lambda: ENDING_SECS,
    open_runtime: Callable[[], AbstractAsyncContextManager[Runtime]] = open_runtime_thread,
) -> AsyncIterator[Stage]:
    """Bind, load the engine, and serve until the block is left.

    The port is bound before the model loads, so that a wrong address is reported at once and early peers
    wait instead of being refused; connections are answered once the engine is loaded.

    Args:
        make_engine: called on the runtime thread; its errors are raised from here.
        transport: links to listen and connect with; default: of the scheme of each endpoint.
        listen_socket: an already listening TCP socket to use instead of binding ``bind_addr``.
        identity: the model that the engine's part belongs to; by default its name and shape.
        inline: run the engine on the event loop (exact engines under a virtual clock).
        ending_secs: asked as the block is left: how long states of the prefix cache may still be written.
        open_runtime: what runs it where it is not inline.

    Raises:
        OSError: the address cannot be bound.
        StageStartError: the engine and the configuration do not fit, or a neighbour is not known.

    Leaving the block, or a cancelled one, closes every connection and frees the engine.
    """
    check_links(config, topology, options)
    async with contextlib.AsyncExitStack() as stack:
        links = await stack.enter_async_context(open_links(options, transport))
        listener = await _listen(config, links.transport, listen_socket)
        stack.callback(listener.close)
        _warn_if_open(listener.endpoint, options)
        runtime = InlineRuntime() if inline else await stack.enter_async_context(open_runtime())
        scheduler = await stack.enter_async_context(
            _open_scheduler(config, topology, make_engine, runtime, telemetry, safe=options.safe_mode)
        )
        readers = None if identity is None else identity.state_readers
        cache = await stack.enter_async_context(
            open_cache(
                config, scheduler, identity=readers, inline=not runtime.threads, ending_secs=ending_secs
            )
        )
        grammars = await stack.enter_async_context(
            open_grammars(scheduler.vocabulary, threads=runtime.threads)
        )
        context = _make_context(
            config, topology, options, scheduler, links, telemetry, identity, cache, grammars
        )
        stage = Stage(context, listener.endpoint, _tokenizer(context, identity), topology)
        async with _serving(context, listener):
            yield stage


@contextlib.asynccontextmanager
async def _serving(context: StageContext, listener: Listener) -> AsyncIterator[None]:
    """Connections for the length of the block.

    They outlive a cancelled block by what it still does: the endpoint in it ends its requests with a word
    about the shutdown, not about a lost stage.
    """
    config = context.config
    context.telemetry.emit(
        names.STAGE_BINARY_SERVER_START,
        stage_id=config.stage_id,
        bind_addr=str(listener.endpoint),
        layer_start=config.layer_start,
        layer_end=config.layer_end,
    )
    scope = trio.CancelScope(shield=True)

    async def serve() -> None:
        with scope:
            async with trio.open_nursery() as services:
                services.start_soon(context.liveness.run)
                services.start_soon(serve_listener, context, listener)
                if context.scheduler.info.is_last:
                    services.start_soon(context.grammars.get_ready)
                if context.options.warm_preconnect and context.downstream is not None:
                    services.start_soon(context.warm.serve, context.dial_downstream, context.liveness)

    async with open_hidden_nursery() as nursery:
        nursery.start_soon(serve)
        try:
            yield
        finally:
            scope.cancel()


@contextlib.asynccontextmanager
async def _open_scheduler(
    config: StageConfig,
    topology: StageTopology | None,
    make_engine: Callable[[], StageEngine],
    runtime: Runtime,
    telemetry: Telemetry,
    *,
    safe: bool,
) -> AsyncIterator[Scheduler]:
    """The loaded engine and what feeds it, as configured, told of in the telemetry."""
    telemetry.emit(names.STAGE_EMBEDDED_RUNTIME_LOAD_START, stage_id=config.stage_id)
    began = trio.current_time()
    async with open_scheduler(
        make_engine,
        runtime,
        chain_of=functools.partial(_chain_of, config, topology),
        mixed_rows=config.batch_max_tokens,
        safe=safe,
        telemetry=telemetry,
    ) as scheduler:
        telemetry.emit(
            names.STAGE_EMBEDDED_RUNTIME_READY,
            stage_id=config.stage_id,
            elapsed_ms=1000 * (trio.current_time() - began),
        )
        if safe:
            log.warning("safe mode: one sequence at a time, in order of arrival", stage_id=config.stage_id)
        telemetry.emit(
            names.STAGE_SCHEDULER_START,
            safe_mode=safe,
            max_active_sequences=scheduler.info.max_sequences,
            mixed_prefill_decode=config.batch_max_tokens is not None and scheduler.info.can_mix,
        )
        try:
            yield scheduler
        finally:
            if runtime.broken:
                telemetry.emit(names.STAGE_SCHEDULER_WORKER_PANIC, failure_contained=False)
            telemetry.emit(names.STAGE_EMBEDDED_RUNTIME_STOPPED, stage_id=config.stage_id)


def _tokenizer(context: StageContext, identity: ModelIdentity | None) -> Tokenizer | None:
    vocabulary = context.scheduler.vocabulary
    if context.stage_index or vocabulary is None:
        return None
    digest = None if identity is None else identity.source_sha256
    return Tokenizer(vocabulary, context.config.model_id, digest)


def _chain_of(config: StageConfig, topology: StageTopology | None, info: EngineInfo) -> ChainShape:
    """What decode steps that begin at this stage pass through: nothing else, but for those of stage 0."""
    if config.stage_index or info.is_last:
        return ChainShape()
    if topology is None:
        return ChainShape(max(2, round(info.layer_count / (info.layer_end - info.layer_start))))
    places = [stage.address for stage in topology.stages]
    own = places[config.stage_index].host
    here = sum(place.is_loopback or place.host == own for place in places)
    return ChainShape(len(places), len(places) - here + min(here, usable_cores()))


async def _listen(config: StageConfig, transport: Transport, sock: socket.socket | None) -> Listener:
    if sock is not None:
        return transport.adopt(sock, config.bind_endpoint.scheme)
    return await transport.listen(config.bind_endpoint)


def _warn_if_open(endpoint: Endpoint, options: StageOptions) -> None:
    """Say so where anyone on a network may connect, or read along."""
    if not endpoint.beyond_loopback:
        return
    if options.link_token is None and (endpoint.scheme not in TLS_SCHEMES or options.tls_ca is None):
        log.warning(
            "ANYONE WHO REACHES THIS ADDRESS CAN USE THE MODEL: this stage listens beyond loopback without a "
            "link token and without a CA; give --link-token-file, or tls:// endpoints with --tls-ca",
            endpoint=str(endpoint),
        )
    elif endpoint.scheme not in TLS_SCHEMES:
        log.warning(
            "the link beyond loopback is not encrypted, and activations reveal the prompt: use tls:// or wss://"
            " endpoints, or a network that is yours alone",
            endpoint=str(endpoint),
        )


def _make_context(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    scheduler: Scheduler,
    links: StageLinks,
    telemetry: Telemetry,
    identity: ModelIdentity | None,
    cache: StageCache | None,
    grammars: Grammars,
) -> StageContext:
    info = scheduler.info
    if (info.layer_start, info.layer_end) != (config.layer_start, config.layer_end):
        raise StageStartError(
            f"{config.stage_id}: the loaded model part has layers {info.layer_start}:{info.layer_end}, "
            f"the configuration says {config.layer_start}:{config.layer_end}"
        )
    downstream, stage_zero = find_neighbours(config, topology, info)
    identity = identity or identify_engine(config, info)
    return StageContext(
        config=config,
        options=options,
        admission=make_admission(config, topology, info, identity),
        scheduler=scheduler,
        transport=links.transport,
        downstream_transport=links.downstream,
        telemetry=telemetry,
        hub=ReturnHub(),
        downstream=downstream,
        return_endpoint=stage_zero,
        max_activation_bytes=info.max_batch * info.input_width * 4,
        liveness=Liveness(options.peer_timeout_secs),
        cache=cache,
        grammars=grammars,
    )
