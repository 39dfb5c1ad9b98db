"""Cutting a model's layers into contiguous ranges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs


class PlanError(ValueError):
    """The layers cannot be cut as asked; says why."""


@attrs.frozen(slots=True)
class LayerRange:
    """Layers ``start`` to ``end - 1``, at least one."""

    start: int
    end: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise PlanError(f"layer range {self.start}:{self.end} is empty or negative")

    @property
    def count(self) -> int:
        return self.end - self.start

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``A:B``: layers A to B-1."""
        first, colon, second = text.partition(":")
        if not colon or not _is_number(first) or not _is_number(second):
            raise PlanError(
                f"{text!r} is no layer range; write START:END, for example 10:20 for layers 10 to 19"
            )
        return cls(int(first), int(second))

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"


def plan_even(layer_count: int, stages: int) -> list[LayerRange]:
    """Equal ranges; what does not divide goes to the first stages, one layer each.

    Raises:
        PlanError: no stage, or more stages than layers.
    """
    if stages < 1:
        raise PlanError(f"{stages} stages asked for; a chain has at least one")
    if stages > layer_count:
        raise PlanError(f"{stages} stages asked for, but the model has {layer_count} layers")
    base, remainder = divmod(layer_count, stages)
    ranges = []
    start = 0
    for index in range(stages):
        end = start + base + (index < remainder)
        ranges.append(LayerRange(start, end))
        start = end
    return ranges


def plan_splits(layer_count: int, splits: Sequence[int]) -> list[LayerRange]:
    """The ranges between given cuts: ``[10, 20]`` of 30 layers is 0:10, 10:20, 20:30.

    Raises:
        PlanError: cuts that are not ascending, or not inside the model.
    """
    if layer_count < 1:
        raise PlanError(f"the model has {layer_count} layers; there is nothing to cut")
    previous = 0
    for cut in splits:
        if not 0 < cut < layer_count:
            raise PlanError(
                f"cut {cut} is outside the model; with {layer_count} layers, cuts are 1 to {layer_count - 1}"
            )
        if cut <= previous:
            raise PlanError(f"cut {cut} comes after {previous}; cuts must ascend")
        previous = cut
    edges = [0, *splits, layer_count]
    return [LayerRange(start, end) for start, end in pairwise(edges)]


def parse_splits(text: str) -> list[int]:
    """Read ``"10,20"``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_number(part) for part in parts):
        raise PlanError(f"{text!r} is no list of cuts; write layer numbers with commas, for example 10,20")
    return [int(part) for part in parts]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
