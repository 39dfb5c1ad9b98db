"""A ``llama_batch`` in numpy memory, filled anew for every native decode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from skippy.engine.base import FloatArray, Segment
from skippy.engine.checks import TokenArray

from .native import address_of, api


class _Fields(ctypes.Structure):
    """The fields of ``llama_batch`` that change; pointers are plain integers, which are quick to set."""

    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.c_void_p), ("embd", ctypes.c_void_p)]


class NativeBatch:
    """One reusable batch of at most ``rows`` rows, of any sequences.

    The struct points at this object's arrays, and for a single segment at the caller's own activation.

    Args:
        rows: rows the arrays are made for.
        width: f32 values per row that is fed as embeddings; 0 where token ids enter.
        position_sections: positions per activation row, all equal, section after section.
        all_outputs: flag every row as an output (a stage without a spare layer behind its boundary would
            otherwise drop rows before it).
    """

    def __init__(self, *, rows: int, width: int, position_sections: int, all_outputs: bool) -> None:
        self._counting = np.arange(rows, dtype=np.int32)
        self._sections = 1 if width == 0 else position_sections
        self._positions = np.zeros(rows * self._sections, dtype=np.int32)
        self._counts = np.ones(rows, dtype=np.int32)
        self._sequences = np.zeros(rows, dtype=np.int32)
        pointers = self._sequences.ctypes.data + 4 * np.arange(rows)
        self._sequence_pointers = pointers.astype(np.uintp)  # each row's cell of the array above
        self._all_outputs = all_outputs
        self._outputs = np.full(rows, all_outputs, dtype=np.int8)
        self._gathered: FloatArray = np.zeros(0, dtype=np.float32)
        self._tokens: TokenArray = np.zeros(0 if width else rows, dtype=np.int32)
        self._batch: Any = api.llama_batch()
        batch = self._batch
        batch.pos = ctypes.cast(self._positions.ctypes.data, type(batch.pos))
        batch.n_seq_id = ctypes.cast(self._counts.ctypes.data, type(batch.n_seq_id))
        batch.seq_id = ctypes.cast(self._sequence_pointers.ctypes.data, type(batch.seq_id))
        batch.logits = ctypes.cast(self._outputs.ctypes.data, type(batch.logits))
        self._fields = _Fields.from_buffer(batch)
        if not width:
            self._fields.token = self._tokens.ctypes.data

    def of_tokens(self, segments: Sequence[Segment], tokens: Sequence[TokenArray]) -> Any:
        """The batch for segments of token ids; valid until the next call.

        Without ``tokens`` all rows have the token they had before, by default 0: what becomes of it is going
        to be overwritten.
        """
        self._fill(segments)
        start = 0
        for ids in tokens:
            stop = start + len(ids)
            self._tokens[start:stop] = ids
            start = stop
        return self._batch

    def of_activations(self, segments: Sequence[Segment]) -> Any:
        """The batch for segments of activations; valid until the next call, while they live.

        A single segment is read in place if it is aligned for f32; else all are copied together.
        """
        self._fill(segments)
        buffers = [segment.activation for segment in segments if segment.activation is not None]
        address = address_of(buffers[0]) if len(buffers) == 1 else 1
        self._fields.embd = self._gather(buffers) if address % 4 else address
        return self._batch

    def _gather(self, buffers: Sequence[memoryview]) -> int:
        """Copy buffers one behind another; the address of the first."""
        size = sum(buffer.nbytes for buffer in buffers)
        if self._gathered.nbytes < size:
            self._gathered = np.empty(size // 4, dtype=np.float32)
        start, target = 0, self._gathered.data.cast("B")
        for buffer in buffers:
            stop = start + buffer.nbytes
            target[start:stop] = buffer
            start = stop
        return int(self._gathered.ctypes.data)

    def _fill(self, segments: Sequence[Segment]) -> None:
        total = sum(segment.count for segment in segments)
        self._fields.n_tokens = total
        positions = self._positions[: total * self._sections].reshape(self._sections, total)
        if total == len(segments):  # single rows: assigned at once
            self._sequences[:total] = [segment.sequence for segment in segments]
            positions[:] = [segment.position for segment in segments]
            if not self._all_outputs:
                self._outputs[:total] = [segment.logits for segment in segments]
            return
        start = 0
        for segment in segments:
            stop = start + segment.count
            self._sequences[start:stop] = segment.sequence
            positions[:, start:stop] = self._counting[: segment.count] + segment.position
            if not self._all_outputs:
                self._outputs[start : stop - segment.logits] = 0
                self._outputs[stop - segment.logits : stop] = 1
            start = stop
