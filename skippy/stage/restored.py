"""A prefix that was found in the cache, on its way into a session."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from skippy.engine import EngineError, StageEngine
from skippy.kv.entries import Match
from skippy.kv.schedule import cut_schedule

from .states import KvEntry, State


class RestoreFailed(Exception):
    """A prefix that was found could not be restored: the request goes on without it."""


@attrs.define(slots=True, eq=False)
class Copy:
    """A copy of the first ``length`` positions of a sequence: an engine call, and what has come of it."""

    source: int
    target: int
    length: int
    error: Exception | None = None

    def __call__(self, engine: StageEngine) -> None:
        try:
            engine.copy(self.source, self.target, self.length)
        except (EngineError, ValueError) as exc:
            self.error = exc


@attrs.define(slots=True, eq=False)
class Restored:
    """A prefix in a sequence that is a session's own, and no row behind it yet.

    Attributes:
        held: the tokens that were found; the sequence may hold more. ``schedule`` and ``alone`` say how they
            were computed, as :class:`Entry` has it.
        entry: the session's entry in the index, where the sequence was taken out of it; None: it is a copy.
        length: how many of them the session uses.
        copy: what fills the sequence, until :meth:`StageCache.complete`; None: nothing has to.
    """

    sequence: int
    held: Sequence[int]
    entry: KvEntry | None
    _schedule: tuple[int, ...]
    _alone: bool
    length: int
    copy: Copy | None = None

    @classmethod
    def of(cls, match: Match[State], sequence: int, entry: KvEntry | None = None) -> Restored:
        """What was found, in ``sequence``; ``entry`` as in the attributes."""
        source, length = match.entry, match.length
        schedule, whole = cut_schedule(source.schedule, length)
        return cls(sequence, source.tokens[:length], entry, schedule, source.alone and whole, length)

    @property
    def tokens(self) -> Sequence[int]:
        """What the session uses."""
        return self.held[: self.length]

    @property
    def schedule(self) -> tuple[int, ...]:
        return cut_schedule(self._schedule, self.length)[0]

    @property
    def alone(self) -> bool:
        return self._alone and cut_schedule(self._schedule, self.length)[1]
