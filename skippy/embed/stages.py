"""A stage for the length of a block: its configuration checked, its layers found, its engine made."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import trio

from skippy.config import StageConfig, StageOptions, StageTopology, check_against_topology, check_links
from skippy.engine import EngineOptions, ModelLoadError, StageEngine
from skippy.kv.settings import extra_sequences
from skippy.models import AdapterPart, Progress, SliceInfo
from skippy.stage import ENDING_SECS, Stage, open_stage as open_served_stage
from skippy.stage.admission import ModelIdentity
from skippy.stage.links import TlsFiles, Transport
from skippy.stage.nurseries import open_hidden_nursery
from skippy.telemetry import NULL_TELEMETRY, Telemetry

from .model_part import find_model_part

MakeEngine = Callable[[], StageEngine]
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
            ``config.model``, cut out first if they are not in the cache yet.
        transport: how stages reach each other; by default as the scheme of each endpoint says.
        listen_socket: an already listening TCP socket to use instead of binding ``config.bind_addr``, whose
            scheme still says what is spoken on it.
        progress: called from worker threads as (what, bytes done, bytes in all) while a slice is made
            (``"hash"``, ``"wait"``, ``"write"``) and loaded (``"load"``), and with
            (``"compare"``, 0, 0) while a small model like it is tried out.
        inline: run the engine on the event loop; for tiny exact engines under a virtual clock.
        ending_secs: asked as the block is left: how long what the prefix cache holds may still be written to
            its directory, where it has one.

    Raises:
        ConfigError: configuration and topology contradict each other, a key asks for a feature of the model
            that is not used yet, or the TLS files and the endpoints do not fit.
        ModelError, ModelLoadError: the model cannot be read, cut or loaded; or a small one like it is not the
            same when it is cut (``options.precheck``).
        StageStartError: a neighbour is missing, or the model part is not the configured one.
        OSError: the address cannot be bound.

    Leaving the block, or cancelling it, also while the model loads, closes every connection and frees the
    engine. A native call that cannot be interrupted and goes on for 3 s after that ends the process, with
    exit status 70.
    """
    options = options or StageOptions()
    _check(config, topology, options)
    async with _stop_event() as stopped:
        make_engine: MakeEngine
        if engine_factory is not None:
            make_engine, identity = functools.partial(engine_factory, config), None
        else:
            make_engine, identity = await _prepare_llama(config, topology, options, progress, stopped)
        async with open_served_stage(
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


def _check(config: StageConfig, topology: StageTopology | None, options: StageOptions) -> None:
    """What can be known to be wrong before a slice is cut, which may take minutes."""
    if topology is not None:
        check_against_topology(config, topology)
    check_links(config, topology, options)
    TlsFiles.of(options).check()


@contextlib.asynccontextmanager
async def _stop_event() -> AsyncIterator[threading.Event]:
    """An event for threads, set once the block is left or cancelled."""
    stopped = threading.Event()

    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()

    async with open_hidden_nursery() as nursery:
        nursery.start_soon(wait)
        yield stopped
        nursery.cancel_scope.cancel()


def engine_options(config: StageConfig, adapters: Sequence[AdapterPart] = ()) -> EngineOptions:
    """The engine settings that a stage's configuration asks for, with its parts of LoRA adapters."""
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
        adapters=tuple((adapter.path, adapter.scale) for adapter in adapters if adapter.path is not None),
    )


async def _prepare_llama(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    progress: Progress | None,
    stopped: threading.Event,
) -> tuple[MakeEngine, ModelIdentity]:
    """What loads llama.cpp with the stage's layers, and the model that these are of."""
    # Cut before binding and outside the engine thread: it may take minutes and must be cancellable.
    part = await find_model_part(config, topology, progress, options)
    settings = engine_options(config, part.adapters)
    return functools.partial(_load_llama, part.layers, settings, progress, stopped), part.identity


def _load_llama(
    layers: SliceInfo, options: EngineOptions, progress: Progress | None, stopped: threading.Event
) -> StageEngine:
    # Imported here: hosts that bring their own engine need no llama.cpp.
    from skippy.engine.llama import LlamaEngine

    def report(done: float) -> None:
        if stopped.is_set():
            # Nobody waits for the engine any more, and shutdown does not wait long for the load.
            raise ModelLoadError(f"{layers.path}: loading was cancelled")
        if progress is not None:
            progress("load", int(done * layers.file_bytes), layers.file_bytes)

    return LlamaEngine.load(layers, options, report)
