"""Chains of engines run by hand: what the stage service does, without the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from skippy.engine import FloatArray, Segment, StageEngine

LoadStage = Callable[..., StageEngine]


@attrs.define
class Chain:
    """Stages of one model, in order."""

    stages: list[StageEngine]

    @property
    def last(self) -> StageEngine:
        return self.stages[-1]

    def feed(self, *rows: tuple[int, Sequence[int]], logits: int = 1) -> list[FloatArray]:
        """One batch of (sequence, tokens) through all stages, appended; the requested logits rows, copied."""
        lengths = [self.last.length(sequence) for sequence, _ in rows]
        values: list[memoryview | None] = [None] * len(rows)
        for stage in self.stages:
            segments = [
                Segment(
                    sequence=sequence,
                    position=length,
                    count=len(tokens),
                    tokens=tokens if stage.info.is_first or stage.info.takes_tokens else None,
                    activation=value,
                    logits=min(logits, len(tokens)) if stage.info.is_last else 0,
                )
                for (sequence, tokens), length, value in zip(rows, lengths, values, strict=True)
            ]
            if stage.info.is_last:
                stage.decode(segments)
                break
            width = stage.info.output_width * 4
            sizes = [len(tokens) * width for _, tokens in rows]
            output = memoryview(bytearray(sum(sizes)))
            stage.decode(segments, output)
            ends = np.cumsum(sizes).tolist()
            values = [output[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        count = sum(min(logits, len(tokens)) for _, tokens in rows)
        return [self.last.logits(index).copy() for index in range(count)]

    def run(self, chunks: Sequence[Sequence[int]], steps: int, sequence: int = 0) -> list[FloatArray]:
        """Prefill in chunks, then greedy steps; the logits after each."""
        found = [self.feed((sequence, chunk))[-1] for chunk in chunks]
        for _ in range(steps):
            found += self.feed((sequence, [int(np.argmax(found[-1]))]))
        return found

    def each(self, action: Callable[[StageEngine], object]) -> None:
        for stage in self.stages:
            action(stage)


@attrs.frozen
class Kind:
    """One kind of engine under test: how to load layers of it, and how deep the model is."""

    name: str
    layers: int
    load: LoadStage
    cuts: tuple[tuple[int, ...], ...]
    """Inner boundaries of the chains to compare with the unsplit engine."""


def bits(rows: Sequence[FloatArray]) -> list[bytes]:
    return [row.tobytes() for row in rows]
