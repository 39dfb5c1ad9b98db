"""What all samplers share: checks of the settings, counter-based randomness, greedy choice."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from skippy.protocol.messages import DEFAULT_SAMPLERS, SamplingConfig

from .base import BoolArray, EngineError, FloatArray
from .mirostat import MIROSTAT_MODES

F = TypeVar("F", np.float32, np.float64)

SAMPLER_NAMES: Final = frozenset(DEFAULT_SAMPLERS)
"""Stages a sampling block may name, in any order; one that is not named is not applied."""

DRY_BREAKER_BYTES: Final = 40
"""llama.cpp cuts longer DRY sequence breakers; we refuse them."""

_FLOAT_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", -math.inf, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("repeat_penalty", 0.0, math.inf),
    ("top_nsigma", -math.inf, math.inf),
    ("dynatemp_range", 0.0, math.inf),
    ("dynatemp_exponent", -math.inf, math.inf),
    ("dry_multiplier", 0.0, math.inf),
    ("dry_base", 0.0, math.inf),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("mirostat_entropy", 0.0, math.inf),
    ("mirostat_learning_rate", 0.0, math.inf),
)
_F32_MAX: Final = 3.4028234663852886e38


def check_settings(settings: SamplingConfig, vocab_size: int) -> None:
    """Check every setting of an enabled sampling block.

    Raises:
        ValueError: naming the first field that is out of range or not supported.
    """
    for name, low, high in _FLOAT_RANGES:
        value = getattr(settings, name)
        if not math.isfinite(value) or abs(value) > _F32_MAX:
            raise ValueError(f"{name} must be a finite number, not {value}")
        if not low <= value <= high:
            limits = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
            raise ValueError(f"{name} must be {limits}, not {value}")
    if settings.repeat_penalty <= 0.0:
        raise ValueError(f"repeat_penalty must be above 0, not {settings.repeat_penalty}")
    for name in ("penalty_last_n", "dry_penalty_last_n"):
        if getattr(settings, name) < -1:
            raise ValueError(f"{name} must be at least -1, not {getattr(settings, name)}")
    if settings.dry_allowed_length < 0:
        raise ValueError(f"dry_allowed_length must be at least 0, not {settings.dry_allowed_length}")
    if settings.mirostat_mode not in MIROSTAT_MODES:
        raise ValueError(f"mirostat_mode must be 0, 1 or 2, not {settings.mirostat_mode}")
    _check_lists(settings, vocab_size)


def state_between_draws(settings: SamplingConfig) -> str | None:
    """Why a draw depends on more than logits, tokens, seed and number, so that no replay repeats it; or None.

    Only of an enabled sampling block.
    """
    if settings.enabled and settings.mirostat_mode != 0 and not is_greedy(settings):
        return "mirostat keeps state between draws, which replay cannot restore"
    return None


def _check_lists(settings: SamplingConfig, vocab_size: int) -> None:
    for token, bias in settings.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias: token {token} is outside the vocabulary of {vocab_size}")
        if not math.isfinite(bias) or abs(bias) > _F32_MAX:
            raise ValueError(f"logit_bias: the bias of token {token} must be a finite number, not {bias}")
    for name in settings.samplers:
        if name not in SAMPLER_NAMES:
            raise ValueError(
                f"samplers: {name!r} is not supported, known are {', '.join(sorted(SAMPLER_NAMES))}"
            )
    for breaker in settings.dry_sequence_breakers:
        if "\0" in breaker:
            raise ValueError("dry_sequence_breakers: a breaker contains a NUL character")
        try:
            size = len(breaker.encode())
        except UnicodeEncodeError:
            raise ValueError("dry_sequence_breakers: a breaker is not valid Unicode") from None
        if size > DRY_BREAKER_BYTES:
            raise ValueError(
                f"dry_sequence_breakers: a breaker has {size} bytes, at most {DRY_BREAKER_BYTES} are allowed"
            )


def check_chat_metadata(chat_metadata: str | None) -> None:
    """Raises ValueError for chat sampling metadata: grammar-constrained sampling is not supported."""
    if chat_metadata:
        raise ValueError(
            "chat_metadata is not supported: this engine samples without grammars or chat parsers"
        )


def step_digest(seed: int, step: int, purpose: bytes) -> int:
    """64 random bits of draw ``step``: BLAKE2b over two little-endian u64, personalised by ``purpose``.

    Counter-based: it depends on nothing but its arguments, so a replayed, speculated or batched draw gets the
    same bits.
    """
    key = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, step & 0xFFFFFFFFFFFFFFFF)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=purpose).digest(), "little")


def step_seed(seed: int, step: int, purpose: bytes) -> int:
    """A u32 seed of draw ``step``; never ``0xFFFFFFFF``, which llama.cpp reads as "choose one yourself"."""
    return step_digest(seed, step, purpose) % 0xFFFFFFFF


def is_greedy(settings: SamplingConfig) -> bool:
    """Whether to take the highest logit: temperatures of 0, below, or so near that f32 would overflow."""
    return settings.temperature < 1e-20


def only(values: npt.NDArray[F], allowed: BoolArray | None) -> npt.NDArray[F]:
    """Logits with those of tokens that are not allowed at minus infinity.

    Raises:
        EngineError: nothing is left that could be drawn.
    """
    if allowed is None:
        return values
    kept = np.where(allowed, values, values.dtype.type(-np.inf))
    if kept.max() == -np.inf:
        raise EngineError("every token that may follow is ruled out by the sampling settings")
    return kept


def greedy(logits: FloatArray) -> int:
    """The token with the highest logit, the lowest id among equals.

    Raises:
        EngineError: the logits contain NaN.
    """
    index = int(np.argmax(logits))
    if np.isnan(logits[index]):  # argmax returns the first NaN if there is one
        raise EngineError("the logits contain NaN")
    return index
