"""The toy engine's sampler: greedy, or temperature with the usual cuts, in numpy."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from skippy.protocol.messages import SamplingConfig

from .base import BoolArray, FloatArray, Sampler
from .checks import token_array
from .mirostat import BESIDE_MIROSTAT, Mirostat
from .sampling import check_chat_metadata, check_settings, greedy, is_greedy, only, step_digest
from .toy_vocabulary import ToyVocabulary

Values = npt.NDArray[np.float64]

_UNSUPPORTED: Final = {
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
}


class ToySampler(Sampler):
    """Logit bias, penalties, top_k, top_p, min_p, temperature, mirostat 2; others are refused by name."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        settings: SamplingConfig | None,
        chat_metadata: str | None = None,
    ) -> None:
        check_chat_metadata(chat_metadata)
        if settings is not None and not settings.enabled:
            settings = None
        if settings is not None:
            check_settings(settings, vocab_size)
            for name, neutral in _UNSUPPORTED.items():
                if getattr(settings, name) != neutral:
                    raise ValueError(f"{name} is not supported by the toy engine, use {neutral}")
            if settings.top_nsigma > 0.0:
                raise ValueError("top_nsigma is not supported by the toy engine, use -1")
            if settings.mirostat_mode == 1:
                raise ValueError("mirostat_mode 1 is not supported by the toy engine, use 0 or 2")
        self._settings = settings = None if settings is None else _as_sent(settings)
        self._mirostat = Mirostat(settings) if settings is not None and settings.mirostat_mode else None
        self._vocab_size = vocab_size
        last = 0 if settings is None else settings.penalty_last_n
        self._history: deque[int] = deque(maxlen=context_length if last < 0 else last)

    def accept(self, tokens: Sequence[int]) -> None:
        self._history.extend(token_array(tokens, self._vocab_size).tolist())

    def sample(self, logits: FloatArray, step: int, allowed: BoolArray | None = None) -> int:
        settings = self._settings
        if settings is None:
            return greedy(only(logits, allowed))
        values = logits.astype(np.float64)
        for token, bias in settings.logit_bias:
            values[token] += bias
        if settings.ignores_eos:
            values[[ToyVocabulary.EOS, ToyVocabulary.IM_END]] = -np.inf
        if allowed is not None:
            values = only(values, allowed)
        if "penalties" in settings.samplers:
            self._penalise(values, settings)
        best = greedy(values.astype(np.float32))
        if is_greedy(settings):
            return best
        order = np.argsort(-values, kind="stable")
        kept = values[order]
        kept = kept[: np.count_nonzero(kept > -np.inf)]
        for name in settings.samplers:
            if self._mirostat is None or name in BESIDE_MIROSTAT:
                kept = _apply(name, kept, settings)
        if self._mirostat is not None:
            shares = np.exp(kept - kept[0])
            surprise = -np.log2(np.maximum(shares / shares.sum(), np.finfo(np.float64).tiny))
            kept = kept[: max(1, int(np.count_nonzero(surprise <= self._mirostat.limit(step))))]
        weights = np.cumsum(np.exp(kept - kept[0]))
        target = step_digest(settings.seed, step, b"skippy-draw") / 2.0**64 * weights[-1]
        index = min(int(np.searchsorted(weights, target, side="right")), len(kept) - 1)
        if self._mirostat is not None:
            self._mirostat.drawn(step, float(np.exp(kept[index] - kept[0]) / weights[-1]))
        return int(order[index])

    def _penalise(self, values: Values, settings: SamplingConfig) -> None:
        for token, count in Counter(self._history).items():
            value = values[token]
            value = value * settings.repeat_penalty if value <= 0 else value / settings.repeat_penalty
            values[token] = value - count * settings.frequency_penalty - settings.presence_penalty

    def close(self) -> None:
        """Nothing native to free."""


def _apply(name: str, kept: Values, settings: SamplingConfig) -> Values:
    """One sampler over candidates in falling order; it keeps a prefix of them, or scales them."""
    if name == "temperature":
        scaled: Values = kept / settings.temperature
        return scaled
    if name == "top_k" and settings.top_k > 0:
        return kept[: settings.top_k]
    if name in ("top_p", "min_p"):
        weights = np.exp(kept - kept[0])
        if name == "min_p":
            return kept[: int(np.count_nonzero(weights >= settings.min_p))]
        if settings.top_p < 1.0:
            share = np.cumsum(weights) / weights.sum()
            return kept[: int(np.searchsorted(share, settings.top_p)) + 1]
    return kept


def _as_sent(settings: SamplingConfig) -> SamplingConfig:
    """With every number as an f32, as frames and native samplers have it.

    Else the last bits of a draw depend on whether its settings have been sent.
    """
    numbers: dict[str, Any] = {
        field.name: float(np.float32(value))
        for field in attrs.fields(SamplingConfig)
        if isinstance(value := getattr(settings, field.name), float)
    }
    biases = tuple((token, float(np.float32(bias))) for token, bias in settings.logit_bias)
    return attrs.evolve(settings, logit_bias=biases, **numbers)
