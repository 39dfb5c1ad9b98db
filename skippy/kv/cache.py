"""The index of one stage: which token paths it remembers, where, and which of them goes first.

An :class:`Entry` is a token path in one namespace and what holds it: a native sequence of the engine (its
*resident* part), an exported state (its *state* part), or both. It is *live* while its sequence belongs to a
session, else *idle*. The index does no native work and never waits: its owner, the stage's event loop, posts
the native operation and tells the index in the same step, so that both happen in the same order.

How an entry moves, and what its owner does beside it::

    add(live=True)  a session has run its first rows; grow() with each further chunk, and with its answer
    keep()          the session ended in good order: idle, the sequence is the entry's. False: drop it
    take()          a session gets an idle entry's sequence: live again; truncate() when that is trimmed
    add(state=…)    a state was exported at a checkpoint, or found on disk
    set_state()     an idle entry's state was exported
    evict()         room was needed: a part goes, or all of it. Which one: victim(), excess()
    drop()          the session failed, a part was found to be wrong, or somebody asked for it

The policy is :mod:`skippy.kv.policy`, with :meth:`PrefixCache.cost` as the cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic

import attrs

from .entries import Entry, KvCounters, KvStats, Match, Part, S, is_resident
from .paths import PathIndex
from .policy import Floor, worth
from .radix import TYPE_CODE
from .schedule import ChunkPlan, cut_schedule
from .settings import KvSettings


class PrefixCache(Generic[S]):
    """One stage's index. Of one thread; nothing here waits.

    Args:
        settings: its limits.
        sliceable: an entry serves every prefix of its path (attention, where sequences can be trimmed).
            Otherwise it serves only all of it (recurrent and hybrid models), and only while idle: a live
            one's state runs ahead of what the index knows.
    """

    def __init__(self, settings: KvSettings, *, sliceable: bool) -> None:
        self.settings = settings
        self.sliceable = sliceable
        self.counters = KvCounters()
        self._quarantined: set[int] = set()
        self._paths: PathIndex[S] = PathIndex(sliceable=sliceable, min_tokens=settings.min_tokens)
        self._entries: dict[Entry[S], None] = {}
        self._idle = 0
        self._uses = 0
        self._resident_floor = Floor()
        self._state_floor = Floor()

    # Looking

    def match(
        self, namespace: str, tokens: Sequence[int], chunks: ChunkPlan | None = None
    ) -> Match[S] | None:
        """The longest prefix of ``tokens``, at least ``min_tokens``, that an entry of ``namespace`` holds.

        Among entries that hold as much: idle with a sequence, then live, then with a state alone; among these
        the shortest, of which a take would lose least, then the one used last. Touches nothing.

        Args:
            chunks: of an entry only what was computed alone, and in these chunks.
        """
        return self._paths.match(namespace, tokens, chunks)

    def common(self, namespace: str, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens`` begin the path of any entry of ``namespace``. Touches nothing."""
        return self._paths.common(namespace, tokens)

    def cost(self, entry: Entry[S]) -> int:
        """Tokens that would have to be prefilled again if this entry alone were gone.

        Sliceable: those after the longest prefix that it shares with any other entry, live ones included. Not
        sliceable: those after the longest other idle entry that its path begins with.
        """
        return self._paths.cost(entry)

    def takes(self, match: Match[S], *, free_sequences: int) -> bool:
        """Whether the session should take the entry's sequence instead of getting a copy of it.

        Yes if nothing is lost by that: the session uses all of the entry, or others have the rest. Otherwise
        only where no sequence is free, and what a take would lose is worth less than what the copy would
        evict. Where an entry serves only all of its path, a take loses that path. Never if it is live or
        referenced.
        """
        entry = match.entry
        if not is_resident(entry) or entry.refs:
            return False
        lost = 0 if entry.state is not None else self.cost(entry)
        if self.sliceable:  # a live entry still serves what the session uses
            lost = min(lost, entry.length - match.length)
        if lost == 0:
            return True
        if free_sequences > 0:
            return False
        victim = self.victim(resident=True, besides=entry)
        if victim is None:
            return True
        left = worth(self._resident_floor.height, lost, self._resident_size(lost))
        return left < self._resident_worth(victim)

    def victim(self, *, resident: bool, besides: Entry[S] | None = None) -> Entry[S] | None:
        """The entry whose sequence (``resident``) or exported state goes first; None if none can.

        Idle, not referenced, not ``besides``, of least worth. A part costs nothing while the entry has the
        other one.
        """
        if resident:
            able = [entry for entry in self._entries if entry.sequence is not None]
        else:
            able = [entry for entry in self._entries if entry.state is not None]
        value = self._resident_worth if resident else self._state_worth
        return min(
            (entry for entry in able if not entry.live and not entry.refs and entry is not besides),
            key=lambda entry: (value(entry), entry.last_used),
            default=None,
        )

    def excess(self) -> tuple[Entry[S], Part] | None:
        """What has to be evicted next to be within the limits, or None.

        More than ``max_entries`` idle entries: the victim among those that are a state alone, else that among
        those with a sequence. Where cells are shared, more than ``max_resident_tokens`` in idle sequences: a
        victim's sequence. How many bytes states take is for their store to measure and to say.
        """
        if self._idle > self.settings.max_entries:
            alone = [entry for entry in self._entries if entry.sequence is None and not entry.refs]
            entry = min(alone, key=lambda e: (self._state_worth(e), e.last_used), default=None)
            if (entry := entry or self.victim(resident=True)) is not None:
                return entry, Part.WHOLE
        limit = self.settings.max_resident_tokens
        if (
            limit
            and self._paths.resident_tokens() > limit
            and (entry := self.victim(resident=True)) is not None
        ):
            return entry, Part.RESIDENT
        return None

    def entries(self, namespace: str | None = None) -> list[Entry[S]]:
        """All entries, or a namespace's; the one that was used longest ago first."""
        chosen = (entry for entry in self._entries if namespace is None or entry.namespace == namespace)
        return sorted(chosen, key=lambda entry: entry.last_used)

    @property
    def quarantined(self) -> frozenset[int]:
        """Native sequences that are used no more."""
        return frozenset(self._quarantined)

    def stats(self) -> KvStats:
        """What there is now; a snapshot."""
        idle = [entry for entry in self._entries if not entry.live]
        states = [entry.state.size for entry in idle if entry.state is not None]
        return KvStats(
            namespaces=self._paths.namespaces,
            entries=len(self._entries),
            live=len(self._entries) - len(idle),
            resident=sum(entry.sequence is not None for entry in idle),
            resident_tokens=self._paths.resident_tokens(),
            states=len(states),
            state_bytes=sum(states),
            quarantined=len(self._quarantined),
            counters=attrs.evolve(self.counters),
        )

    # Changing

    def add(
        self,
        namespace: str,
        tokens: Sequence[int],
        *,
        sequence: int | None = None,
        state: S | None = None,
        live: bool = False,
        schedule: tuple[int, ...] = (),
        alone: bool = False,
    ) -> Entry[S] | None:
        """Remember a path of at least one token, and what holds it.

        A live entry is always added: several sessions may have the same path. An idle one is subject to
        :meth:`keep`; None means that it was not added, and what holds it is the caller's to drop.

        Raises:
            ValueError: nothing holds it, or it is live without a sequence, or the path is empty.
        """
        if sequence is None and (live or state is None):
            raise ValueError("an entry needs a sequence or a state, a live one a sequence")
        entry = Entry(namespace, array(TYPE_CODE, tokens), sequence, state, True, schedule, alone)
        self._begin(entry)
        return entry if live or self.keep(entry) else None

    def grow(
        self,
        entry: Entry[S],
        tokens: Sequence[int],
        *,
        chunks: tuple[int, ...] | None = None,
        alone: bool = True,
    ) -> None:
        """A live entry's sequence holds ``tokens`` more, computed in ``chunks`` (by default: one)."""
        self._require_live(entry)
        if tokens:
            self._paths.move(entry, entry.tokens + array(TYPE_CODE, tokens))
            entry.schedule += (len(tokens),) if chunks is None else chunks
            entry.alone = entry.alone and alone

    def truncate(self, entry: Entry[S], length: int) -> None:
        """A live entry's sequence was trimmed to ``length`` tokens; without any left the entry is gone."""
        self._require_live(entry)
        if length >= entry.length:
            return
        if length == 0:
            self._forget(entry)
            return
        self._paths.move(entry, entry.tokens[:length])
        entry.schedule, whole = cut_schedule(entry.schedule, length)
        entry.alone = entry.alone and whole

    def keep(self, entry: Entry[S]) -> bool:
        """A session has ended and leaves its sequence: the live entry becomes idle.

        Of idle entries with the same path at most one has a sequence, and one that is a state alone is added
        only where there is none. What came first stays, and counts as used.

        Returns:
            False: the path is shorter than ``min_tokens``, or there already; the entry is gone, and its
            sequence (or state) is the caller's to drop.
        """
        self._require_live(entry)
        assert entry.node is not None
        twin = next(
            (
                e
                for e in entry.node.values
                if not e.live and (e.sequence is not None or entry.sequence is None)
            ),
            None,
        )
        short = entry.length < self.settings.min_tokens
        if short or twin is not None:
            self._forget(entry)
            self.counters.too_short += short
            self.counters.duplicates += not short
            if twin is not None:
                self.touch(twin)
            return False
        entry.live = False
        self._idle += 1
        self.touch(entry)
        self.counters.records += 1
        self.counters.recorded_tokens += entry.length
        return True

    def take(self, entry: Entry[S]) -> Entry[S]:
        """A session gets the sequence of an idle, unreferenced entry.

        Returns:
            the session's live entry: ``entry`` itself, or a new one where ``entry`` has a state, which stays
            idle.
        """
        if entry.removed or not is_resident(entry) or entry.refs:
            raise ValueError("only an idle entry with a sequence and without references can be taken")
        if entry.state is None:
            entry.live = True
            self._idle -= 1
            self.touch(entry)
            return entry
        sequence, entry.sequence = entry.sequence, None
        self.touch(entry)
        taken: Entry[S] = Entry(
            entry.namespace, entry.tokens, sequence, None, True, entry.schedule, entry.alone
        )
        self._begin(taken)
        return taken

    def set_state(self, entry: Entry[S], state: S) -> None:
        """The state of an idle entry was exported."""
        if entry.removed or entry.live or entry.state is not None:
            raise ValueError("only an idle entry without a state can be given one")
        entry.state = state
        entry.state_base = self._state_floor.height

    def acquire(self, entry: Entry[S]) -> None:
        """Begin to restore from or to export it: until :meth:`release` it is no victim and not taken."""
        if entry.removed:
            raise ValueError("the entry was removed")
        entry.refs += 1

    def release(self, entry: Entry[S]) -> None:
        """End what :meth:`acquire` began. Counts as a use; the entry may be gone by now."""
        if entry.refs < 1:
            raise ValueError("the entry has no references")
        entry.refs -= 1
        if not entry.removed:
            self.touch(entry)

    def touch(self, entry: Entry[S]) -> None:
        """It was used."""
        self._uses += 1
        entry.last_used = self._uses
        entry.resident_base = self._resident_floor.height
        entry.state_base = self._state_floor.height

    def evict(self, entry: Entry[S], part: Part) -> None:
        """A part goes for lack of room, and with its last part the entry.

        A state that was exported meanwhile comes back by :meth:`add`. ValueError: the entry is no victim.
        """
        if entry.removed or entry.live or entry.refs:
            raise ValueError("only an idle entry without references can be evicted")
        if part is not Part.STATE and entry.sequence is not None:
            self._resident_floor.rise(self._resident_worth(entry))
            self.counters.evicted_resident += 1
        if part is not Part.RESIDENT and entry.state is not None:
            self._state_floor.rise(self._state_worth(entry))
            self.counters.evicted_state += 1
        self._lose(entry, part)

    def drop(self, entry: Entry[S], part: Part = Part.WHOLE) -> None:
        """A part is gone or wrong, also of a live or referenced entry; one already gone is left alone."""
        if not entry.removed:
            self._lose(entry, part)
            self.counters.dropped += entry.removed

    def quarantine(self, sequence: int) -> None:
        """A native operation on ``sequence`` failed: it is used no more, and no entry has it."""
        self._quarantined.add(sequence)
        for entry in [entry for entry in self._entries if entry.sequence == sequence]:
            self.drop(entry, Part.WHOLE if entry.live else Part.RESIDENT)

    # Inside

    def _resident_worth(self, entry: Entry[S]) -> float:
        cost = 0 if entry.state is not None else self.cost(entry)
        return worth(entry.resident_base, cost, self._resident_size(cost))

    def _resident_size(self, cost: int) -> int:
        """A sequence takes one of those there are; where cells are shared, the cells that it alone holds."""
        return cost if self.settings.shared_cells else 1

    def _state_worth(self, entry: Entry[S]) -> float:
        assert entry.state is not None
        cost = 0 if entry.sequence is not None else self.cost(entry)
        return worth(entry.state_base, cost, entry.state.size)

    def _require_live(self, entry: Entry[S]) -> None:
        if entry.removed or not entry.live:
            raise ValueError("only a live entry can do this")

    def _lose(self, entry: Entry[S], part: Part) -> None:
        if part is not Part.STATE:
            entry.sequence = None
        if part is not Part.RESIDENT:
            entry.state = None
        if entry.sequence is None and entry.state is None:
            self._forget(entry)

    def _begin(self, entry: Entry[S]) -> None:
        self._paths.place(entry)
        self._entries[entry] = None
        self.touch(entry)

    def _forget(self, entry: Entry[S]) -> None:
        self._paths.unplace(entry)
        del self._entries[entry]
        self._idle -= not entry.live
