"""A ``llama_batch`` in numpy memory, filled for one segment at a time."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from skippy.engine.base import Segment
from skippy.engine.checks import TokenArray

from .native import address_of, api


class NativeBatch:
    """One reusable batch of at most ``rows`` rows, all of one sequence.

    The struct points at this object's arrays, and for activations at the caller's own buffer.

    Args:
        rows: rows the arrays are made for.
        width: f32 values per activation row; 0 where token ids enter.
        position_sections: positions per activation row, all equal, section after section.
        all_outputs: flag every row as an output (a stage without a spare layer behind its boundary would
            otherwise drop rows before it).
    """

    def __init__(self, *, rows: int, width: int, position_sections: int, all_outputs: bool) -> None:
        self._counting = np.arange(rows, dtype=np.int32)
        self._sections = 1 if width == 0 else position_sections
        self._positions = np.zeros(rows * self._sections, dtype=np.int32)
        self._counts = np.ones(rows, dtype=np.int32)
        self._sequence = np.zeros(1, dtype=np.int32)
        self._sequences = np.full(rows, self._sequence.ctypes.data, dtype=np.uintp)  # all rows: the same cell
        self._all_outputs = all_outputs
        self._outputs = np.full(rows, all_outputs, dtype=np.int8)
        self._aligned = np.zeros(0, dtype=np.float32)
        self._row_bytes = width * 4
        self._batch: Any = api.llama_batch()
        batch = self._batch
        batch.pos = ctypes.cast(self._positions.ctypes.data, type(batch.pos))
        batch.n_seq_id = ctypes.cast(self._counts.ctypes.data, type(batch.n_seq_id))
        batch.seq_id = ctypes.cast(self._sequences.ctypes.data, type(batch.seq_id))
        batch.logits = ctypes.cast(self._outputs.ctypes.data, type(batch.logits))
        self._token_pointer, self._row_pointer = type(batch.token), type(batch.embd)

    def of_tokens(self, segment: Segment, tokens: TokenArray) -> Any:
        """The batch for a segment of token ids; valid until the next call, while ``tokens`` lives."""
        self._fill(segment)
        self._batch.token = ctypes.cast(tokens.ctypes.data, self._token_pointer)
        return self._batch

    def of_activation(self, segment: Segment) -> Any:
        """The batch for a segment of activations. They are read in place if aligned for f32, else copied."""
        assert segment.activation is not None
        self._fill(segment)
        address = address_of(segment.activation)
        if address % 4:
            self._aligned = np.frombuffer(bytearray(segment.activation), dtype=np.float32)
            address = self._aligned.ctypes.data
        self._batch.embd = ctypes.cast(address, self._row_pointer)
        return self._batch

    def _fill(self, segment: Segment) -> None:
        count = segment.count
        self._batch.n_tokens = count
        self._sequence[0] = segment.sequence
        if self._sections == 1:
            np.add(self._counting[:count], segment.position, out=self._positions[:count])
        else:
            rows = self._positions[: count * self._sections].reshape(self._sections, count)
            rows[:] = self._counting[:count] + segment.position
        if not self._all_outputs:
            self._outputs[: count - segment.logits] = 0
            self._outputs[count - segment.logits : count] = 1
