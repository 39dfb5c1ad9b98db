"""Decode steps on their way into a native batch: which belong together, and who is waited for.

With one wave of all sessions every stage but one would be idle, and with batches of one the engine is wasted.
So stage 0 keeps its sessions in groups (:mod:`skippy.stage.groups`); the steps of a group that it computes
together are a wave, and every later stage computes those rows together again. Rows that belong to no wave, in
a chain of one or from a peer that knows none, are batched with whatever is there.

Only the engine's thread uses what is here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import attrs

from skippy.protocol.kinds import DECODE_WAVE_NUMBERS, MAX_DECODE_WAVE_ROWS
from skippy.protocol.waves import Wave

from .groups import DecodeGroups
from .wave_window import WaveWindow
from .work import Work

_REMEMBERED: Final = 64
"""Waves that left without all their rows, whose late rows need not wait again."""
_REMEMBERED_SECS: Final = 2.0
"""And for how long: a stage 0 that starts again counts its waves anew."""


@attrs.define(slots=True)
class _Arriving:
    """Rows of one wave that stage 0 has formed, as they arrive at a later stage."""

    rows: list[Work] = attrs.field(factory=list)
    first_at: float = 0.0


@attrs.define(slots=True)
class _Sent:
    """A wave of stage 0 that is on its way round.

    Attributes:
        away: sequences whose next step is not here yet.
        rows: how many the wave had.
        began_at, sent_at: when its step began, and when that was done, once it is known.
        measured: it was computed alone and nobody has left it, so its way round tells something.
        returned_at: when the first of its rows was followed by its next step; None before.
    """

    away: set[int]
    rows: int
    began_at: float
    sent_at: float
    measured: bool = False
    returned_at: float | None = None


@attrs.define(slots=True)
class _Group:
    """The sessions of one group at stage 0.

    Attributes:
        rows: steps that wait for the rest of the group.
        waiting_since: when the first of ``rows`` arrived.
        sent: waves of which something is away: the last one, and others while the group is apart.
        last: the wave that was sent last, whole or back again.
    """

    rows: list[Work] = attrs.field(factory=list)
    waiting_since: float = 0.0
    sent: list[_Sent] = attrs.field(factory=list)
    last: _Sent | None = None


class WaveQueue:
    """Decode steps, and when they may run.

    Args:
        groups: at stage 0 of a longer chain, which group a session is in; None elsewhere.
        window: how long the rest of a wave is waited for.
        patient: whether anything is waited for; else every step may run as it comes.
    """

    def __init__(
        self,
        groups: DecodeGroups | None = None,
        window: WaveWindow | None = None,
        *,
        patient: bool = True,
    ) -> None:
        self._groups = groups
        self._patient = patient
        self._window = window or WaveWindow()
        self._returns = WaveWindow()
        self._loose: list[Work] = []
        self._arriving: dict[Wave, _Arriving] = {}
        self._incomplete: OrderedDict[Wave, float] = OrderedDict()
        self._local: dict[int, _Group] = {}
        self._sending: _Sent | None = None
        self._number = 0
        self._behind_prefill = False
        self._probe: _Sent | None = None
        self.cut_waves = 0
        """Waves so far that left without all their rows."""
        self.step_secs = 0.0
        """What a batch of decode steps alone takes, on average; 0 before the first."""
        self._ring_secs = 0.0

    # -- rows come and go ------------------------------------------------------------------------------

    def add(self, work: Work, now: float) -> None:
        if work.forms_waves and self._groups is not None:
            self._add_local(self._groups, work, now)
        elif (wave := work.wave) is not None and self._patient:
            arriving = self._arriving.get(wave)
            if arriving is None:
                arriving = self._arriving[wave] = _Arriving(first_at=now)
            arriving.rows.append(work)
            if len(arriving.rows) == wave.rows:
                self._window.observe(now - arriving.first_at)
            elif self._is_late(wave, arriving):
                # If only waves that came in time counted, a window that is too short would stay so.
                self._window.observe(now - self._incomplete[wave])
        else:
            self._loose.append(work)

    def _add_local(self, groups: DecodeGroups, work: Work, now: float) -> None:
        sequence = work.segment.sequence
        self._came_back(sequence, now)
        number = groups.between_waves(sequence) if sequence in groups else groups.join(sequence)
        group = self._local.setdefault(number, _Group())
        if not group.rows:
            group.waiting_since = now
        group.rows.append(work)

    def _came_back(self, sequence: int, now: float) -> None:
        """The step of this sequence that left last is through the ring."""
        for group in self._local.values():
            for sent in group.sent:
                if sequence not in sent.away:
                    continue
                sent.away.remove(sequence)
                if sent.returned_at is None:
                    sent.returned_at = now
                if not sent.away:
                    group.sent.remove(sent)
                    self._observe_return(sent, now - sent.returned_at, now)
                return

    def _observe_return(self, sent: _Sent, spread: float, now: float) -> None:
        """All of a wave is back, perhaps not in time: else a window that is too short would stay so."""
        self._returns.observe(spread)
        ring = now - sent.began_at
        self._ring_secs += (ring - self._ring_secs) * (0.25 if self._ring_secs else 1.0)
        if sent is self._probe:
            self._behind_prefill, self._probe = False, None
        if sent.measured and self._groups is not None:
            self._groups.observe_ring(sent.rows, now - sent.sent_at)

    def leave(self, sequence: int) -> None:
        """The session does not go on, or not soon: nobody waits for it."""
        if self._groups is None:
            return
        for group in self._local.values():
            for sent in group.sent:
                if sequence in sent.away:
                    sent.away.remove(sequence)
                    sent.measured = False
                    if sent is self._probe and not sent.away:
                        self._probe = None
            group.sent = [sent for sent in group.sent if sent.away]
        if sequence in self._groups:
            self._groups.leave(sequence)

    def disturbed(self) -> None:
        """The engine has computed prefill: waves that are under way may meet it on later stages, too.

        So may those behind it. What was sent later and is back has it out of the way.
        """
        for group in self._local.values():
            for sent in group.sent:
                sent.measured = False
        self._behind_prefill, self._probe = True, None

    def observe_step(self, rows: int, seconds: float) -> None:
        """The batch of decode rows that was taken last took this long, and had nothing else in it."""
        self.step_secs += (seconds - self.step_secs) * (0.25 if self.step_secs else 1.0)
        if self._groups is not None and self._sending is not None:
            self._groups.observe_step(rows, seconds)
            self._sending.sent_at += seconds
            if self._behind_prefill:
                self._probe = self._probe or self._sending
            else:
                self._sending.measured = True
            self._sending = None

    # -- when they may run -----------------------------------------------------------------------------

    def ready_count(self, now: float) -> int:
        """Batches that may run now."""
        return (
            bool(self._loose)
            + sum(self._due(wave, rows) <= now for wave, rows in self._arriving.items())
            + sum(self._group_due(group) <= now for group in self._local.values() if group.rows)
        )

    def wait_secs(self, now: float) -> float | None:
        """How long until a batch may run; None when nothing waits."""
        if self._loose:
            return 0.0
        dues = [self._due(wave, rows) for wave, rows in self._arriving.items()]
        dues += [self._group_due(group) for group in self._local.values() if group.rows]
        return max(0.0, min(dues) - now) if dues else None

    def imminent_secs(self, now: float) -> float | None:
        """How long until a wave that has begun to arrive may run; None when there is none."""
        if self._loose:
            return 0.0
        dues = [self._due(wave, rows) for wave, rows in self._arriving.items()]
        dues += [
            self._group_due(group)
            for group in self._local.values()
            if group.rows and (not group.sent or (group.last and group.last.returned_at is not None))
        ]
        return max(0.0, min(dues) - now) if dues else None

    def _due(self, wave: Wave, arriving: _Arriving) -> float:
        if len(arriving.rows) >= wave.rows or self._is_late(wave, arriving):
            return 0.0
        return arriving.first_at + self._window.seconds(self.step_secs)

    def _is_late(self, wave: Wave, arriving: _Arriving) -> bool:
        """Whether the rest of the wave has left already."""
        left_from = self._incomplete.get(wave)
        return left_from is not None and arriving.first_at - left_from < _REMEMBERED_SECS

    def _group_due(self, group: _Group) -> float:
        if not group.sent or group.last is None:
            return 0.0
        if group.last.returned_at is not None:
            # A group that falls apart goes round in small batches. Waiting costs a part of the ring.
            return group.last.returned_at + self._returns.seconds(self._ring_secs)
        # Sessions that join wait for the others to come round, so that they go on together.
        return group.waiting_since + 1.5 * self._ring_secs

    def take_ready(self, now: float, max_rows: int) -> list[Work]:
        """The rows of the batch that has waited longest, at most ``max_rows``; none if none is ready."""
        self._sending = None
        for wave, arriving in self._arriving.items():
            if self._due(wave, arriving) <= now:
                rows, arriving.rows = _cut(arriving.rows, max_rows)
                if not arriving.rows:
                    del self._arriving[wave]
                if arriving.rows or len(rows) < wave.rows:
                    self.cut_waves += 1
                    if not self._is_late(wave, arriving):
                        self._incomplete.pop(wave, None)
                        self._incomplete[wave] = arriving.first_at
                    if len(self._incomplete) > _REMEMBERED:
                        self._incomplete.popitem(last=False)
                return rows
        if self._loose:
            rows, self._loose = _cut(self._loose, max_rows)
            return rows
        due = [group for group in self._local.values() if group.rows and self._group_due(group) <= now]
        if not due:
            return []
        return self._send(min(due, key=lambda group: group.waiting_since), now, max_rows)

    def _send(self, group: _Group, now: float, max_rows: int) -> list[Work]:
        limit = min(max_rows, MAX_DECODE_WAVE_ROWS)
        rows, group.rows = group.rows[:limit], group.rows[limit:]
        group.waiting_since = now
        self._number = (self._number + 1) % DECODE_WAVE_NUMBERS
        # What nobody wants any more is not run: no stage is to wait for it, and it does not come back.
        away = {work.segment.sequence for work in rows if not work.cancelled}
        wave = Wave(self._number, max(1, len(away)))
        for work in rows:
            work.wave = wave
        if away:
            group.last = self._sending = _Sent(away, len(away), now, now)
            group.sent.append(group.last)
        return rows

    @property
    def waiting(self) -> int:
        """Steps that have not been handed out."""
        arriving = sum(len(each.rows) for each in self._arriving.values())
        return len(self._loose) + arriving + sum(len(each.rows) for each in self._local.values())

    def take_all(self) -> list[Work]:
        """Everything that waits; nothing does afterwards."""
        works = [*self._loose]
        for arriving in self._arriving.values():
            works += arriving.rows
        for group in self._local.values():
            works += group.rows
            group.rows = []
        self._loose = []
        self._arriving.clear()
        return works


def _cut(rows: list[Work], max_rows: int) -> tuple[list[Work], list[Work]]:
    """The first works whose rows fit, at least one of them, and the rest."""
    total = 0
    for index, work in enumerate(rows):
        total += work.rows_left
        if total > max_rows and index:
            return rows[:index], rows[index:]
    return rows, []
