"""The unsplit model, computing what a chain computes in batches of the same shapes; and stages of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skippy.engine import EngineOptions, Segment, StageEngine, Vocabulary
from skippy.engine.llama import LlamaEngine
from skippy.models import ensure_slice
from skippy.protocol import PositionLogProbabilities, SamplingConfig
from skippy.stage.scoring import score


def load_layers(
    model: Path, start: int, end: int, *, context_length: int = 512, max_sequences: int = 1
) -> StageEngine:
    """llama.cpp on these layers of a model, whose slice is written beside it."""
    options = EngineOptions(context_length=context_length, max_sequences=max_sequences, n_threads=1)
    return LlamaEngine.load(ensure_slice(model, start, end, cache_dir=model.parent), options)


class WholeModel:
    """One sequence on one engine that has all layers.

    Args:
        chunk: tokens of a prefill chunk, and of a replay chunk.

    Attributes:
        scores: of the tokens of the last answer.
    """

    def __init__(self, engine: StageEngine, sampling: SamplingConfig, chunk: int) -> None:
        self.engine = engine
        self._sampling = sampling
        self._chunk = chunk
        self._sampler = engine.new_sampler(sampling)
        self.scores: list[PositionLogProbabilities] = []

    def answer(self, prompt: Sequence[int], count: int, replays: Sequence[int] = ()) -> list[int]:
        """``count`` tokens behind a prompt; behind each number of ``replays`` all is computed again."""
        self._begin()
        self.scores = []
        self._run_chunks(prompt[:-1])
        tokens: list[int] = []
        for step in range(count):
            if step in replays and tokens:
                self._begin()
                self._run_chunks(prompt)
                self._run_chunks(tokens, predict=True)
            else:
                self._run([tokens[-1] if tokens else prompt[-1]], logits=1)
            logits = self.engine.logits(0)
            tokens.append(self._sampler.sample(logits, step))
            self.scores.append(score(logits, tokens[-1], 0))
        return tokens

    @property
    def vocabulary(self) -> Vocabulary:
        assert self.engine.vocabulary is not None  # all layers are here
        return self.engine.vocabulary

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.vocabulary.piece, tokens)).decode(errors="replace")

    def _begin(self) -> None:
        self.engine.drop(0)
        self._sampler.close()
        self._sampler = self.engine.new_sampler(self._sampling)

    def _run_chunks(self, tokens: Sequence[int], *, predict: bool = False) -> None:
        for start in range(0, len(tokens), self._chunk):
            last = start + self._chunk >= len(tokens)
            self._run(tokens[start : start + self._chunk], logits=1 if predict and last else 0)

    def _run(self, tokens: Sequence[int], logits: int = 0) -> None:
        self._sampler.accept(tokens)
        position = self.engine.length(0)
        self.engine.decode([Segment(0, position, len(tokens), tokens=list(tokens), logits=logits)])

    def close(self) -> None:
        self._sampler.close()
        self.engine.close()
