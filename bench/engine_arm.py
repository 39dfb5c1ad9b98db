"""The limit: the engine called directly in a loop, all rows of a step in one batch, no server around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo

from .load import Outcome


class EngineArm:
    """The unsplit model in this process. Prompts are taken one after the other, then all decode together."""

    def __init__(self, model: Path, *, threads: int, lanes: int, context: int) -> None:
        options = EngineOptions(
            context_length=context, max_sequences=lanes, n_threads=threads, n_threads_batch=threads
        )
        self._engine = LlamaEngine.load(SliceInfo.from_file(model), options)

    def run(self, prompts: Sequence[str], tokens: int) -> list[Outcome]:
        """One request per prompt, all at once; as many outcomes."""
        engine, started = self._engine, time.perf_counter()
        vocabulary = engine.vocabulary
        assert vocabulary is not None
        ids = [vocabulary.tokenize(prompt, add_special=True, parse_special=False) for prompt in prompts]
        current: list[int] = []
        for sequence, prompt in enumerate(ids):
            engine.drop(sequence)
            self._prefill(sequence, prompt[:-1])
            current.append(prompt[-1])
        texts = [b"" for _ in prompts]
        times: list[float] = []
        for step in range(tokens):
            engine.decode(
                [
                    Segment(sequence=i, position=len(ids[i]) - 1 + step, count=1, tokens=[token], logits=1)
                    for i, token in enumerate(current)
                ]
            )
            current = [int(engine.logits(i).argmax()) for i in range(len(current))]
            times.append(time.perf_counter())
            texts = [text + vocabulary.piece(token) for text, token in zip(texts, current, strict=True)]
        return [
            Outcome(
                client=i,
                status=200,
                started=started,
                ended=times[-1],
                times=times,
                text=text.decode(errors="replace"),
                tokens=tokens,
                prompt_tokens=len(ids[i]),
                finish="length",
            )
            for i, text in enumerate(texts)
        ]

    def _prefill(self, sequence: int, tokens: Sequence[int]) -> None:
        size = self._engine.info.max_batch
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            self._engine.decode([Segment(sequence=sequence, position=start, count=len(part), tokens=part)])

    def close(self) -> None:
        self._engine.close()
