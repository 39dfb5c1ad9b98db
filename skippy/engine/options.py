"""How a stage is loaded: sizes, threads, cache types, placement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from skippy.config.stage import CacheType, FlashAttention, SplitMode

TapChoice = Literal["auto", "c", "python"]

CACHE_TYPES: tuple[str, ...] = get_args(CacheType)
"""Tensor types a KV cache may have (ggml's names)."""

MAX_SEQUENCES = 256
"""llama.cpp's compiled-in limit of sequences in one context (``LLAMA_MAX_SEQ``)."""


def usable_cores() -> int:
    """CPU cores this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def _integer(low: int, high: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
        if value is None and attribute.default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{attribute.name} must be an integer from {low} to {high}, not {value!r}")

    return check


def _one_of(*names: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
        if value not in names:
            raise ValueError(f"{attribute.name} must be one of {', '.join(names)}, not {value!r}")

    return check


_INT32_MAX = 2**31 - 1


@attrs.frozen(slots=True, kw_only=True)
class EngineOptions:
    """Settings of one loaded stage. Every stage of a chain must use the same sizes and cache types.

    Attributes:
        context_length: positions one sequence may hold. Each sequence has cells of its own unless
            ``kv_unified``, so a stage's cache has ``context_length * max_sequences`` cells.
        max_sequences: native sequences.
        cells: size of the pool that ``kv_unified`` sequences share, in positions; None is room for
            ``context_length`` of each. More sequences than the pool has room for cost nothing.
        n_batch: rows one ``decode`` may carry.
        n_ubatch: rows computed at once; a larger segment is cut into chunks of this size. Part of the
            numbers: the same rows in other chunks give slightly different floats on quantised weights.
        n_threads, n_threads_batch: CPU threads for one row and for many rows; None is all usable cores.
        device: name of the only device to use, as ggml reports it: a GPU, or ``"CPU"`` for no GPU; None is
            llama.cpp's choice.
        n_gpu_layers: layers to place on a GPU; negative is all. Refused where there is no GPU, as are
            ``main_gpu`` and ``split_mode``.
        cache_type_k, cache_type_v: element types of the cache, one of :data:`CACHE_TYPES`. A quantised V
            cache needs flash attention.
        flash_attn: ``"auto"`` lets llama.cpp decide by device.
        mmap: map the file instead of reading it; None maps it unless ``direct_io``.
        mlock: keep the weights from being swapped out.
        direct_io: read the file past the page cache; excludes ``mmap=True`` and ``mlock``.
        repack: let llama.cpp convert weights at load time to a layout its CPU kernels prefer.
        no_host_buffer, check_tensors, main_gpu, split_mode, op_offload, kv_offload, swa_full: as llama.cpp
            has them. ``split_mode="auto"`` is llama.cpp's own default. Without ``swa_full`` sequences of
            sliding-window models cannot be trimmed.
        kv_unified: one pool of cells shared by all sequences. A sequence's numbers then depend on where
            its cells lie, so results are not reproducible under concurrent load. Every row looks at the
            cells of all: slower the more they hold (docs/performance.md, "KV placement").
        adapters: LoRA adapters for just this slice, and what the changes of each are multiplied with.
        tap: how the boundary is read; ``"auto"`` takes C when it was built, else Python.

    Raises:
        ValueError: a value that is out of range, by name.
    """

    context_length: int = attrs.field(default=512, validator=_integer(1, 2**24))
    max_sequences: int = attrs.field(default=4, validator=_integer(1, MAX_SEQUENCES))
    cells: int | None = attrs.field(default=None, validator=_integer(1, _INT32_MAX))
    n_batch: int = attrs.field(default=2048, validator=_integer(1, 2**20))
    n_ubatch: int = attrs.field(default=512, validator=_integer(1, 2**20))
    n_threads: int | None = attrs.field(default=None, validator=_integer(1, 512))
    n_threads_batch: int | None = attrs.field(default=None, validator=_integer(1, 512))
    device: str | None = None
    n_gpu_layers: int = attrs.field(default=0, validator=_integer(-1, 2**20))
    cache_type_k: str = attrs.field(default="f16", validator=_one_of(*CACHE_TYPES))
    cache_type_v: str = attrs.field(default="f16", validator=_one_of(*CACHE_TYPES))
    flash_attn: FlashAttention = attrs.field(default="auto", validator=_one_of(*get_args(FlashAttention)))
    mmap: bool | None = None
    mlock: bool = False
    direct_io: bool = False
    repack: bool = True
    no_host_buffer: bool = False
    check_tensors: bool = False
    main_gpu: int = attrs.field(default=0, validator=_integer(0, 255))
    split_mode: SplitMode = attrs.field(default="auto", validator=_one_of(*get_args(SplitMode)))
    op_offload: bool = True
    kv_offload: bool = True
    kv_unified: bool = False
    swa_full: bool = True
    adapters: tuple[tuple[Path, float], ...] = ()
    tap: TapChoice = attrs.field(default="auto", validator=_one_of(*get_args(TapChoice)))

    def __attrs_post_init__(self) -> None:
        if self.cells is not None and not (self.kv_unified and self.cells >= self.context_length):
            raise ValueError("cells needs kv_unified, and must be at least context_length")
        if self.cells is None and self.context_length * self.max_sequences > _INT32_MAX:
            raise ValueError("context_length * max_sequences must be below 2**31")
        if self.direct_io and (self.mmap or self.mlock):
            raise ValueError("direct_io excludes mmap and mlock")
        if self.flash_attn == "disabled" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise ValueError(f"cache_type_v {self.cache_type_v} needs flash_attn auto or enabled")
