"""Decode groups and their waves: who decodes together at stage 0, and how long later stages wait for rows.

The rows of one group that stage 0 computes in one native batch are a *wave* (:mod:`skippy.protocol.waves`).
Pure policy: no event loop and no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from .ring_model import RingModel

S = TypeVar("S", bound=Hashable)

MIN_GAIN: Final = 0.05
"""What another number of groups must promise in tokens per second, as a part of the present ones."""
SETTLE_CYCLES: Final = 8
"""Waves of each group between two changes of the number of groups."""
MEASURED_RINGS: Final = 4
"""Rings of the present batch size before its figures are used."""
INDIFFERENT: Final = 0.01
"""Of groupings whose predicted rates differ by less than this, the one with fewer groups is better."""


def balanced(sessions: int, groups: int) -> list[int]:
    """Sizes of ``groups`` groups of ``sessions``, larger ones first; they differ by at most one."""
    size, more = divmod(sessions, groups)
    return [size + 1] * more + [size] * (groups - more)


class DecodeGroups(Generic[S]):
    """Keeps decoding sessions in groups, and chooses how many groups there are.

    The number is the one with the most tokens per second by :class:`~skippy.stage.ring_model.RingModel`, fed
    with what stage 0 measures. It grows to at most its double at a time, because predictions for
    batches far from those measured are guesses, changes only for MIN_GAIN, and only after SETTLE_CYCLES.

    A session belongs to one group from :meth:`join` to :meth:`leave`. It moves to another one only inside
    :meth:`between_waves`, while it has no row under way, so that no wave ever changes under way.

    Args:
        stages: of the chain, at least 1.
        count: a number of groups that stays, as far as there are sessions; None: chosen as above.
    """

    def __init__(self, stages: int, count: int | None = None) -> None:
        self._model = RingModel(stages)
        self._fixed = count
        self._wanted = 1 if count is None else count
        self._group: dict[S, int] = {}
        self._sizes: Counter[int] = Counter()
        self._rings = 0
        self._measured = 0

    @property
    def count(self) -> int:
        """How many groups there are to be: 1 to the number of sessions."""
        return max(1, min(self._wanted, len(self._group)))

    def __len__(self) -> int:
        """Sessions in all groups."""
        return len(self._group)

    def __contains__(self, session: S) -> bool:
        return session in self._group

    def group_of(self, session: S) -> int:
        """The group of a session. KeyError if it has not joined."""
        return self._group[session]

    def size(self, group: int) -> int:
        """Sessions in a group: the rows of its next wave, if none joins, moves or leaves."""
        return self._sizes[group]

    def join(self, session: S) -> int:
        """A session begins to decode; returns its group. ValueError if it has joined before."""
        if session in self._group:
            raise ValueError(f"session {session!r} decodes already, in group {self._group[session]}")
        self._group[session] = -1  # counted, so that a group of its own may be its place
        group = self._smallest()
        self._group[session] = group
        self._sizes[group] += 1
        self._measured = 0
        return group

    def leave(self, session: S) -> None:
        """A session decodes no more, also with a row under way. KeyError if it had not joined."""
        self._sizes[self._group.pop(session)] -= 1
        if self._fixed is None:
            self._wanted = self.count
        self._measured = 0

    def between_waves(self, session: S) -> int:
        """A session's row is back and its next one not under way; returns the group of the next one.

        Here, and only here, sessions move: out of groups that are no more, and from large to small ones.
        """
        group, other = self._group[session], self._smallest()
        if group >= self.count or self._sizes[group] > self._sizes[other] + 1:
            self._sizes[group] -= 1
            self._sizes[other] += 1
            self._group[session] = group = other
        return group

    def _smallest(self) -> int:
        return min(range(self.count), key=lambda group: self._sizes[group])

    def observe_step(self, batch_size: int, seconds: float) -> None:
        """Stage 0 has computed a wave: one native batch of decode rows alone, which took so long."""
        self._model.observe_step(self.count, batch_size, seconds)

    def observe_ring(self, batch_size: int, seconds: float) -> None:
        """A wave is back, so long after stage 0 sent it: when its last prediction came.

        Leave out waves that shared a stage with prefill, if that is known. Changes :attr:`count` at times.
        """
        self._rings += 1
        if self._rings <= 2 * self.count or self._fixed is not None:
            return  # the first waves after a change still queue as they did before
        sizes = balanced(len(self._group), self.count) if self._group else []
        if sizes and batch_size == sizes[0]:
            self._measured += 1
            self._model.observe_ring(sizes, seconds)
            if self._rings >= SETTLE_CYCLES * self.count and self._measured >= MEASURED_RINGS:
                self._choose()

    def _choose(self) -> None:
        sessions, count = len(self._group), self.count
        rates = {
            groups: self._model.rate(balanced(sessions, groups))
            for groups in range(1, min(sessions, 2 * count) + 1)
        }
        best = max(rates.values())
        groups = next(each for each, rate in rates.items() if rate >= best * (1 - INDIFFERENT))
        if rates[groups] > rates[count] * (1 + MIN_GAIN):
            self._wanted = groups
            self._rings = 0
            self._measured = 0
