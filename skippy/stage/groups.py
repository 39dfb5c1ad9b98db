"""Decode groups: which sessions stage 0 computes together, and how many groups there are.

The rows of one group that stage 0 computes in one native batch are a *wave* (:mod:`skippy.protocol.waves`).
Pure policy: no event loop and no clock of its own.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Final

from .ring_model import Division, RingModel

MIN_GAIN: Final = 0.05
"""What another number of groups must promise in tokens per second, as a part of the present ones."""
UNPROVEN: Final = 0.9
"""What a promise counts that was not measured."""
SETTLE_CYCLES: Final = 8
"""Waves of each group between two changes of the number of groups."""
REVIEW_CYCLES: Final = 2
"""Waves of each group after which a number of groups that has settled is reconsidered."""
TRIAL_CYCLES: Final = 4 * SETTLE_CYCLES
"""Waves of each group after which a neighbouring number of groups is tried, if it has not been for long: what
is said of it may come from a time when the chain had something else to do."""
MEASURED_RINGS: Final = 4
"""Rings of the present batch size before its figures are used."""
WORTH_A_TRIAL: Final = 0.75
"""What a number of groups must promise to be tried, as a part of the present tokens per second."""
INDIFFERENT: Final = 0.01
"""Of groupings whose predicted rates differ by less than this, the one with fewer groups is better."""


class DecodeGroups:
    """Keeps decoding sessions in groups, and chooses how many groups there are.

    The number is the one that promises most tokens per second by what stage 0 measures: see
    :class:`~skippy.stage.ring_model.RingModel`. It changes only for MIN_GAIN and after SETTLE_CYCLES, and at
    most doubles at once, because predictions for batches far from those measured are guesses. There is one
    for 1, 2, 3 to 4, 5 to 8 sessions and so on: while few are left at the end of many, nothing is forgotten.

    Sessions are known by their native sequence ids, and dealt to groups by the rank of these: neighbours
    together, sizes that differ by at most one. One belongs to a group from :meth:`join` to :meth:`leave`; it
    moves to another one only inside :meth:`between_waves`, while it has no row under way.

    Args:
        stages: of the chain, at least 1.
        count: a number of groups that stays, as far as there are sessions; None: chosen as above.
        width: how many stages can compute at the same time, as far as is known; None: all.
    """

    def __init__(self, stages: int, count: int | None = None, *, width: int | None = None) -> None:
        self._model = RingModel(stages, width)
        self._fixed = count
        self._wanted = {0: 1 if count is None else count}
        self._size_class = 0
        self._group: dict[int, int] = {}
        self._order: list[int] = []
        self._sizes: Counter[int] = Counter()
        self._rings = 0
        self._due = SETTLE_CYCLES
        self._sent: dict[int, Division] = {}
        self._measured: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """How many groups there are to be: 1 to the number of sessions."""
        return max(1, min(self._wanted[self._size_class], len(self._order)))

    def __len__(self) -> int:
        """Sessions in all groups."""
        return len(self._group)

    def __contains__(self, session: int) -> bool:
        return session in self._group

    def group_of(self, session: int) -> int:
        """The group of a session. KeyError if it has not joined."""
        return self._group[session]

    def size(self, group: int) -> int:
        """Sessions in a group: the rows of its next wave, if none joins, moves or leaves."""
        return self._sizes[group]

    def join(self, session: int) -> int:
        """A session begins to decode; returns its group. ValueError if it has joined before."""
        if session in self._group:
            raise ValueError(f"session {session!r} decodes already, in group {self._group[session]}")
        bisect.insort(self._order, session)
        self._resize()
        self._group[session] = group = self._place(session)
        self._sizes[group] += 1
        return group

    def leave(self, session: int) -> None:
        """A session decodes no more; a row of it may be under way. KeyError if it has not joined."""
        self._sizes[self._group.pop(session)] -= 1
        self._order.remove(session)
        self._resize()

    def between_waves(self, session: int) -> int:
        """A session's row is back and its next one not under way; returns the group of the next one.

        Only here do sessions move: when there are to be more or fewer groups, or others have come or gone.
        KeyError if it has not joined.
        """
        group, place = self._group[session], self._place(session)
        if group != place:
            self._sizes[group] -= 1
            self._sizes[place] += 1
            self._group[session] = place
        return place

    def _place(self, session: int) -> int:
        """Neighbours go together: engines compute sequences with consecutive ids faster than others."""
        return bisect.bisect_left(self._order, session) * self.count // len(self._order)

    def observe_step(self, batch_size: int, seconds: float) -> None:
        """Stage 0 has computed a wave: one native batch of decode rows alone, which took so long."""
        if self._fixed is not None:
            return
        self._model.observe_step(self.count, batch_size, seconds)
        division = Division(max(batch_size, len(self._group)), self.count)
        if division.groups == 1:
            division = Division(batch_size, 1)
        # Kept for the wave's ring: by then, sessions may have joined and left. A smaller wave than the
        # largest says nothing, for it goes behind that one.
        self._sent.pop(batch_size, None)
        if batch_size == division.largest:
            self._sent[batch_size] = division

    def observe_ring(self, batch_size: int, seconds: float) -> None:
        """A wave is back, so long after stage 0 sent it: when its last prediction came.

        Leave out waves that shared a stage with prefill, if that is known. Changes :attr:`count` at times.
        """
        self._rings += 1
        division = self._sent.get(batch_size)
        if division is None or self._rings <= 2 * self.count:
            return  # the first waves after a change still queue as they did before
        self._model.observe_ring(division, seconds)
        self._measured[batch_size] += 1
        if self._rings >= self._due and self._measured[batch_size] >= MEASURED_RINGS:
            self._due = self._rings + REVIEW_CYCLES * self.count
            self._choose(division)

    def _resize(self) -> None:
        before, self._size_class = self._size_class, max(0, len(self._order) - 1).bit_length()
        self._wanted.setdefault(self._size_class, self._wanted[before])

    def _choose(self, now: Division) -> None:
        most = min(now.sessions, 2 * now.groups)
        rates = [self._promise(Division(now.sessions, groups)) for groups in range(1, most + 1)]
        enough = max(rates) * (1 - INDIFFERENT)
        groups, rate = next((i, rate) for i, rate in enumerate(rates, 1) if rate >= enough)
        better = rate > rates[now.groups - 1] * (1 + MIN_GAIN)
        if not better and self._rings >= TRIAL_CYCLES * now.groups and (trial := self._untried(now)):
            groups, better = trial, True
        if better:
            self._change(groups)

    def _promise(self, division: Division) -> float:
        return self._model.rate(division) * (1.0 if self._model.knows(division) else UNPROVEN)

    def _change(self, groups: int) -> None:
        self._wanted[self._size_class] = groups
        self._rings = 0
        self._due = SETTLE_CYCLES * groups
        self._sent.clear()
        self._measured.clear()

    def _untried(self, now: Division) -> int:
        """One group more or less, if it is not known how fast that is and it may be fast; else 0."""
        enough = WORTH_A_TRIAL * self._model.rate(now)
        for groups in (now.groups + 1, now.groups - 1):
            division = Division(now.sessions, groups)
            if not 1 <= groups <= now.sessions or self._model.knows(division):
                continue
            if self._model.rate(division) >= enough:
                return groups
        return 0
