"""Which rows the engine computes next: decode steps first, prefill in what is left, all of it in batches.

Everything here runs in the engine's thread, one call at a time. One iteration is one native batch: the decode
steps that are there, or prefill rows of one or more sessions, or both where the engine allows that and the
stage was told to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from skippy.engine import Segment, StageEngine
from skippy.telemetry import NULL_TELEMETRY, Level, Telemetry, names

from .clock import microseconds, seconds
from .waves import WaveQueue
from .work import Work, WorkCancelled

LEAST_PREFILL_ROWS: Final = 16
"""Prefill rows of one iteration while other sessions decode; more only where they cost no more time than a
decode step does."""
MOST_PREFILL_ROWS: Final = 512
"""Prefill rows of several sessions in one iteration. A chunk that is longer runs whole, but alone."""

Batch = list[tuple[Work, int]]
"""Works, and how many rows of each."""


class Iterations:
    """The works that wait for the engine, and the choice among them.

    Decode steps come first, but once those that were ready have run, a slice of prefill gets its turn, so
    neither starves the other. While sessions decode, a slice is as small as it can be without wasting the
    engine.

    Args:
        waves: where decode steps wait for those that they belong with.
        mixed_rows: rows of an iteration that carries decode steps and prefill together; None: never together.
        safe: one work at a time, whole, in order of arrival: results do not depend on what else runs.
        telemetry: is told of each native batch, at level debug.
    """

    def __init__(
        self,
        engine: StageEngine,
        waves: WaveQueue,
        *,
        mixed_rows: int | None = None,
        safe: bool = False,
        clock: Callable[[], float] = seconds,
        telemetry: Telemetry = NULL_TELEMETRY,
    ) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._waves = waves
        self._mixed_rows = mixed_rows if engine.info.can_mix else None
        self.safe = safe
        self._clock = clock
        self._width = engine.info.output_width * 4
        self._max_batch = engine.info.max_batch
        self._prefill: deque[Work] = deque()
        self._live: set[int] = set()
        """Sequences that decode."""
        self._sliced = True
        """Whether prefill had its turn; then the steps that are ready now go first."""
        self._owed = 0
        """Waves to run before prefill has its next turn."""
        self._slice_rows = LEAST_PREFILL_ROWS
        self._scratch = bytearray()
        self.on_native: Callable[[], object] = lambda: None
        """Called just before each native call."""
        self._cut_batches = 0
        self._running: tuple[Sequence[Segment], Sequence[Work]] = ((), ())

    def add(self, work: Work) -> None:
        """A work has arrived."""
        if work.decodes and not self.safe:
            self._waves.add(work, self._clock())
        else:
            self._prefill.append(work)

    @property
    def cuts(self) -> int:
        """Batches so far of several works, of a part of one, and of a part of a wave."""
        return self._cut_batches + self._waves.cut_waves

    def leave(self, sequence: int) -> None:
        """The session of this sequence does not go on decoding, or not soon: nobody must wait for it."""
        self._live.discard(sequence)
        self._waves.leave(sequence)

    def wait_secs(self) -> float | None:
        """How long :meth:`step` has to wait for: 0 for not at all, None when there is nothing to do."""
        now = self._clock()
        if not self._prefill:
            return self._waves.wait_secs(now)
        # A slice takes much longer than the rest of a wave that has begun to arrive.
        return self._waves.imminent_secs(now) or 0.0

    def step(self) -> list[Work]:
        """Run one batch, if one is ready. Returns the works that must be settled without waiting."""
        woken: list[Work] = []
        chosen = self._choose(self._clock())
        batch: Batch = []
        for work, rows in chosen:
            if work.cancelled:
                error: Exception = WorkCancelled("the request ended before its rows ran")
            else:
                try:
                    work.prepare(self._engine)
                except Exception as exc:
                    error = exc
                else:
                    batch.append((work, rows))
                    continue
            if work.finish(error):
                woken.append(work)
        if batch:
            woken += self._run(batch)
            self._put_back([work for work, _ in batch if work.rows_left and not work.over])
        return woken

    def _put_back(self, works: list[Work]) -> None:
        """The rest of a chunk is first in line; the next step of a run waits behind the works of others."""
        self._prefill.extendleft(work for work in reversed(works) if not work.decodes)
        for work in works:
            if work.decodes:
                self.add(work)

    def end(self) -> list[Work]:
        """Nothing runs any more: all that waits is cancelled. Returns as :meth:`step`."""
        waiting = [*self._prefill, *self._waves.take_all()]
        self._prefill.clear()
        return [work for work in waiting if work.finish(WorkCancelled("the stage is shutting down"))]

    def interrupt(self, work: Work) -> None:
        """End the batch that runs, if ``work`` is in it and nobody wants any of it. From any thread.

        No other batch is hit, even if this one has just ended.
        """
        segments, works = self._running
        if work in works and all(each.cancelled for each in works):
            self._engine.abort(segments)

    # -- choosing --------------------------------------------------------------------------------------

    def _choose(self, now: float) -> Batch:
        if self.safe:
            return [(work := self._prefill.popleft(), work.rows_left)] if self._prefill else []
        if self._sliced:
            self._sliced = False
            self._owed = self._waves.ready_count(now)
        if not self._prefill or self._owed > 0:
            wave = self._waves.take_ready(now, self._max_batch)
            if wave or not self._prefill:
                self._owed -= 1
                steps = [(work, work.rows_left) for work in wave]
                return steps + self._beside(steps)
        self._sliced = True
        return self._slice(self._slice_limit())

    def _beside(self, steps: Batch) -> Batch:
        """Prefill rows for the same batch."""
        if self._mixed_rows is None or not self._prefill or not steps:
            return []
        used = sum(rows for _, rows in steps)
        taken = {work.segment.sequence for work, _ in steps}
        slices = self._slice(max(0, min(self._mixed_rows, self._max_batch) - used), taken)
        if slices:  # where nothing fits beside them, prefill still has its turn alone
            self._sliced = True
        return slices

    def _slice_limit(self) -> int:
        """Rows of the next slice of prefill.

        Where more sessions wait for their prompts than decode, their gaps weigh as much less: eight requests
        that come at once would else be seven that wait for the first, sixteen rows at a time.
        """
        first = self._prefill[0]
        if others := len(self._live - {first.segment.sequence}):
            waiting = len({work.segment.sequence for work in self._prefill})
            return self._slice_rows * max(1, waiting // others)
        return max(MOST_PREFILL_ROWS, first.rows_left)

    def _slice(self, limit: int, taken: set[int] | None = None) -> Batch:
        limit = min(limit, self._max_batch)
        sequences = set(taken or ())
        batch: Batch = []
        for work in self._prefill:
            rows = min(work.rows_left, limit) if work.sliceable else work.rows_left
            first = not batch and not taken
            if rows <= 0 or (rows > limit and not first) or work.segment.sequence in sequences:
                break
            if rows < work.rows_left:
                self._cut_batches += 1
            batch.append((work, rows))
            sequences.add(work.segment.sequence)
            limit -= rows
        for _ in batch:
            self._prefill.popleft()
        return batch

    # -- running ---------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> list[Work]:
        try:
            return self._run_together(batch)
        except Exception as exc:
            # Every sequence is as it was, or lost where it cannot be trimmed. A bad row must not fail others.
            if len(batch) == 1:
                work = batch[0][0]
                return [work] if work.finish(exc) else []
        woken: list[Work] = []
        for work, rows in batch:
            if work.cancelled:
                woken += [work] if work.finish(WorkCancelled("the request ended while it ran")) else []
            else:
                woken += self._run([(work, rows)])
        return woken

    def _run_together(self, batch: Batch) -> list[Work]:
        """One native batch. Raises what the engine raises."""
        segments = [work.next_segment(rows) for work, rows in batch]
        total = sum(rows for _, rows in batch)
        if len(batch) > 1:
            self._cut_batches += 1
        self._running = segments, [work for work, _ in batch]
        self.on_native()
        started = microseconds()
        try:
            if self._width == 0:
                self._engine.decode(segments)
            elif len(batch) == 1:
                self._engine.decode(segments, batch[0][0].next_output(total))
            else:
                self._decode_scattered(segments, batch, total)
        finally:
            self._running = (), ()  # they may hold activation buffers
        elapsed_us = microseconds() - started
        woken: list[Work] = []
        first_logits = 0
        for (work, rows), segment in zip(batch, segments, strict=True):
            work.compute_us += elapsed_us * rows // total
            work.batch_size = len(batch)
            if work.decodes:
                self._live.add(segment.sequence)
            if work.ran(self._engine, rows, first_logits):
                woken.append(work)
            first_logits += segment.logits
        self._observe(batch, elapsed_us / 1e6)
        if self._telemetry.enabled(Level.DEBUG):
            self._report(batch, elapsed_us)
        return woken

    def _report(self, batch: Batch, elapsed_us: int) -> None:
        decoded = sum(rows for work, rows in batch if work.decodes)
        self._telemetry.emit(
            names.STAGE_SCHEDULER_ITERATION,
            level=Level.DEBUG,
            running=len(batch),
            waiting=len(self._prefill) + self._waves.waiting,
            decode_tokens=decoded,
            prefill_tokens=sum(rows for _, rows in batch) - decoded,
            execution_ms=elapsed_us / 1000,
        )

    def _decode_scattered(self, segments: list[Segment], batch: Batch, total: int) -> None:
        """Decode rows whose boundaries belong into buffers of their own."""
        size = total * self._width
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        boundary = memoryview(self._scratch)[:size]
        self._engine.decode(segments, boundary)
        start = 0
        for work, rows in batch:
            target = work.next_output(rows)
            assert target is not None
            target[:] = boundary[start : start + len(target)]
            start += len(target)

    def _observe(self, batch: Batch, elapsed: float) -> None:
        """Learn how long steps and slices take."""
        steps = sum(1 for work, _ in batch if work.decodes)
        if steps == len(batch):
            self._waves.observe_step(sum(rows for _, rows in batch), elapsed)
            return
        self._waves.disturbed()
        if not steps and self._live and self._waves.step_secs:
            rows = sum(rows for _, rows in batch)
            if rows >= self._slice_rows and elapsed <= self._waves.step_secs / 2:
                self._slice_rows = min(2 * self._slice_rows, MOST_PREFILL_ROWS)
            elif elapsed > self._waves.step_secs and self._slice_rows > LEAST_PREFILL_ROWS:
                self._slice_rows = max(LEAST_PREFILL_ROWS, self._slice_rows // 2)
