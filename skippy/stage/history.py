"""What a session has run, as the engine's thread knows it: its tokens, and on the last stage the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from skippy.engine import Sampler, StageEngine
from skippy.protocol import PositionLogProbabilities

from .scoring import score


@attrs.define(slots=True)
class NativeHistory:
    """What only engine calls touch, in their order: the token history and the sampler over it."""

    history: list[int] = attrs.field(factory=list)
    sampler: Sampler | None = None
    top_logprobs: int | None = None
    scores: list[PositionLogProbabilities] = attrs.field(factory=list)

    def replace_sampler(self, sampler: Sampler | None) -> None:
        if self.sampler is not None:
            self.sampler.close()
        self.sampler = sampler
        if sampler is not None and self.history:
            sampler.accept(self.history)

    def recall(self, tokens: Sequence[int], sampler: Sampler | None) -> None:
        """These tokens were restored, and nothing else was run. ``sampler``: in place of the one that is."""
        self.history[:] = tokens
        self.replace_sampler(sampler)

    def accept(self, tokens: Sequence[int]) -> None:
        """Rows were run."""
        self.history.extend(tokens)
        if self.sampler is not None:
            self.sampler.accept(tokens)

    def sample(self, engine: StageEngine, row: int, step: int) -> int:
        """What follows the last accepted token, from a row of the engine's logits."""
        assert self.sampler is not None
        logits = engine.logits(row)
        token = self.sampler.sample(logits, step)
        if self.top_logprobs is not None:
            self.scores.append(score(logits, token, self.top_logprobs))
        return token

    def sample_each(self, engine: StageEngine, first: int, tokens: Sequence[int], step: int) -> list[int]:
        """What follows each of the rows that were run, drawn as decoding them one by one would.

        ``first``: the engine's logits row of the first of them.
        """
        predicted = []
        for row, token in enumerate(tokens):
            self.accept((token,))
            predicted.append(self.sample(engine, first + row, step + row))
        return predicted
