"""The prefix cache of a loaded stage, as configured."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable

import attrs
import trio

from skippy.config import StageConfig
from skippy.kv.activations import ActivationCache
from skippy.kv.cache import PrefixCache
from skippy.kv.durable import DurableStore
from skippy.kv.settings import KvSettings, resolve

from .errors import StageStartError
from .keeping import StageCache, log
from .kv_writer import KvWriter
from .nurseries import open_hidden_nursery
from .scheduler import Scheduler
from .states import Index, StateTier


@contextlib.asynccontextmanager
async def open_cache(
    config: StageConfig,
    scheduler: Scheduler,
    *,
    identity: bytes | None,
    inline: bool,
    ending_secs: Callable[[], float],
) -> AsyncIterator[StageCache | None]:
    """The cache that ``kv_cache`` asks for; None where it is off, or this engine cannot have it.

    It is empty, but for what an earlier process left in the configured directory.

    Args:
        identity: who can read the states of this stage; None: that is not known.
        inline: no threads.
        ending_secs: asked as the block is left, for how long what is kept may still be written to that
            directory.

    Raises:
        ConfigError: the directory cannot be used.
        StageStartError: there is one, but no identity.

    What is not written by then, or when the block is cancelled or fails, does not appear there: a write that
    is under way is broken off, and waited for.
    """
    cache = make_cache(config, scheduler)
    if cache is None:
        yield None
        return
    writer = KvWriter(in_thread=not inline)
    async with _open_durable(cache.settings, identity, writer) as durable, open_hidden_nursery() as nursery:
        cache.states = StateTier(scheduler, cache.index, writer, durable, shrink=cache.shrink)
        if durable is not None:
            cache.states.adopt()
        nursery.start_soon(writer.run)
        try:
            yield cache
            with trio.move_on_after(max(0.0, ending_secs())):
                await cache.states.write_out()
        finally:
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _open_durable(
    settings: KvSettings, identity: bytes | None, writer: KvWriter
) -> AsyncIterator[DurableStore | None]:
    if settings.directory is None:
        yield None
        return
    if identity is None:
        raise StageStartError(
            "kv_cache.directory: states can be kept on disk only where the digest of the model is known"
        )
    open_store = functools.partial(DurableStore, settings.directory, identity, settings.directory_max_bytes)
    with trio.CancelScope(shield=True):  # or nobody would close it
        durable = await writer.run_sync(open_store)
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
        yield durable
    finally:
        with trio.CancelScope(shield=True):
            await writer.run_sync(durable.close)


def make_cache(config: StageConfig, scheduler: Scheduler) -> StageCache | None:
    """An empty cache in native sequences alone; None where it is off, or this engine cannot have it."""
    info, unified = scheduler.info, bool(config.kv_unified)
    cells = config.ctx_size * config.lane_count
    resolution = resolve(
        config.kv_cache,
        sliceable=info.can_trim,
        copyable=info.can_copy,
        exportable=info.can_export,
        lane_count=config.lane_count,
        kv_unified=unified,
        cells=cells,
    )
    for warning in resolution.warnings:
        log.warning(warning, stage_id=config.stage_id)
    if (settings := resolution.settings) is None:
        return None
    if not settings.max_bytes:
        settings = attrs.evolve(settings, max_bytes=default_max_bytes())
    index: Index = PrefixCache(settings, sliceable=info.can_trim)
    activations = ActivationCache(settings.activation_max_bytes, info.output_width or 1)
    kept = activations if info.output_width and activations.enabled else None
    return StageCache(scheduler, index, kept, cells=cells if unified else None)


def default_max_bytes() -> int:
    """A sixteenth of the machine's memory, which several stages may share, with their weights."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
