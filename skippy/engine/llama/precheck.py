"""Checks of a file's metadata that llama.cpp makes with an assertion, which would end the process.

Everything else that can be wrong with a file llama.cpp reports itself when it loads it.
"""

from __future__ import annotations

from typing import Final

from skippy.engine.base import ModelLoadError
from skippy.models import GGUFError, GGUFHeader, LazyArray, SliceInfo

_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
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
    experts, used = header.value(f"{prefix}.expert_count"), header.value(f"{prefix}.expert_used_count")
    if isinstance(used, int) and used > (experts if isinstance(experts, int) else 0):
        raise ModelLoadError(f"{info.path}: {used} experts used of {experts or 0}")
    scaling = header.value(f"{prefix}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise ModelLoadError(
            f"{info.path}: {prefix}.rope.scaling.type is {scaling!r}, known are {', '.join(_ROPE_SCALINGS)}"
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
