"""In which chunks a token path was computed, and in which ones a request would compute it.

A row's numbers depend on the size of the chunk that it is in, so they are part of what is remembered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs


@attrs.frozen(slots=True)
class ChunkPlan:
    """The chunks of a request that restores nothing.

    Attributes:
        sizes: tokens of each, the last one's of all that follow.
        prefill: tokens that go in chunks, from the first one on; what follows goes one by one.
    """

    sizes: tuple[int, ...]
    prefill: int

    def __iter__(self) -> Iterator[int]:
        """Without an end."""
        left = self.prefill
        for size in itertools.chain(self.sizes, itertools.repeat(self.sizes[-1])):
            if left <= 0:
                break
            yield min(size, left)
            left -= size
        yield from itertools.repeat(1)

    def ends(self, limit: int) -> Iterator[int]:
        """Where its chunks end, up to ``limit`` tokens, ascending."""
        return itertools.takewhile(lambda end: end <= limit, itertools.accumulate(self))

    def shared(self, schedule: tuple[int, ...], limit: int) -> int:
        """How many of the first ``limit`` tokens of ``schedule`` are in whole chunks, all of them its own."""
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(schedule, self, strict=False))
        ends = itertools.accumulate(size for size, _ in alike)
        return max(itertools.takewhile(lambda end: end <= limit, ends), default=0)


def cut_schedule(schedule: tuple[int, ...], length: int) -> tuple[tuple[int, ...], bool]:
    """The chunks of the first ``length`` tokens, and whether these are whole chunks.

    Where they are not, the last one is counted by what is left of it, and computing it again may give other
    bits.
    """
    kept: list[int] = []
    for size in schedule:
        if length <= 0:
            break
        kept.append(min(size, length))
        length -= size
    return tuple(kept), length == 0
