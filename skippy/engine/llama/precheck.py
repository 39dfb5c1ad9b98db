"""Checks of a file's metadata that llama.cpp makes with an assertion, which would end the process.

Everything else that can be wrong with a file llama.cpp reports itself when it loads it.
"""

from __future__ import annotations

import itertools
from typing import Final

from skippy.engine.base import ModelLoadError
from skippy.models import GGUFError, GGUFHeader, LazyArray, SliceInfo
from skippy.models.layers import MOST_LAYERS

_MOST_EXPERTS: Final = 1024  # compiled into llama.cpp
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_WINDOWS_AT_WILL: Final = ("deepseek4", "lfm2")  # whose caches do without a layer that has a window
_EPSILONS: Final = ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon")


def check_file(info: SliceInfo) -> None:
    """Raises ModelLoadError for a file that llama.cpp would not survive."""
    try:
        header = GGUFHeader.read(info.path)
        _check_numbers(header, info)
        if info.is_first or info.is_last:
            _check_tokens(header, info)
    except (GGUFError, OSError) as error:
        raise ModelLoadError(str(error)) from error


def _check_numbers(header: GGUFHeader, info: SliceInfo) -> None:
    prefix = info.architecture
    for name in _EPSILONS:
        value = header.value(f"{prefix}.attention.{name}")
        if isinstance(value, int | float) and not value >= 0:
            raise ModelLoadError(f"{info.path}: {prefix}.attention.{name} is {value}, it must be at least 0")
    layers = header.count(f"{prefix}.block_count")  # those for multi-token prediction included
    if layers > MOST_LAYERS:
        raise ModelLoadError(f"{info.path}: has {layers} layers, llama.cpp takes {MOST_LAYERS}")
    _check_experts(header, info)
    _check_windows(header, info)
    scaling = header.value(f"{prefix}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise ModelLoadError(
            f"{info.path}: {prefix}.rope.scaling.type is {scaling!r}, known are {', '.join(_ROPE_SCALINGS)}"
        )


def _check_experts(header: GGUFHeader, info: SliceInfo) -> None:
    experts, groups, used_groups = (
        value if isinstance(value := header.value(f"{info.architecture}.expert_{name}"), int) else 0
        for name in ("count", "group_count", "group_used_count")
    )
    used = header.value(f"{info.architecture}.expert_used_count")
    if isinstance(used, LazyArray):
        used = max((n for n in itertools.islice(used, MOST_LAYERS) if isinstance(n, int)), default=0)
    used = used if isinstance(used, int) else 0
    if used > experts or (experts and not used):
        raise ModelLoadError(f"{info.path}: {used} experts used of {experts}")
    if experts > _MOST_EXPERTS:
        raise ModelLoadError(f"{info.path}: has {experts} experts, llama.cpp takes {_MOST_EXPERTS}")
    if groups and groups >= experts:
        raise ModelLoadError(f"{info.path}: {experts} experts in {groups} groups")
    if groups > 1 and (experts % groups or not 0 < used_groups < groups):
        raise ModelLoadError(
            f"{info.path}: {experts} experts in {groups} groups, of which {used_groups} are used"
        )


def _check_windows(header: GGUFHeader, info: SliceInfo) -> None:
    prefix = f"{info.architecture}.attention.sliding_window"
    pattern = header.value(f"{prefix}_pattern")
    if (
        header.value(prefix)
        and isinstance(pattern, LazyArray)
        and info.architecture not in _WINDOWS_AT_WILL
        and not any(itertools.islice(pattern, MOST_LAYERS))
    ):
        raise ModelLoadError(
            f"{info.path}: {prefix} is {header.value(prefix)}, and by {prefix}_pattern no layer has a window"
        )


def _check_tokens(header: GGUFHeader, info: SliceInfo) -> None:
    array = header.value("tokenizer.ggml.tokens")
    if not isinstance(array, LazyArray):
        return
    texts = [text for text in array if text]  # llama.cpp gives empty texts names of their own
    unique = set(texts)
    if len(unique) != len(texts):
        raise ModelLoadError(f"{info.path}: the vocabulary has {len(texts) - len(unique)} texts twice")
    if header.value("tokenizer.ggml.model") == "llama":
        missing = [
            byte
            for byte in range(256)
            if f"<0x{byte:02X}>" not in unique and (byte >= 128 or chr(byte) not in unique)
        ]
        if missing:
            raise ModelLoadError(
                f"{info.path}: the vocabulary has no token for byte 0x{missing[0]:02X} "
                f"and {len(missing) - 1} others"
            )
