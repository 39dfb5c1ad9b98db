"""Iterations on their own: no threads, works made by hand, an exact engine that keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from skippy.engine import EngineError, Segment, StageEngine
from skippy.engine.toy import ToyEngine
from skippy.stage.iterations import Iterations
from skippy.stage.waves import WaveQueue
from skippy.stage.work import Work

Call = list[tuple[int, int]]
"""Sequence and rows of each segment of one native batch."""


class RecordingEngine(ToyEngine):
    """Keeps what it is asked to decode; fails for sequences in ``bad``; each batch takes its time."""

    def __init__(self, layer_end: int = 4, *, can_mix: bool = True, max_batch: int = 2048) -> None:
        super().__init__(0, layer_end, 4, context_length=4096, max_sequences=16, max_batch=max_batch)
        self._info = attrs.evolve(self._info, can_mix=can_mix)
        self.calls: list[Call] = []
        self.bad: set[int] = set()
        self.now_us = 0
        self.step_us = self.slice_us = 1000
        self.during: Callable[[], object] = lambda: None
        """Called while the first segment of each batch is computed."""

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        self.calls.append([(segment.sequence, segment.count) for segment in segments])
        rows = sum(segment.count for segment in segments)
        self.now_us += self.step_us if rows == len(segments) else self.slice_us
        for segment in segments:
            if segment.sequence in self.bad:
                raise EngineError(f"sequence {segment.sequence} is bad")
        super().decode(segments, output)

    def _run(self, *args: Any) -> Any:
        self.during()
        return super()._run(*args)


@attrs.define
class Bench:
    """Iterations over a recording engine, and works made by hand."""

    engine: RecordingEngine
    iterations: Iterations
    ended: list[Work] = attrs.field(factory=list)
    logits: dict[int, list[bytes]] = attrs.field(factory=dict)
    places: dict[int, int] = attrs.field(factory=dict)

    def work(self, sequence: int, count: int, *, decodes: bool = False, logits: int = 0) -> Work:
        """The next ``count`` rows of a sequence; boundaries or logits are kept."""
        position = self.places.get(sequence, 0)
        self.places[sequence] = position + count
        tokens = [(sequence * 31 + place) % 250 for place in range(position, position + count)]
        segment = Segment(sequence, position, count, tokens=tokens, logits=logits)
        middle = self.engine.info.output_width
        output = memoryview(bytearray(count * middle * 4)) if middle else None

        def after(engine: StageEngine, first: int) -> bool:
            got = self.logits.setdefault(sequence, [])
            got += [engine.logits(first + row).tobytes() for row in range(logits)]
            self.ended.append(work)
            return False

        work = Work(segment, output, after, decodes=decodes)
        self.iterations.add(work)
        return work

    def step_of(self, sequence: int) -> Work:
        return self.work(sequence, 1, decodes=True, logits=1 if self.engine.info.is_last else 0)

    def steps(self, *sequences: int) -> list[Work]:
        return [self.step_of(sequence) for sequence in sequences]

    def run(self, times: int = 1) -> list[Call]:
        """So many iterations; returns the native batches they took."""
        before = len(self.engine.calls)
        for _ in range(times):
            assert self.iterations.wait_secs() == 0
            self.iterations.step()
        return self.engine.calls[before:]

    def run_all(self) -> list[Call]:
        before = len(self.engine.calls)
        while self.iterations.wait_secs() == 0:
            self.iterations.step()
        assert self.iterations.wait_secs() is None
        return self.engine.calls[before:]


def bench(
    engine: RecordingEngine | None = None, *, mixed_rows: int | None = None, safe: bool = False
) -> Bench:
    engine = engine or RecordingEngine()
    iterations = Iterations(engine, WaveQueue(), mixed_rows=mixed_rows, safe=safe, clock=lambda: 0.0)
    return Bench(engine, iterations)


def ended_well(*works: Work) -> bool:
    return all(work.over and work.error is None for work in works)
