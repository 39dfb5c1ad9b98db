"""Log-probabilities of predicted tokens, where a request asks for them."""

from __future__ import annotations

import numpy as np

from skippy.engine import FloatArray
from skippy.protocol import PositionLogProbabilities, TokenLogProbability


def log_softmax(logits: FloatArray) -> FloatArray:
    """Natural log-probabilities of raw logits, shape ``[vocab_size]``, in f32."""
    shifted = logits - logits.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
    return result


def score(logits: FloatArray, token: int, top: int) -> PositionLogProbabilities:
    """Of one predicted token: its own, and those of the ``top`` likeliest, lower ids first on a tie."""
    scores = log_softmax(logits)
    count = min(top, len(scores))
    likeliest: list[int] = []
    if count:
        least = np.partition(scores, -count)[-count]
        candidates = np.flatnonzero(scores >= least)
        likeliest = candidates[np.argsort(-scores[candidates], kind="stable")][:count].tolist()
    entries = [TokenLogProbability(each, float(scores[each])) for each in (token, *likeliest)]
    return PositionLogProbabilities(entries[0], tuple(entries[1:]))
