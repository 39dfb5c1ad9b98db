"""Is a chain of slices exact? The same rows through the unsplit model and through slices of it.

Numbers depend on the chunks that a prompt comes in and on what shares a batch, so both sides get the same
ones: a prompt and a few steps alone, then prompts of two more sequences in one batch, then steps of all
three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np

from skippy.models import GGUFHeader, SliceInfo, UnsupportedArchitectureError, write_slice

from .base import FloatArray, Segment, StageEngine

Load = Callable[[SliceInfo], StageEngine]
"""Makes an engine for a file. It needs three sequences, and a context and a batch of 128."""

SEQUENCES = 3
MOST_STEPS = 40
"""Twice as many and a prompt fit the context that :data:`Load` asks for."""
_PROMPTS = (40, 23, 9)
"""Rows of the prompts. 40 is longer than the windows of the small models."""


@attrs.frozen(slots=True)
class CutResult:
    """What one way to cut a model gave.

    Attributes:
        cuts: the layers at which slices begin, but the first.
        difference: largest absolute difference of any logit; 0.0 where all bits are equal, infinite where
            some are not a number. None: refused or failed.
        agreed, tokens: how many of the greedy tokens are the same, and of how many.
        refused: why it cannot be cut there; empty where it can.
        failed: why the slices did not run; empty where they did.
    """

    cuts: tuple[int, ...]
    difference: float | None
    agreed: int = 0
    tokens: int = 0
    refused: str = ""
    failed: str = ""

    @property
    def exact(self) -> bool:
        return self.difference == 0.0

    @property
    def verdict(self) -> str:
        """``exact``, ``differs``, ``refused`` or ``failed``."""
        if self.difference is None:
            return "refused" if self.refused else "failed"
        return "exact" if self.exact else "differs"


class Comparison:
    """Compares ways to cut one model. Files of slices are written to ``folder``.

    Blocks for as long as the model takes. Close it to free the engines, which are kept for other cuts.

    Args:
        model: the whole model.
        folder: an empty folder.
        load: makes the engines.
        steps: single rows after each prompt.

    Raises:
        ModelError: the model cannot be read.
        EngineError: the unsplit model cannot be run, or gives what is not a number.
    """

    def __init__(self, model: Path, folder: Path, load: Load, steps: int = 3) -> None:
        self._header = GGUFHeader.read(model)
        self._whole = SliceInfo.from_header(self._header)
        self._folder, self._load, self._steps = folder, load, steps
        self._engines: dict[tuple[int, int], StageEngine] = {}
        self.layers = self._whole.layer_count
        self._expected: list[FloatArray] = []

    def compare(self, *cuts: int) -> CutResult:
        """Run the model cut at these layers.

        Raises:
            EngineError: a slice cannot be loaded, or not be run.
        """
        if not self._expected:
            self._expected = run_chain([self._engine(0, self.layers)], self._steps)
        try:
            chain = [self._engine(*part) for part in itertools.pairwise((0, *cuts, self.layers))]
        except UnsupportedArchitectureError as error:
            return CutResult(cuts, None, refused=str(error))
        return compare_logits(cuts, run_chain(chain, self._steps, self._expected), self._expected)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _engine(self, start: int, end: int) -> StageEngine:
        engine = self._engines.get((start, end))
        if engine is None:
            info = self._whole
            if end - start < self.layers:
                path = self._folder / f"{start}-{end}.gguf"
                info = write_slice(self._header, path, start, end, source_sha256="0" * 64)
            engine = self._engines[start, end] = self._load(info)
        return engine


def run_chain(
    chain: Sequence[StageEngine], steps: int, expected: Sequence[FloatArray] = ()
) -> list[FloatArray]:
    """The logits that a chain of engines gives, of shape (vocabulary,), row after row that is asked for.

    Args:
        chain: all layers of a model, in order; what the engines hold is dropped.
        steps: single rows after each prompt, at most :data:`MOST_STEPS`.
        expected: what the unsplit model gave for the same steps; nothing: this is it.

    Raises:
        EngineError: a stage cannot be run.
    """
    for engine in chain:
        for sequence in range(SEQUENCES):
            engine.drop(sequence)
    generator = np.random.default_rng(0)
    vocabulary = min(chain[0].info.vocab_size, 100)
    first, *others = (generator.integers(0, vocabulary, rows).tolist() for rows in _PROMPTS)
    found: list[FloatArray] = []

    def token(back: int) -> list[int]:
        # Both sides get the tokens of the unsplit model: one that differs must not hide what follows.
        place = len(found) - back
        return [int(np.argmax((expected if len(expected) else found)[place]))]

    found += _feed(chain, {0: first})
    for _ in range(steps):
        found += _feed(chain, {0: token(1)})
    found += _feed(chain, dict(enumerate(others, start=1)))
    tokens = [token(3 - sequence) for sequence in range(SEQUENCES)]
    for _ in range(steps):
        found += _feed(chain, dict(enumerate(tokens)))
        tokens = [token(SEQUENCES - sequence) for sequence in range(SEQUENCES)]
    return found


def compare_logits(
    cuts: tuple[int, ...], found: Sequence[FloatArray], expected: Sequence[FloatArray]
) -> CutResult:
    """What a chain gave, held against what the unsplit model did."""
    pairs = list(zip(found, expected, strict=True))
    agreed = sum(int(np.argmax(one)) == int(np.argmax(other)) for one, other in pairs)
    return CutResult(cuts, max(_distance(*pair) for pair in pairs), agreed, len(pairs))


def _feed(chain: Sequence[StageEngine], rows: dict[int, list[int]]) -> list[FloatArray]:
    """One batch through all stages; the logits behind each sequence's rows."""
    values: dict[int, memoryview] = {}
    for engine in chain:
        info = engine.info
        segments = [
            Segment(
                sequence,
                engine.length(sequence),
                len(tokens),
                tokens=tokens if info.is_first or info.takes_tokens else None,
                activation=values.get(sequence),
                logits=int(info.is_last),
            )
            for sequence, tokens in rows.items()
        ]
        if info.is_last:
            engine.decode(segments)
            break
        size = info.output_width * 4
        output = memoryview(bytearray(size * sum(map(len, rows.values()))))
        engine.decode(segments, output)
        start = 0
        for sequence, tokens in rows.items():
            values[sequence] = output[start : start + size * len(tokens)]
            start += size * len(tokens)
    return [chain[-1].logits(index).copy() for index in range(len(rows))]


def _distance(one: FloatArray, other: FloatArray) -> float:
    if one.tobytes() == other.tobytes() and np.isfinite(one).all():
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = float(np.abs(one - other).max())
    return distance if np.isfinite(distance) and distance > 0.0 else float("inf")
