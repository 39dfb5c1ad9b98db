"""An engine that computes nothing: what is left of a token's time is the way there and back."""

from __future__ import annotations

import numpy as np

from skippy.engine import FloatArray, Segment
from skippy.engine.toy import ToyEngine

CHOSEN = 65


class WireEngine(ToyEngine):
    """The toy engine's bookkeeping without its layers: rows leave a stage as they came in.

    A first stage sends rows of zeros, a last one predicts the same token every time. What remains is one copy
    of the rows into the frame, which real engines need as well.
    """

    def __init__(self, *args: int, **keys: int) -> None:
        super().__init__(*args, **keys)
        info = self.info
        self._zeros = np.zeros((info.max_batch, info.hidden_size), np.float32)
        self._chosen = np.zeros(max(info.vocab_size, CHOSEN + 1), np.float32)
        self._chosen[CHOSEN] = 1

    def _run(self, segment: Segment, ids: object) -> FloatArray:  # type: ignore[override]
        if segment.activation is None:
            return self._zeros[: segment.count]
        return np.frombuffer(segment.activation, np.float32).reshape(segment.count, -1)

    def _head(self, rows: FloatArray, segment: Segment) -> list[FloatArray]:  # type: ignore[override]
        return [self._chosen] * segment.logits
