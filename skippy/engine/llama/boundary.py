"""Between callers' buffers and the tap: which rows go where, and in which order.

The tap moves rows in the order in which they are computed, each node of a boundary for itself; callers have
them in the order of the batch, the nodes of a row one behind another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from skippy.engine.base import FloatArray, Segment
from skippy.engine.tap import Point
from skippy.models import BoundaryPart, SliceInfo

from .native import address_of
from .order import NativeCall


def tap_points(info: SliceInfo) -> list[Point]:
    """What the tap of a slice overwrites, then what it reads."""
    points = [Point(part.node, part.width * 4, writes=True) for part in info.inputs]
    return points + [Point(part.node, part.width * 4) for part in info.outputs]


class BoundaryRows:
    """The output rows of one native decode on their way into ``output``.

    Args:
        runs: (first row, rows) in ``output``, in the order in which they are computed.
        output: the caller's buffer for all rows of the batch.
        parts: the nodes, at least one.
    """

    __slots__ = ("_output", "_parts", "_rows", "_runs", "_scattered", "_width")

    def __init__(
        self, runs: Sequence[tuple[int, int]], output: memoryview, parts: Sequence[BoundaryPart]
    ) -> None:
        self._runs, self._output, self._parts = runs, output, parts
        self._width = sum(part.width for part in parts)
        self._rows = sum(count for _, count in runs)
        self._scattered: list[FloatArray] = []

    def targets(self) -> Iterator[tuple[int, int]]:
        """For each node the address and the bytes of where its rows go as they are computed."""
        if len(self._runs) == len(self._parts) == 1:
            yield address_of(self._output) + self._runs[0][0] * self._width * 4, self._rows * self._width * 4
            return
        for part in self._parts:
            rows = np.empty((self._rows, part.width), dtype=np.float32)
            self._scattered.append(rows)
            yield rows.ctypes.data, rows.nbytes

    def deliver(self) -> None:
        """After the decode: every row is in its place in ``output``."""
        if not self._scattered:
            return
        target = np.frombuffer(self._output, dtype=np.float32).reshape(-1, self._width)
        column = 0
        for rows in self._scattered:
            stop, row = column + rows.shape[1], 0
            for start, count in self._runs:
                target[start : start + count, column:stop] = rows[row : row + count]
                row += count
            column = stop


class InputRows:
    """The input rows of one native decode, where they overwrite nodes of the graph.

    Args:
        call: its runs are what llama.cpp computes one behind another.
        segments: all of the batch.
        parts: the nodes, at least one.

    Attributes:
        sources: for each node the address and the bytes of its rows, which live as long as this object.
    """

    __slots__ = ("_kept", "sources")

    def __init__(self, call: NativeCall, segments: Sequence[Segment], parts: Sequence[BoundaryPart]) -> None:
        buffers = [segment.activation for segment in segments if segment.activation is not None]
        self._kept: list[memoryview | FloatArray] = []
        self.sources: list[tuple[int, int]] = []
        if len(buffers) == len(parts) == 1:
            self._kept.append(buffers[0])
            self.sources.append((address_of(buffers[0]), buffers[0].nbytes))
            return
        width = sum(part.width for part in parts)
        rows = np.concatenate([np.frombuffer(buffer, dtype=np.float32) for buffer in buffers])
        rows = rows.reshape(-1, width)
        rows = np.concatenate([rows[start : start + count] for start, count in call.runs])
        column = 0
        for part in parts:
            own = np.ascontiguousarray(rows[:, column : column + part.width])
            column += part.width
            self._kept.append(own)
            self.sources.append((own.ctypes.data, own.nbytes))
