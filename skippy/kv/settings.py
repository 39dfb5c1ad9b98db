"""What a loaded stage really does with its prefix cache: the configuration, resolved.

Resolved twice. Before the model is loaded: how many native sequences the engine gets
(:func:`extra_sequences`). After it, when it is known what the model's state can do: everything else
(:func:`resolve`).
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

from skippy.config import KvCacheConfig

Payload = Literal["resident-kv", "kv-recurrent", "full-state"]

MAX_ENTRIES: Final = 512
MAX_RECURRENT_ENTRIES: Final = 16
MAX_SEQUENCES: Final = 256
"""llama.cpp's limit of native sequences."""
LEAST_CAPPED_CELLS: Final = 8192
"""Of a pool of cells that all share, idle sequences get half, if it has at least as many."""


@attrs.frozen(slots=True, kw_only=True)
class KvSettings:
    """A prefix cache that is on.

    Attributes:
        payload: ``resident-kv``: entries are native sequences, and exported when these run out.
            ``kv-recurrent`` and ``full-state``: entries are exported states.
        lookup: what is kept is also used.
        max_entries: idle entries.
        max_bytes: bytes of exported state in memory; 0: for the stage to choose.
        min_tokens: shorter paths are neither recorded nor restored.
        stride_tokens: the grid of lengths at which a long prompt may be cut for a checkpoint.
        record_limit: checkpoints of one prompt; 0: as many as the grid has.
        extra_sequences: native sequences beside those of the lanes.
        shared_cells: all sequences share one pool of cache cells.
        max_resident_tokens: tokens in idle sequences where cells are shared; 0: no limit.
        activation_max_bytes: bytes of boundary rows in memory; 0: none are remembered.
        directory: where states outlive the process; None: nowhere.
        directory_max_bytes: bytes of files there.
        audit_rate: the share of hits that is computed again and compared, 0 to 1.
    """

    payload: Payload = "resident-kv"
    lookup: bool = True
    max_entries: int = 64
    max_bytes: int = 0
    min_tokens: int = 64
    stride_tokens: int = 128
    record_limit: int = 2
    extra_sequences: int = 0
    shared_cells: bool = False
    max_resident_tokens: int = 0
    activation_max_bytes: int = 0
    directory: str | None = None
    directory_max_bytes: int = 0
    audit_rate: float = 0.0

    @property
    def grid(self) -> int:
        """Tokens between two lengths at which checkpoints may lie."""
        return max(1, min(self.stride_tokens, max(1, self.min_tokens)))


@attrs.frozen(slots=True)
class Resolution:
    """What became of a configuration.

    Attributes:
        settings: None: the cache is off.
        warnings: what was asked for and is not done, and why, for the log.
    """

    settings: KvSettings | None
    warnings: tuple[str, ...] = ()


def extra_sequences(config: KvCacheConfig | None, *, lane_count: int, kv_unified: bool) -> int:
    """Native sequences to load beside one per lane; together at most 256.

    Where cells are shared an unused sequence costs nothing, so there are as many as entries.
    """
    if config is None or not config.on:
        return 0
    wanted = config.extra_sequences
    if wanted is None:
        wanted = _entries(config) if kv_unified else 0
    return min(wanted, max(0, MAX_SEQUENCES - lane_count))


def resolve(
    config: KvCacheConfig | None,
    *,
    sliceable: bool,
    copyable: bool,
    exportable: bool,
    lane_count: int,
    kv_unified: bool,
    cells: int,
) -> Resolution:
    """What a stage does, now that its model is loaded.

    Args:
        config: None, or one whose mode is off, is a cache that is off.
        sliceable, copyable, exportable: what the engine can do with a sequence: trim, copy, export it.
        lane_count: sessions at once.
        kv_unified: all sequences share one pool of cells.
        cells: positions in the engine's cache, of all sequences together.
    """
    if config is None or not config.on:
        return Resolution(None)
    payload = config.payload
    if payload == "auto":
        payload = "resident-kv" if sliceable and copyable else "kv-recurrent"
    problem = _problem(payload, sliceable=sliceable, copyable=copyable, exportable=exportable)
    if problem is not None:
        return Resolution(None, (f"the prefix cache is off: {problem}",))
    entries, warnings = _entries(config), []
    if entries != config.max_entries:
        warnings.append(f"kv_cache.max_entries is {config.max_entries}, which is taken as {entries}")
    if not sliceable and entries > MAX_RECURRENT_ENTRIES:
        entries = MAX_RECURRENT_ENTRIES
        if config.max_entries != attrs.fields(KvCacheConfig).max_entries.default:
            warnings.append(
                f"kv_cache.max_entries is taken as {entries}, because the model has recurrent state"
            )
    if config.directory is not None and not exportable:
        warnings.append("kv_cache.directory has no effect: the state of this model cannot be exported")
    if config.audit_rate and not sliceable:
        warnings.append("kv_cache.audit_rate has no effect: this model's state cannot be compared in part")
    settings = KvSettings(
        payload=payload,
        lookup=config.mode == "lookup-record",
        max_entries=entries,
        max_bytes=config.max_bytes,
        min_tokens=max(1, config.min_tokens),
        stride_tokens=config.shared_prefix_stride_tokens,
        record_limit=config.shared_prefix_record_limit,
        extra_sequences=extra_sequences(config, lane_count=lane_count, kv_unified=kv_unified),
        shared_cells=kv_unified,
        max_resident_tokens=cells // 2 if kv_unified and cells >= LEAST_CAPPED_CELLS else 0,
        activation_max_bytes=config.activation_max_bytes,
        directory=config.directory if exportable else None,
        directory_max_bytes=config.directory_max_bytes,
        audit_rate=config.audit_rate if sliceable else 0.0,
    )
    return Resolution(settings, tuple(warnings))


def _entries(config: KvCacheConfig) -> int:
    return min(max(config.max_entries, 1), MAX_ENTRIES)


def _problem(payload: Payload, *, sliceable: bool, copyable: bool, exportable: bool) -> str | None:
    """Why this payload is impossible for the loaded model; None if it is not."""
    if payload == "resident-kv" and not sliceable:
        return "payload resident-kv is for attention models; sequences of this one cannot be shortened"
    if payload == "resident-kv" and not copyable:
        return "payload resident-kv needs sequences that can be copied, which those of this model cannot"
    if payload != "resident-kv" and not exportable:
        return f"payload {payload} needs states that can be exported, which this model's cannot"
    return None
