"""What crosses a cut: named nodes of the compute graph, and how many f32 values of each a row has."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

MOST_PARTS = 32
"""Nodes that one boundary may consist of."""
MOST_VALUES = 1 << 22
"""Values of one row."""
_PART = re.compile(r"([^:,\x00-\x20]{1,63}):([1-9]\d{0,6})")


@attrs.frozen(slots=True)
class BoundaryPart:
    """One node of a boundary. The parts of a row follow upon each other.

    Attributes:
        node: its whole name, numbered as in the slice.
        width: f32 values per row.
    """

    node: str
    width: int


def format_parts(parts: Sequence[BoundaryPart]) -> str:
    """As a slice's metadata has it: ``node:width,node:width``."""
    return ",".join(f"{part.node}:{part.width}" for part in parts)


def parse_parts(text: str) -> tuple[BoundaryPart, ...]:
    """The parts that :func:`format_parts` wrote. Raises ValueError for anything else."""
    if not text:
        return ()
    parts: list[BoundaryPart] = []
    for piece in text.split(",", MOST_PARTS):
        match = _PART.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece[:80]!r} is not NODE:WIDTH")
        parts.append(BoundaryPart(match[1], int(match[2])))
    if len(parts) > MOST_PARTS or total_width(parts) > MOST_VALUES:
        raise ValueError(f"a boundary has at most {MOST_PARTS} parts and {MOST_VALUES} values per row")
    return tuple(parts)


def total_width(parts: Sequence[BoundaryPart]) -> int:
    """Values of a row."""
    return sum(part.width for part in parts)
