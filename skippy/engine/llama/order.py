"""Which segments share a native decode, and in which order llama.cpp computes their rows.

llama.cpp cuts a batch into ubatches. What it cuts along depends on the cache, and the boundary tap sees rows
in the order of the ubatches; logits come back in the order of the batch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

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
class Run:
    """Rows that are computed one after another: ``count`` rows of segment ``segment`` from row ``start``."""

    segment: int
    start: int
    count: int


@attrs.frozen(slots=True)
class NativeCall:
    """One ``llama_decode``.

    Attributes:
        segments: indices of the segments it carries, in the order they have in the native batch.
        runs: the order in which their rows are computed.
    """

    segments: Sequence[int]
    runs: Sequence[Run]


def plan_calls(segments: Sequence[Segment], order: RowOrder, n_ubatch: int) -> list[NativeCall]:
    """The native decodes for ``segments``: one, unless rows would come back in an order nobody can tell.

    Args:
        segments: at most one of each sequence.
        order: what the cache does.
        n_ubatch: rows that llama.cpp computes at once.
    """
    if order is RowOrder.BATCH or len(segments) == 1:
        whole = range(len(segments))
        return [NativeCall(whole, [Run(i, 0, segments[i].count) for i in whole])]
    ascending = sorted(range(len(segments)), key=lambda index: segments[index].sequence)
    if order is RowOrder.EQUAL:
        # llama.cpp takes one row more than fits where there are more sequences than rows of a ubatch.
        parts = [ascending[i : i + n_ubatch] for i in range(0, len(ascending), n_ubatch)]
        return [NativeCall(part, _equal_runs(segments, part, n_ubatch)) for part in parts]
    single = [index for index in ascending if segments[index].count == 1]
    parts = [single[i : i + n_ubatch] for i in range(0, len(single), n_ubatch)]
    parts += [[index] for index in ascending if segments[index].count > 1]
    return [NativeCall(part, [Run(i, 0, segments[i].count) for i in part]) for part in parts]


def _equal_runs(segments: Sequence[Segment], part: Sequence[int], n_ubatch: int) -> list[Run]:
    """The runs of ``llama_batch_allocr::split_equal`` with sequential ids, for ascending segments.

    A ubatch takes the first sequence that has rows left and those that follow it without a gap, and from each
    the same number of rows: as many as the shortest has left, as long as all of them fit.
    """
    runs: list[Run] = []
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
            runs.append(Run(index, done[index], count))
            done[index] += count
        left = [index for index in left if done[index] < segments[index].count]
    return runs
