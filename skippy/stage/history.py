"""What a session has run, as the engine's thread knows it: its tokens, and on the last stage the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from skippy.engine import Sampler, StageEngine
from skippy.engine.grammar import Grammar, GrammarMismatch
from skippy.protocol import PositionLogProbabilities

from .scoring import score


@attrs.define(slots=True)
class NativeHistory:
    """What only engine calls touch, in their order: the token history and the sampler over it."""

    history: list[int] = attrs.field(factory=list)
    sampler: Sampler | None = None
    grammar: Grammar | None = None
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
        self.cut(0)
        self.history[:] = tokens
        self.replace_sampler(sampler)

    def cut(self, length: int) -> None:
        """Forget what the session holds from position ``length`` on; the sampler is another matter."""
        del self.history[length:]
        if self.grammar is not None:
            self.grammar.rewind(length)

    def accept(self, tokens: Sequence[int]) -> None:
        """Rows were run."""
        self.history.extend(tokens)
        if self.sampler is not None:
            self.sampler.accept(tokens)

    def sample(self, engine: StageEngine, row: int, step: int, *, constrained: bool = True) -> int:
        """What follows the last accepted token, from a row of the engine's logits.

        ``constrained``: by the grammar, if there is one. Raises GrammarFailed where that cannot be.
        """
        assert self.sampler is not None
        logits = engine.logits(row)
        allowed = self.grammar.allowed(self.history) if self.grammar is not None and constrained else None
        token = self.sampler.sample(logits, step, allowed)
        if self.top_logprobs is not None:
            self.scores.append(score(logits, token, self.top_logprobs))
        return token

    def sample_each(self, engine: StageEngine, first: int, tokens: Sequence[int], step: int) -> list[int]:
        """What follows each of the rows that were run, drawn as decoding them one by one would.

        ``first``: the engine's logits row of the first of them.
        """
        predicted = []
        fits = True
        for row, token in enumerate(tokens):
            self.accept((token,))
            try:
                predicted.append(self.sample(engine, first + row, step + row, constrained=fits))
            except GrammarMismatch:
                # A draft that does not fit, and what was predicted in its place does: no row from here on is
                # kept.
                fits = False
                predicted.append(self.sample(engine, first + row, step + row, constrained=False))
        return predicted
