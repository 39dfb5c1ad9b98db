"""How far apart two sequences' states are."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from skippy.engine.base import EngineError

from .layout import Layout, Rows, Section

Cells = npt.NDArray[np.intp]


def largest_difference(
    first: memoryview, first_layout: Layout, second: memoryview, second_layout: Layout, length: int
) -> float:
    """Largest absolute difference of the values at positions below ``length``; 0.0 for equal bytes.

    Values are what attention reads: those of quantised types are dequantised, and llama.cpp may have rotated
    them before. Infinite where one side is not a number and the bytes differ. A position of a windowed cache
    that one side no longer holds is not compared.

    Raises:
        EngineError: the states are not of one model.
    """
    largest = 0.0
    for one, other in zip(first_layout.sections, second_layout.sections, strict=True):
        if len(one.rows) != len(other.rows):
            raise EngineError("the states to compare have different tensors")
        cells, other_cells = _common_cells(one, other, length)
        for rows, other_rows in zip(one.rows, other.rows, strict=True):
            if (rows.kind, rows.row_bytes) != (other_rows.kind, other_rows.row_bytes):
                raise EngineError("the states to compare have different tensors")
            left = _bytes_of(first, one, rows, cells)
            right = _bytes_of(second, other, other_rows, other_cells)
            differing = np.flatnonzero((left != right).any(axis=1))
            if differing.size:
                largest = max(largest, _distance(left[differing], right[differing], rows.kind))
    return largest


def _common_cells(one: Section, other: Section, length: int) -> tuple[Cells, Cells]:
    """Cells of either section that hold the same positions, in the order of the positions."""
    if one.recurrent:
        whole = np.arange(min(len(one.positions), len(other.positions)))
        return whole, whole
    positions, cells, other_cells = np.intersect1d(
        one.positions, other.positions, assume_unique=True, return_indices=True
    )
    wanted = positions < length
    return cells[wanted], other_cells[wanted]


def _bytes_of(body: memoryview, section: Section, rows: Rows, cells: Cells) -> npt.NDArray[np.uint8]:
    """Bytes of a tensor, shape ``[cells, row_bytes]``."""
    count = len(section.positions)
    data = np.frombuffer(body, np.uint8, count * rows.row_bytes, rows.start)
    if not rows.element_bytes:
        return data.reshape(count, rows.row_bytes)[cells]
    columns = data.reshape(-1, count, rows.element_bytes)[:, cells]
    return np.ascontiguousarray(columns.swapaxes(0, 1)).reshape(len(cells), rows.row_bytes)


def _distance(left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8], kind: int) -> float:
    type_ = GGMLQuantizationType(kind)
    one, other = (dequantize(values, type_).astype(np.float64) for values in (left, right))
    with np.errstate(invalid="ignore"):
        distance = np.where(one == other, 0.0, np.abs(one - other))
    found = float(distance.max())
    return math.inf if math.isnan(found) else found
