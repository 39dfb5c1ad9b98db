"""Decode steps that are done again with the next token, without anything being made anew.

What a step needs, its frames, its work, its right to send, differs from the one before by a position and a
token. The engine streams a stage's weights through the caches for each step, so the code and the objects of a
frame's ordinary way are cold each time, and cost several times what they seem to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from skippy.protocol import (
    PREDICTION_BYTES,
    STEP_HEADER_BYTES,
    StepHeader,
    Wave,
    predicted_token,
    unpack_wave,
)

from .framing import allocate
from .runs import ChainRun

Again = Callable[[int, memoryview | None, Wave | None], bool]
"""Begins the step that executes a token, with its activation, in a wave.

False, and nothing has happened, where the step before it has not ended well."""


class Repeat(Protocol):
    """In the engine's thread: takes frames that are the next step, and nothing else."""

    @property
    def buffer(self) -> memoryview:
        """Where the next frame belongs: as many bytes as one has. Another one after each frame taken."""

    def take(self, size: int) -> bool | None:
        """The buffer has ``size`` bytes. True: the step has begun. None: more of the frame has to come.

        False: they are not the next step, and for whoever else reads them.
        """


class RepeatedStep:
    """Frames from the stage before.

    A step that was begun may still wait for its wave when its peer, which need not wait for the prediction,
    sends the next frame. So that is received into other memory than the row that the engine is to read: there
    are two buffers, and whoever begins a step has found the one before it over.

    Args:
        expected: the header of the step that was begun last.
        row_bytes: size of its activation.
        waves: whether ``seq_id`` names a wave.
    """

    def __init__(self, expected: StepHeader, row_bytes: int, waves: bool, again: Again) -> None:
        self._next, self._begun = _frame_memory(row_bytes), _frame_memory(row_bytes)
        self.buffer, self._header, self._row = self._next
        self._expected = expected
        self._waves = waves
        self._again = again
        expected.move_on(0)

    def take(self, size: int) -> bool | None:
        expected = self._expected
        if size < STEP_HEADER_BYTES or not expected.takes(self._header):
            return False
        if size < len(self.buffer):
            return None
        wave = unpack_wave(expected.seq_id) if self._waves else None
        if not self._again(expected.token, self._row or None, wave):
            return False
        expected.move_on(0)
        self._next, self._begun = self._begun, self._next
        self.buffer, self._header, self._row = self._next
        return True


def _frame_memory(row_bytes: int) -> tuple[memoryview, memoryview, memoryview]:
    """Room for one step's frame: all of it, its header, its row."""
    frame = allocate(STEP_HEADER_BYTES + row_bytes)
    return frame, frame[:STEP_HEADER_BYTES], frame[STEP_HEADER_BYTES:]


class RepeatedPrediction:
    """Predictions of the last stage, each of which the next step executes.

    Args:
        run: says whether a step follows, and reports the token.
        vocab_size: tokens are below it.
        report: called once a step has begun.
    """

    def __init__(self, run: ChainRun, vocab_size: int, report: Callable[[], object], again: Again) -> None:
        self.buffer = allocate(PREDICTION_BYTES)
        self._run = run
        self._vocab_size = vocab_size
        self._report = report
        self._again = again

    def take(self, size: int) -> bool | None:
        token = predicted_token(self.buffer) if size == PREDICTION_BYTES else None
        if token is None or not 0 <= token < self._vocab_size or not self._run.follows(token, None):
            return False
        if not self._again(token, None, None):
            self._run.undo()
            return False
        self._run.went_on(token)
        self._report()
        return True
