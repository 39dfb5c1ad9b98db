"""The public surface for a Trio host: a stage, and an OpenAI endpoint on it, as async context managers.

    async with embed.open_stage(config, topology) as stage:
        async with embed.open_openai(stage, OpenAIOptions()) as endpoint:
            print(endpoint.url)
            await trio.sleep_forever()

Everything runs in the host's own tasks: leaving a block, or cancelling it, stops what it started. If
something inside fails for good, the block is cancelled and the failure is raised from it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import attrs
import trio

from skippy.config import (
    ConfigError,
    Endpoint,
    OpenAIOptions,
    StageConfig,
    StageOptions,
    StageTopology,
    check_against_topology,
    check_links,
)
from skippy.config.access import ANY
from skippy.engine import EngineOptions, ModelLoadError, StageEngine, usable_cores
from skippy.engine.recipe import checkpoint_recipe
from skippy.frontend.app import create_app
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.frontend.options import FrontendOptions
from skippy.frontend.server import serve_http
from skippy.kv.identity import stage_identity
from skippy.kv.settings import extra_sequences
from skippy.models import (
    AdapterPart,
    Progress,
    SliceInfo,
    cut_adapter,
    find_part,
    header_path,
    local_path,
    read_model,
    weights_sha256,
)
from skippy.stage import (
    ENDING_SECS,
    ControlPiece,
    InventoryEntry,
    Stage,
    StageStartError,
    Tokenizer,
    TokenizeRequest,
    TokenizerError,
    TokenizeResult,
    TokenizerIdentity,
    open_stage as _open_stage,
)
from skippy.stage.admission import ModelIdentity, dialled_ranges, identify_model
from skippy.stage.links import MemoryTransport, TcpTransport, TlsFiles, Transport
from skippy.stage.nurseries import open_hidden_nursery
from skippy.telemetry import NULL_TELEMETRY, Telemetry, get_logger, names

__all__ = [
    "ControlPiece",
    "InventoryEntry",
    "MemoryTransport",
    "OpenAIEndpoint",
    "Stage",
    "StageStartError",
    "TcpTransport",
    "TokenizeRequest",
    "TokenizeResult",
    "Tokenizer",
    "TokenizerError",
    "TokenizerIdentity",
    "Transport",
    "open_openai",
    "open_stage",
]

CLEAN_SECS = 0.5
"""How long lanes may take to end in order, once no request is left."""

EngineFactory = Callable[[StageConfig], StageEngine]


@contextlib.asynccontextmanager
async def open_stage(
    config: StageConfig,
    topology: StageTopology | None = None,
    options: StageOptions | None = None,
    *,
    engine_factory: EngineFactory | None = None,
    transport: Transport | None = None,
    listen_socket: socket.socket | None = None,
    telemetry: Telemetry = NULL_TELEMETRY,
    progress: Progress | None = None,
    inline: bool = False,
    ending_secs: Callable[[], float] = lambda: ENDING_SECS,
) -> AsyncIterator[Stage]:
    """Serve one stage for the length of the block; inside it the model is loaded and the port is bound.

    Args:
        engine_factory: makes the engine, on the engine's own thread; default: llama.cpp on the layers of
            ``config.model_path``, cut out first if they are not in the cache yet.
        transport: how stages reach each other; by default as the scheme of each endpoint says.
        listen_socket: an already listening TCP socket to use instead of binding ``config.bind_addr``, whose
            scheme still says what is spoken on it.
        progress: called from worker threads as (what, bytes done, bytes in all) while a slice is made
            (``"hash"``, ``"wait"``, ``"write"``) and loaded (``"load"``).
        inline: run the engine on the event loop; for tiny exact engines under a virtual clock.
        ending_secs: asked as the block is left: how long what the prefix cache holds may still be written to
            its directory, where it has one.

    Raises:
        ConfigError: configuration and topology contradict each other, a key asks for a feature of the model
            that is not used yet, or the TLS files and the endpoints do not fit.
        ModelError, ModelLoadError: the model cannot be read, cut or loaded.
        StageStartError: a neighbour is missing, or the model part is not the configured one.
        OSError: the address cannot be bound.

    Leaving the block, or cancelling it, also while the model loads, closes every connection and frees the
    engine. A native call that cannot be interrupted and goes on for 3 s after that ends the process, with
    exit status 70.
    """
    if topology is not None:
        check_against_topology(config, topology)
    options = options or StageOptions()
    check_links(config, topology, options)
    TlsFiles.of(options).check()  # before a slice is cut, which may take minutes
    stopped = threading.Event()
    identity: ModelIdentity | None = None
    if engine_factory is not None:
        make_engine = functools.partial(engine_factory, config)
    else:
        # Cut before binding and outside the engine thread: it may take minutes and must be cancellable.
        model_slice, identity, adapter = await _find_slice(config, topology, progress, options.verify_package)
        settings = engine_options(config)
        if adapter is not None and adapter.path is not None:
            settings = attrs.evolve(settings, adapter=(adapter.path, adapter.scale))
        make_engine = functools.partial(_load_llama, model_slice, settings, progress, stopped)
    async with open_hidden_nursery() as nursery:
        nursery.start_soon(_set_when_cancelled, stopped)
        async with _open_stage(
            config,
            topology,
            options,
            make_engine,
            transport=transport,
            listen_socket=listen_socket,
            telemetry=telemetry,
            identity=identity,
            inline=inline,
            ending_secs=ending_secs,
        ) as stage:
            yield stage
        nursery.cancel_scope.cancel()


def engine_options(config: StageConfig) -> EngineOptions:
    """The engine settings that a stage's configuration asks for."""
    defaults = EngineOptions()
    unified = defaults.kv_unified if config.kv_unified is None else config.kv_unified
    extra = extra_sequences(config.kv_cache, lane_count=config.lane_count, kv_unified=unified)
    return EngineOptions(
        context_length=config.ctx_size,
        max_sequences=config.lane_count + extra,
        cells=config.ctx_size * config.lane_count if unified else None,
        n_batch=defaults.n_batch if config.n_batch is None else config.n_batch,
        n_ubatch=defaults.n_ubatch if config.n_ubatch is None else config.n_ubatch,
        n_threads=config.n_threads,
        n_threads_batch=config.n_threads,
        device=None if config.selected_device is None else config.selected_device.backend_device,
        n_gpu_layers=config.n_gpu_layers,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        flash_attn=config.flash_attn_type,
        mmap=config.mmap,
        mlock=config.mlock,
        direct_io=config.direct_io,
        repack=config.repack,
        no_host_buffer=config.no_host_buffer,
        check_tensors=config.check_tensors,
        main_gpu=defaults.main_gpu if config.main_gpu is None else config.main_gpu,
        split_mode=config.split_mode,
        op_offload=defaults.op_offload if config.op_offload is None else config.op_offload,
        kv_offload=defaults.kv_offload if config.kv_offload is None else config.kv_offload,
        kv_unified=unified,
        swa_full=defaults.swa_full if config.swa_full is None else config.swa_full,
    )


async def _find_slice(
    config: StageConfig, topology: StageTopology | None, progress: Progress | None, verify: bool
) -> tuple[SliceInfo, ModelIdentity, AdapterPart | None]:
    if config.model_path is None:
        raise StageStartError(
            f"{config.stage_id}: `model_path` is missing; it names the GGUF file or the folder of the model"
        )

    def report(what: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        if progress is not None:
            progress(what, done, total)

    model = config.model_path
    recipe = checkpoint_recipe(
        config.checkpoint_quantization, config.checkpoint_imatrix, config.checkpoint_imatrix_sha256
    )

    def find() -> tuple[SliceInfo, ModelIdentity, AdapterPart | None]:
        path = local_path(model, (config.layer_start, config.layer_end), report)
        described = header_path(path, progress=report, recipe=recipe)
        if config.native_mtp_enabled:
            check_mtp(described)
        part = find_part(
            path,
            config.load_mode,
            config.layer_start,
            config.layer_end,
            manifest_sha256=config.manifest_sha256,
            progress=report,
            verify=verify,
            recipe=recipe,
        )
        identity = identify_model(part, described, dialled_ranges(config, topology))
        adapter = None
        if config.lora_path is not None:
            adapter = cut_adapter(config.lora_path, config.lora_scale, part, progress=report)
            digest = adapter.mixed_into(identity.package_id)
            identity = attrs.evolve(identity, package_id=f"sha256:{digest}")
        if config.kv_cache is not None and config.kv_cache.on and config.kv_cache.directory is not None:
            weights = part.content_sha256 or weights_sha256(part, progress=report)
            readers = stage_identity(
                config,
                weights=weights if adapter is None else adapter.mixed_into(weights),
                rules=identity.rules,
                backend=identity.backend,
                threads=config.n_threads or usable_cores(),
            )
            identity = attrs.evolve(identity, state_readers=readers)
        return part, identity, adapter

    return await trio.to_thread.run_sync(find)


def check_mtp(path: Path) -> None:
    """``native_mtp_enabled``: a notice for a model without such layers, an error for one that has them.

    Raises:
        ConfigError: the model has multi-token-prediction layers, which are not used yet.
        GGUFError: the model cannot be read.
    """
    header = read_model(path)
    if header.count(f"{header.text('general.architecture')}.nextn_predict_layers", 0):
        raise ConfigError(
            "native_mtp_enabled: using the model's multi-token-prediction layers is not available yet; "
            "leave the key out or set it to false"
        )
    get_logger("skippy").warning(
        "native_mtp_enabled has no effect: the model has no multi-token-prediction layers",
        model_path=str(path),
    )


async def _set_when_cancelled(event: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()


def _load_llama(
    model_slice: SliceInfo, options: EngineOptions, progress: Progress | None, stopped: threading.Event
) -> StageEngine:
    # Imported here: hosts that bring their own engine need no llama.cpp.
    from skippy.engine.llama import LlamaEngine

    def report(part: float) -> None:
        if stopped.is_set():
            # Nobody waits for the engine any more, and shutdown does not wait long for the load.
            raise ModelLoadError(f"{model_slice.path}: loading was cancelled")
        if progress is not None:
            progress("load", int(part * model_slice.file_bytes), model_slice.file_bytes)

    return LlamaEngine.load(model_slice, options, report)


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
    pool = LanePool(stage, lanes, outage)
    generator = ChainGenerator(stage, pool, options.model_id or config.model_id, options)
    telemetry = stage.context.telemetry
    app = create_app(
        generator,
        FrontendOptions(
            default_max_tokens=options.default_max_tokens,
            keep_alive_secs=options.stream_keep_alive_secs or math.inf,
            allows_chat_templates=options.allow_chat_templates,
            max_stored_responses=options.stored_responses,
            keeps_prompts_on_disk=stage.context.cache is not None
            and stage.context.cache.settings.directory is not None,
            telemetry=telemetry,
            access=options,
            host_names=() if options.bind_endpoint.ip is not None else (options.bind_endpoint.host,),
        ),
    )
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
