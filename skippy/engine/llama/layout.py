"""Where things are in llama.cpp's state of one sequence: cells, and the rows of each tensor.

The format is that of ``state_write`` of ``llama_kv_cache`` and ``llama_memory_recurrent`` in the release that
llama-cpp-python ships: two words, then one section per cache (a second one for sliding-window layers), then
one of recurrent state. It says neither how many sections there are nor whether a cache has V tensors (MLA has
none) and what it notes of each cell, so what fits to the last byte is what it is.
"""

from __future__ import annotations

import itertools
import struct
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

PREFIX_BYTES: Final = 8
"""What comes before the sections: a magic number, the sequence id."""

MAGIC: Final = 0xAF143CD8
_MOST_SECTIONS: Final = 4
_MOST_STREAMS: Final = 256
_MOST_LAYERS: Final = 4096
_CELL_WORDS: Final = (3, 6)  # position, sequences, [x, y, token with M-RoPE and the like,] sequence
_F32: Final = 0


@attrs.frozen(slots=True)
class Rows:
    """One tensor's part of a section: a row for each cell, in the order of the cells.

    Attributes:
        kind: enum ggml_type.
        header: offset of what describes the tensor; the data follows at ``start``.
        start: offset of the data.
        row_bytes: bytes per cell.
        element_bytes: 0, or, for V without flash attention, bytes per value: the tensor is transposed then
            (first values of all cells, second values of all cells, …).
    """

    kind: int
    header: int
    start: int
    row_bytes: int
    element_bytes: int = 0


@attrs.frozen(slots=True, eq=False)
class Section:
    """One cache.

    Attributes:
        start, end: offsets of its first byte and behind its last.
        count_at: offset of the number of cells (attention caches).
        positions: int32, of each cell.
        cell_words: 4-byte words per cell.
        rows: its tensors; empty without cells.
        recurrent: one row is the state after the last position, not that of one position.
    """

    start: int
    end: int
    count_at: int
    positions: npt.NDArray[np.int32]
    cell_words: int
    rows: tuple[Rows, ...]
    recurrent: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell in all tensors."""
        return sum(rows.row_bytes for rows in self.rows)


@attrs.frozen(slots=True, eq=False)
class Layout:
    """The sections of a state, in order, and how many streams its caches have."""

    sections: tuple[Section, ...]
    streams: int

    @classmethod
    def of(cls, body: memoryview, *, recurrent: bool) -> Layout | None:
        """The layout of native state, or None if it is none that this module knows, or damaged.

        ``recurrent`` says whether there may be recurrent state. Works on any bytes.
        """
        if len(body) < PREFIX_BYTES + 4 or struct.unpack_from("<I", body)[0] != MAGIC:
            return None
        found = _sections(body, PREFIX_BYTES, recurrent, _MOST_SECTIONS)
        if found is None:
            return None
        streams = 1
        if not found[0].recurrent:
            (streams,) = struct.unpack_from("<I", body, PREFIX_BYTES)
        return cls(tuple(found), streams)


class _Mismatch(Exception):
    pass


def _sections(body: memoryview, offset: int, recurrent: bool, most: int) -> list[Section] | None:
    """The sections from ``offset`` to the end of the body, at most ``most``."""
    if offset == len(body):
        return []
    if not most:
        return None
    if recurrent:
        try:
            return [_recurrent(body, offset)]
        except (_Mismatch, struct.error):
            pass
    for cell_words, has_values in itertools.product(_CELL_WORDS, (True, False)):
        try:
            section = _attention(body, offset, cell_words, has_values)
        except (_Mismatch, struct.error):
            continue
        rest = _sections(body, section.end, recurrent, most - 1)
        if rest is not None:
            return [section, *rest]
        if not section.positions.size:
            break  # there is nothing to be mistaken about
    return None


def _check(fits: bool) -> None:
    if not fits:
        raise _Mismatch


def _attention(body: memoryview, start: int, cell_words: int, has_values: bool) -> Section:
    (streams,) = struct.unpack_from("<I", body, start)
    _check(1 <= streams <= _MOST_STREAMS)
    offset, found = start + 4, None
    for _ in range(streams):
        (count,) = struct.unpack_from("<I", body, offset)
        if count:
            _check(found is None)  # a sequence is in one stream
            found = offset
            offset, positions = _cells(body, offset + 4, count, cell_words)
            offset, rows = _tensors(body, offset, count, has_values)
        else:
            offset += 4
    if found is None:
        return Section(start, offset, start + 4, np.zeros(0, np.int32), cell_words, ())
    return Section(start, offset, found, positions, cell_words, rows)


def _cells(body: memoryview, offset: int, count: int, words: int) -> tuple[int, npt.NDArray[np.int32]]:
    end = offset + count * words * 4
    _check(end <= len(body))
    cells = np.frombuffer(body, "<i4", count * words, offset).reshape(count, words)
    _check(bool((cells[:, 1] == 1).all() and (cells[:, -1] == cells[0, -1]).all()))
    return end, cells[:, 0]


def _tensors(body: memoryview, offset: int, count: int, has_values: bool) -> tuple[int, tuple[Rows, ...]]:
    transposed, layers = struct.unpack_from("<II", body, offset)
    _check(transposed <= 1 and layers <= _MOST_LAYERS)
    offset += 8
    found: list[Rows] = []
    for is_values in (False, True) if has_values else (False,):
        for _ in range(layers):
            if is_values and transposed:
                kind, element, width = struct.unpack_from("<iII", body, offset)
                rows = Rows(kind, offset, offset + 12, element * width, element)
                _check(element > 0)
            else:
                kind, row_bytes = struct.unpack_from("<iQ", body, offset)
                rows = Rows(kind, offset, offset + 12, row_bytes)
            offset = rows.start + count * rows.row_bytes
            _check(offset <= len(body))
            found.append(rows)
    return offset, tuple(found)


def _recurrent(body: memoryview, start: int) -> Section:
    """Recurrent state, which is always last: one cell at most, then tensors up to the end."""
    (count,) = struct.unpack_from("<I", body, start)
    _check(count <= 1)
    offset = start + 4
    cells = np.frombuffer(body, "<i4", 2 * count, offset).reshape(count, 2)
    _check(not cells[:, 1].any())
    offset += cells.nbytes
    transposed, layers = struct.unpack_from("<II", body, offset)
    _check(transposed == 0 and layers <= _MOST_LAYERS)
    offset += 8
    found: list[Rows] = []
    while offset < len(body):
        kind, row_bytes = struct.unpack_from("<iQ", body, offset)
        rows = Rows(kind, offset, offset + 12, row_bytes)
        offset = rows.start + count * row_bytes
        _check(kind == _F32 and offset <= len(body) and len(found) < 2 * layers)
        found.append(rows)
    return Section(start, offset, start, cells[:, 0], 2, tuple(found), recurrent=True)
