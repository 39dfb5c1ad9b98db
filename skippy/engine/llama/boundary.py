"""Where the tap writes: into the caller's buffer, or beside it where rows come in another order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from skippy.engine.base import FloatArray

from .native import address_of


class BoundaryRows:
    """The boundary rows of one native decode on their way into ``output``.

    Args:
        runs: (first row, rows) in ``output``, in the order in which they are computed.
        output: the caller's buffer for all rows of the batch.
        width: f32 values per row.

    Attributes:
        address, nbytes: where the tap writes the rows, one behind another as they are computed.
    """

    __slots__ = ("_output", "_runs", "_scattered", "_width", "address", "nbytes")

    def __init__(self, runs: Sequence[tuple[int, int]], output: memoryview, width: int) -> None:
        self._runs, self._output, self._width = runs, output, width
        self._scattered: FloatArray | None = None
        if len(runs) == 1:
            start, rows = runs[0]
            self.address = address_of(output) + start * width * 4
        else:
            rows = sum(count for _, count in runs)
            self._scattered = np.empty((rows, width), dtype=np.float32)
            self.address = self._scattered.ctypes.data
        self.nbytes = rows * width * 4

    def deliver(self) -> None:
        """After the decode: every row is in its place in ``output``."""
        if self._scattered is None:
            return
        size = self._width * 4
        source, target = self._scattered.data.cast("B"), self._output.cast("B")
        row = 0
        for start, count in self._runs:
            target[start * size : (start + count) * size] = source[row * size : (row + count) * size]
            row += count
