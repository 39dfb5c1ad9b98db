"""What a request must get: the toy engine is exact, so an unsplit one tells every token."""

from __future__ import annotations

import attrs

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.generation import FinishReason, GenerationRequest
from skippy.protocol import SamplingConfig


@attrs.frozen(slots=True)
class ToyModel:
    """The model of a simulation.

    Attributes:
        layers: of the whole model.
        context_length: positions of one sequence.
        end_at: position from which greedy generation ends.
        width: values per boundary row.
    """

    layers: int
    context_length: int
    end_at: int | None
    width: int = 4


def _unsplit(model: ToyModel) -> ToyEngine:
    """All of it in one engine, for one sequence."""
    return ToyEngine(
        0,
        model.layers,
        model.layers,
        width=model.width,
        context_length=model.context_length,
        max_sequences=1,
        end_at=model.end_at,
    )


def expected(model: ToyModel, request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """All tokens of a request that is left alone, and why it ends."""
    engine = _unsplit(model)
    sampler = engine.new_sampler(request.sampling)
    prompt = list(request.prompt)
    if prompt[:-1]:
        engine.decode([Segment(0, 0, len(prompt) - 1, tokens=prompt[:-1])])
        sampler.accept(prompt[:-1])
    vocabulary = ToyVocabulary()
    ignores = request.sampling is not None and request.sampling.ignores_eos
    limit = min(request.max_tokens, model.context_length - len(prompt))
    tokens: list[int] = []
    token, position = prompt[-1], len(prompt) - 1
    while True:
        engine.decode([Segment(0, position, 1, tokens=[token], logits=1)])
        sampler.accept([token])
        token = sampler.sample(engine.logits(0), position - len(prompt) + 1)
        if not ignores and vocabulary.is_end_of_generation(token):
            return tokens, "stop"
        tokens.append(token)
        if len(tokens) >= limit:
            return tokens, "length"
        position += 1


class RowOracle:
    """What a chain must hold for a peer, and say.

    It remembers nothing wrongly: each draw has a sampler of its own.
    """

    def __init__(self, model: ToyModel, sampling: SamplingConfig | None) -> None:
        self.held: list[int] = []
        self._sampling = sampling
        self._engine = _unsplit(model)

    def cut(self, length: int) -> None:
        self._engine.trim(0, length)
        del self.held[length:]

    def run(self, tokens: list[int], step: int | None = None) -> tuple[int, ...]:
        """Append rows; what follows each of them, where ``step`` says which draws those are."""
        rows = 0 if step is None else len(tokens)
        self._engine.decode([Segment(0, len(self.held), len(tokens), tokens=tokens, logits=rows)])
        predicted = []
        for row in range(rows):
            sampler = self._engine.new_sampler(self._sampling)
            sampler.accept([*self.held, *tokens[: row + 1]])
            predicted.append(sampler.sample(self._engine.logits(row), max(0, step or 0) + row))
        self.held += tokens
        return tuple(predicted)
