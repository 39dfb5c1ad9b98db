"""How many cells of a shared pool are taken, which llama.cpp knows but does not say."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.define(slots=True, eq=False)
class _Run:
    """Cells of consecutive positions that several sequences hold: of each, the first so many."""

    held: dict[int, int]

    @property
    def cells(self) -> int:
        return max(self.held.values())


class CellPool:
    """Counts the cells of a unified cache, in which copies share the cells of their source.

    A sequence holds the beginnings of some runs, one after the other, and behind them cells of its own.

    Args:
        cells: size of the pool.
        lengths: positions of each sequence, changed by the caller; what a sequence grows by is its own.
    """

    def __init__(self, cells: int, lengths: Sequence[int]) -> None:
        self._cells = cells
        self._lengths = lengths
        self._runs: dict[int, list[_Run]] = {}

    @property
    def free(self) -> int:
        """Cells that nobody holds."""
        runs = {id(run): run for held in self._runs.values() for run in held}
        own = sum(self._lengths) - sum(sum(run.held.values()) for run in runs.values())
        return self._cells - own - sum(run.cells for run in runs.values())

    def copied(self, source: int, target: int, count: int) -> None:
        """``target`` now holds the first ``count`` cells of ``source``; both lengths are still as before."""
        runs = self._runs.setdefault(source, [])
        own = self._lengths[source] - sum(run.held[source] for run in runs)
        if own:
            runs.append(_Run({source: own}))
        shared = self._runs[target] = []
        for run in runs:
            part = min(run.held[source], count)
            if part:
                run.held[target] = part
                shared.append(run)
                count -= part

    def shortened(self, sequence: int, length: int) -> None:
        """The sequence holds ``length`` positions, fewer than before."""
        kept: list[_Run] = []
        for run in self._runs.pop(sequence, ()):
            part = min(run.held.pop(sequence), length)
            if part:
                run.held[sequence] = part
                kept.append(run)
                length -= part
        if kept:
            self._runs[sequence] = kept
