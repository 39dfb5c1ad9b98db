"""Embeddings of texts by a stage that has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from skippy.engine import EngineError, Segment, StageEngine
from skippy.stage import RequestFailed, Stage

from .generation import ChainUnavailable
from .work import Work

T = TypeVar("T")
Vector = npt.NDArray[np.float32]

CHUNK: Final = 256
"""Rows that are computed at a time."""
ROWS: Final = 64
"""The same where the mean of all is wanted: of each there are all logits meanwhile."""


class Embedder:
    """Computes embeddings on a stage whose engine gives them, beside what else runs there."""

    def __init__(self, stage: Stage) -> None:
        self._scheduler = stage.context.scheduler

    async def embed(self, tokens: Sequence[int], work: Work) -> Vector:
        """The embedding of a text, of length 1.

        Takes a sequence, which is free again at the end, also of a cancelled call. Between pieces of the text
        others have their turn.

        Args:
            tokens: at least one; at most as many as the context has positions.
            work: is told of the progress.

        Raises:
            ChainUnavailable: the engine failed, or all sequences are in use for too long.
        """
        try:
            sequence = await self._scheduler.acquire_sequence()
        except RequestFailed as error:
            raise ChainUnavailable(str(error)) from error
        try:
            return await self._embed(sequence, tokens, work)
        except EngineError as error:
            raise ChainUnavailable(f"the text could not be computed: {error}") from error
        finally:
            self._scheduler.release_sequence(sequence)

    async def _embed(self, sequence: int, tokens: Sequence[int], work: Work) -> Vector:
        info = self._scheduler.info
        if info.pooling == "mean":
            step = min(ROWS, info.max_batch)
            total = np.zeros(info.hidden_size, dtype=np.float64)
            for start in range(0, len(tokens), step):
                rows = await self._run(_embed, sequence, start, tokens[start : start + step], work)
                total += rows.sum(axis=0, dtype=np.float64)
        else:
            # Rows see those before them only.
            end = 0 if info.pooling == "first" else len(tokens) - 1
            step = min(CHUNK, info.max_batch)
            for start in range(0, end, step):
                await self._run(_decode, sequence, start, tokens[start : min(start + step, end)], work)
            rows = await self._run(_embed, sequence, end, tokens[end : end + 1], work)
            total = rows[0].astype(np.float64)
        norm = float(np.linalg.norm(total))
        return (total / norm if norm else total).astype(np.float32)

    async def _run(
        self,
        call: Callable[[StageEngine, Segment], T],
        sequence: int,
        position: int,
        tokens: Sequence[int],
        work: Work,
    ) -> T:
        segment = Segment(sequence, position, len(tokens), tokens=tokens)
        result = await self._scheduler.run(lambda engine: call(engine, segment))
        work.renew()
        return result


def _embed(engine: StageEngine, segment: Segment) -> Vector:
    return engine.embed(segment)


def _decode(engine: StageEngine, segment: Segment) -> None:
    engine.decode([segment])
