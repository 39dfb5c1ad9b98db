"""Which segments share a native decode, and in which order llama.cpp computes their rows.

llama.cpp cuts a batch into ubatches. What it cuts along depends on the cache, and the boundary tap sees rows
in the order of the ubatches; logits come back in the order of the batch.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence

import attrs

from skippy.engine.base import Segment


class RowOrder(enum.Enum):
    """How llama.cpp orders the rows of a batch of several sequences (``init_batch`` of its memories)."""

    BATCH = enum.auto()
    """One pool of cells: consecutive rows, ``n_ubatch`` at a time (``split_simple``)."""
    EQUAL = enum.auto()
    """A cache per sequence: equally many rows of sequences with consecutive ids (``split_equal``)."""
    UNKNOWN = enum.auto()
    """Recurrent and hybrid models, and windowed caches that may run out of cells and then split otherwise.
    Rows of sequences with ascending ids, one of each, keep their order all the same."""


@attrs.frozen(slots=True)
class NativeCall:
    """One ``llama_decode``.

    Attributes:
        segments: indices of the segments it carries, in the order they have in the native batch.
        runs: (first row, rows) of the whole batch, in the order in which they are computed; what follows
            upon each other is one run.
    """

    segments: Sequence[int]
    runs: Sequence[tuple[int, int]]


def plan_calls(segments: Sequence[Segment], order: RowOrder, n_ubatch: int) -> list[NativeCall]:
    """The native decodes for ``segments``: one, unless rows would come back in an order nobody can tell.

    Args:
        segments: at most one of each sequence.
        order: what the cache does.
        n_ubatch: rows that llama.cpp computes at once.
    """
    total = sum(segment.count for segment in segments)
    if order is RowOrder.BATCH or len(segments) == 1:
        return [NativeCall(range(len(segments)), [(0, total)])]
    starts = list(itertools.accumulate((segment.count for segment in segments), initial=0))
    ascending = sorted(range(len(segments)), key=lambda index: segments[index].sequence)
    alone: list[int] = []
    if order is RowOrder.UNKNOWN:
        alone = [index for index in ascending if segments[index].count > 1]
        ascending = [index for index in ascending if segments[index].count == 1]
    calls = []
    # llama.cpp takes one row more than fits where there are more sequences than rows of a ubatch.
    for first in range(0, len(ascending), n_ubatch):
        part = ascending[first : first + n_ubatch]
        if total == len(segments) or order is RowOrder.UNKNOWN:
            runs = _joined((starts[index], 1) for index in part)
        else:
            runs = _joined(_equal_runs(segments, part, starts, n_ubatch))
        calls.append(NativeCall(part, runs))
    return calls + [NativeCall([index], [(starts[index], segments[index].count)]) for index in alone]


def _equal_runs(
    segments: Sequence[Segment], part: Sequence[int], starts: Sequence[int], n_ubatch: int
) -> Iterable[tuple[int, int]]:
    """The runs of ``llama_batch_allocr::split_equal`` with sequential ids, for ascending segments.

    A ubatch takes the first sequence that has rows left and those that follow it without a gap, and from each
    the same number of rows: as many as the shortest has left, as long as all of them fit.
    """
    left = list(part)
    done = dict.fromkeys(part, 0)
    while left:
        group = [left[0]]
        for index in left[1:]:
            if segments[index].sequence == segments[group[-1]].sequence + 1:
                group.append(index)
        count = min(segments[index].count - done[index] for index in group)
        count = min(count, max(1, n_ubatch // len(group)))
        for index in group:
            yield starts[index] + done[index], count
            done[index] += count
        left = [index for index in left if done[index] < segments[index].count]


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, count in runs:
        if joined and start == sum(joined[-1]):
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((start, count))
    return joined
