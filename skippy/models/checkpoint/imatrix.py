"""Importance matrices: how much each input of a tensor matters, from a file of llama.cpp's ``llama-imatrix``.

Two formats. In a GGUF, ``NAME.in_sum2`` has sums of squares and ``NAME.counts`` how many were summed, one for
each expert. The older format is a list of (name, calls, values). Only places are kept; values are read when a
tensor is quantised.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import numpy as np
from gguf import GGMLQuantizationType

from skippy.models.errors import CheckpointError, show
from skippy.models.gguf import GGUFHeader
from skippy.models.reading import Cursor, FileStamp, open_regular

from .tensors import Floats

MAX_ENTRIES: Final = 1 << 17
MAX_COUNTS: Final = 1 << 20  # one for each expert of each tensor; the largest real ones have some 70 000
_MAX_NAME: Final = 512
_SUMS, _COUNTS = ".in_sum2", ".counts"


@attrs.frozen(slots=True)
class Entry:
    """Place of one tensor's importance: ``size`` F32 values at ``offset``, to be divided.

    Attributes:
        counts: divisors of equal parts of the values, or one for all.
    """

    offset: int
    size: int
    counts: tuple[float, ...]


@attrs.frozen(slots=True, eq=False)
class ImportanceMatrix:
    """An opened file: entries by tensor."""

    stamp: FileStamp
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, path: Path) -> ImportanceMatrix:
        """Read where everything is.

        Raises:
            CheckpointError, GGUFError: missing, damaged, or no importance matrix.
        """
        fd = open_regular(path)
        try:
            stamp = FileStamp.of(path, os.fstat(fd))
            if os.pread(fd, 4, 0) == b"GGUF":
                entries = dict(_gguf_entries(GGUFHeader.read(path), fd))
            else:
                entries = dict(_listed_entries(Cursor(path, fd, stamp.size)))
        finally:
            os.close(fd)
        if not entries:
            raise CheckpointError(path, "is no importance matrix: it has no entries")
        return cls(stamp, entries)

    def values(self, name: str, size: int | None = None) -> Floats | None:
        """The importance of a tensor's inputs, expert after expert; None where the file has none.

        Args:
            size: how many are wanted; others, which only the embedding may have, are not read: llama.cpp
                does without them. None: any.

        Raises:
            CheckpointError: values that are not finite.
        """
        entry = self.entries.get(name)
        if entry is None or size not in (None, entry.size):
            return None
        fd = self.stamp.open()
        try:
            sums = np.frombuffer(os.pread(fd, 4 * entry.size, entry.offset), "<f4")
        finally:
            os.close(fd)
        parts = sums.reshape(len(entry.counts), -1)
        counts = np.asarray(entry.counts, np.float32)[:, None]
        out = np.where(counts > 0, parts / np.where(counts > 0, counts, 1), np.float32(1))
        if not np.isfinite(out).all():
            raise CheckpointError(self.stamp.path, f"the importance of {show(name)} is not finite everywhere")
        return np.ascontiguousarray(out.reshape(-1), np.float32)


def _gguf_entries(header: GGUFHeader, fd: int) -> Iterator[tuple[str, Entry]]:
    total = 0
    for key, sums in header.tensors.items():
        if not key.endswith(_SUMS):
            continue
        name = key.removesuffix(_SUMS)
        counts = header.tensors.get(name + _COUNTS)
        kinds = {sums.type} | (set() if counts is None else {counts.type})
        if counts is None or kinds != {GGMLQuantizationType.F32} or sums.elements % counts.elements:
            raise CheckpointError(header.path, f"damaged: no F32 counts that fit the sums of {show(name)}")
        total += counts.elements
        if total > MAX_COUNTS:
            raise CheckpointError(header.path, f"damaged: has over {MAX_COUNTS} counts, which is the limit")
        numbers = np.frombuffer(os.pread(fd, counts.nbytes, counts.offset), "<f4")
        if not np.isfinite(numbers).all():
            raise CheckpointError(header.path, f"damaged: counts of {show(name)} are not finite")
        yield name, Entry(sums.offset, sums.elements, tuple(float(round(n)) for n in numbers.tolist()))


def _listed_entries(cursor: Cursor) -> Iterator[tuple[str, Entry]]:
    def number(what: str, low: int, high: int) -> int:
        value: int = struct.unpack("<i", cursor.take(4, what))[0]
        if not low <= value <= high:
            raise CheckpointError(
                cursor.path, f"no importance matrix, or damaged: {what} is {value}, expected {low} to {high}"
            )
        return value

    for _ in range(number("the number of entries", 1, MAX_ENTRIES)):
        name = cursor.take(number("the length of a name", 1, _MAX_NAME), "a name").decode("utf-8", "replace")
        calls = number(f"the calls of {show(name)}", -(1 << 31), (1 << 31) - 1)
        size = number(f"the values of {show(name)}", 1, (1 << 31) - 1)
        offset = cursor.position
        cursor.skip(4 * size, f"the values of {show(name)}")
        yield name, Entry(offset, size, (float(calls) if calls > 0 else 1.0,))
