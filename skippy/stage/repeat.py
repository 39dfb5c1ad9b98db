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
        """Where the next frame belongs: as many bytes as one has."""

    def take(self, size: int) -> bool | None:
        """The buffer has ``size`` bytes. True: the step has begun. None: more of the frame has to come.

        False: they are not the next step, and for whoever else reads them.
        """


class RepeatedStep:
    """Frames from the stage before.

    Args:
        expected: the header of the step that was begun last.
        row_bytes: size of its activation.
        waves: whether ``seq_id`` names a wave.
    """

    def __init__(self, expected: StepHeader, row_bytes: int, waves: bool, again: Again) -> None:
        self.buffer = allocate(STEP_HEADER_BYTES + row_bytes)
        self._header, self._row = self.buffer[:STEP_HEADER_BYTES], self.buffer[STEP_HEADER_BYTES:]
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
        return True


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
