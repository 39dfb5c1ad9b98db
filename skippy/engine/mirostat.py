"""Mirostat sampling: what goes with it, its state between draws, and how many tokens it keeps.

Source: Basu and others, "Mirostat", arXiv 2007.14966, and llama.cpp.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from skippy.protocol.messages import SamplingConfig

from .base import EngineError, FloatArray

MIROSTAT_MODES: Final = (0, 1, 2)
"""0: none; else the version of the algorithm."""
BESIDE_MIROSTAT: Final = frozenset({"penalties", "dry", "temperature"})
"""Samplers that go with mirostat, which cuts candidates off itself, in place of those that do otherwise."""

_ZIPF_TOKENS: Final = 100
"""Likeliest tokens that mirostat 1 looks at; llama.cpp's number."""


class Mirostat:
    """The state of mirostat sampling, which every draw moves: the surprise above which tokens are cut off.

    It is kept for every draw, so that one that is made anew, behind a rewind, is the same.
    """

    def __init__(self, settings: SamplingConfig) -> None:
        self._target = settings.mirostat_entropy
        self._rate = settings.mirostat_learning_rate
        self._limits = [2 * self._target]

    def limit(self, step: int) -> float:
        """In bits, for draw ``step``. Raises EngineError where the draw before it was made somewhere else."""
        if not 0 <= step < len(self._limits):
            raise EngineError(f"mirostat knows nothing of the draws before number {step}")
        return self._limits[step]

    def drawn(self, step: int, probability: float) -> None:
        """Draw ``step`` took a token of this probability among those that were left."""
        surprise = -math.log2(probability)
        limit = self._limits[step] - self._rate * (surprise - self._target)
        self._limits[step + 1 :] = [limit]


def surprise_count(logits: FloatArray, limit: float) -> int:
    """How many of the likeliest tokens mirostat 1 keeps, at least 1, for at most ``limit`` bits of surprise.

    From the slope of the likeliest ones it estimates the exponent of a Zipf distribution.
    """
    if len(logits) < 2:
        return 1
    count = min(_ZIPF_TOKENS, len(logits))
    likeliest = -np.sort(-np.partition(logits, -count)[-count:].astype(np.float64))
    likeliest = likeliest[np.isfinite(likeliest)]
    ranks = np.log(np.arange(2, len(likeliest) + 1) / np.arange(1, len(likeliest)))
    exponent = float((ranks * -np.diff(likeliest)).sum() / max((ranks**2).sum(), 1e-9))
    excess = exponent - 1.0
    # log2 of: excess * 2**limit / (1 - size**-excess), which for an excess of 0 is 2**limit / log(size).
    scale = excess / -np.expm1(-excess * math.log(len(logits))) if abs(excess) > 1e-6 else 0.0
    bits = limit + math.log2(scale or 1.0 / math.log(len(logits)))
    bits = min(bits / max(exponent, 1e-6), math.log2(len(logits)))
    return max(1, int(2.0 ** max(bits, 0.0)))
