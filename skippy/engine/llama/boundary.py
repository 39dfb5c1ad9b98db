"""Where the tap writes: into the caller's buffer, or beside it where rows come in another order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from skippy.engine.base import FloatArray, Segment

from .native import address_of
from .order import NativeCall


class BoundaryRows:
    """The boundary rows of one native decode on their way into ``output``.

    Args:
        call: the decode, with the order in which its rows are computed.
        segments: all segments of the batch, whose rows ``output`` takes in this order.
        output: the caller's buffer for all of them.
        width: f32 values per row.

    Attributes:
        address, nbytes: where the tap writes the rows, one behind another as they are computed.
    """

    def __init__(self, call: NativeCall, segments: Sequence[Segment], output: memoryview, width: int) -> None:
        starts = list(itertools.accumulate((segment.count for segment in segments), initial=0))
        self._places = [(starts[run.segment] + run.start, run.count) for run in call.runs]
        rows = sum(run.count for run in call.runs)
        self.nbytes = rows * width * 4
        self._scattered: FloatArray | None = None
        row = first = self._places[0][0]
        for start, count in self._places:
            if start != row:
                break
            row += count
        if row == first + rows:
            self.address = address_of(output) + first * width * 4
        else:
            self._output, self._width = output, width
            self._scattered = np.empty((rows, width), dtype=np.float32)
            self.address = int(self._scattered.ctypes.data)

    def deliver(self) -> None:
        """After the decode: every row is in its place in ``output``."""
        if self._scattered is None:
            return
        # As bytes: the caller's buffer need not be aligned for f32.
        source = self._scattered.view(np.uint8)
        target = np.frombuffer(self._output, dtype=np.uint8).reshape(-1, self._width * 4)
        row = 0
        for start, count in self._places:
            target[start : start + count] = source[row : row + count]
            row += count
