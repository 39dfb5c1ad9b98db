"""The prefix cache of a loaded stage, as configured."""

from __future__ import annotations

from skippy.config import StageConfig
from skippy.kv.cache import PrefixCache
from skippy.kv.settings import resolve

from .keeping import StageCache, log
from .scheduler import Scheduler


def make_cache(config: StageConfig, scheduler: Scheduler) -> StageCache | None:
    """The cache that ``kv_cache`` asks for, empty; None where it is off, or this engine cannot have it."""
    info, unified = scheduler.info, bool(config.kv_unified)
    resolution = resolve(
        config.kv_cache,
        sliceable=info.can_trim,
        copyable=info.can_copy,
        exportable=info.can_export,
        lane_count=config.lane_count,
        kv_unified=unified,
        cells=config.ctx_size * config.lane_count,
    )
    for warning in resolution.warnings:
        log.warning(warning, stage_id=config.stage_id)
    if resolution.settings is None:
        return None
    return StageCache(scheduler, PrefixCache(resolution.settings, sliceable=info.can_trim))
