"""The index against a list of entries that is searched from end to end."""

from __future__ import annotations

import attrs
from hypothesis import settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.kv.cache import PrefixCache
from skippy.kv.entries import Entry, Part
from skippy.kv.settings import KvSettings

NAMESPACES = st.sampled_from(["", "other"])
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
MIN_TOKENS, MAX_ENTRIES = 2, 4


@attrs.frozen
class State:
    size: int


@attrs.define(eq=False)
class Record:
    """What the model knows of an entry."""

    entry: Entry[State]
    namespace: str
    path: list[int]
    sequence: int | None
    state: int | None
    live: bool
    refs: int = 0
    used: int = 0
    bases: tuple[float, float] = (0.0, 0.0)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Model:
    """The text of skippy.kv.policy and of PrefixCache, done the slow way."""

    def __init__(self, sliceable: bool) -> None:
        self.sliceable = sliceable
        self.records: list[Record] = []
        self.uses = 0
        self.floors = [0.0, 0.0]

    def touch(self, record: Record) -> None:
        self.uses += 1
        record.used = self.uses
        record.bases = (self.floors[0], self.floors[1])

    def match(self, namespace: str, tokens: list[int]) -> tuple[Record, int] | None:
        found: list[tuple[int, int, int, int, Record]] = []
        for record in self.records:
            length = shared(record.path, tokens)
            serves = self.sliceable or (length == len(record.path) and not record.live)
            if record.namespace == namespace and serves and length >= MIN_TOKENS:
                kind = 3 if record.sequence is None else 2 if record.live else 1 if record.refs else 0
                found.append((-length, kind, len(record.path), -record.used, record))
        if not found:
            return None
        best = min(found, key=lambda item: item[:4])
        return best[4], -best[0]

    def cost(self, record: Record) -> int:
        others = [r for r in self.records if r is not record and r.namespace == record.namespace]
        if self.sliceable:
            held = [shared(other.path, record.path) for other in others]
        else:
            held = [
                len(other.path)
                for other in others
                if not other.live and shared(other.path, record.path) == len(other.path)
            ]
        return len(record.path) - max(held, default=0)

    def worth(self, record: Record, room: int) -> float:
        other = record.state if room == 0 else record.sequence
        cost = 0 if other is not None else self.cost(record)
        size = 1 if room == 0 else record.state
        assert size is not None
        return record.bases[room] + cost / size

    def victim(self, room: int, *, lone_states: bool = False) -> Record | None:
        able = [
            record
            for record in self.records
            if not record.live
            and not record.refs
            and (record.sequence if room == 0 else record.state) is not None
            and (not lone_states or record.sequence is None)
        ]
        return min(able, key=lambda record: (self.worth(record, room), record.used), default=None)

    def lose(self, record: Record, part: Part, *, evicted: bool) -> None:
        worths = []
        if part is not Part.STATE and record.sequence is not None:
            worths.append((0, self.worth(record, 0)))
        if part is not Part.RESIDENT and record.state is not None:
            worths.append((1, self.worth(record, 1)))
        if evicted:
            for room, worth in worths:
                self.floors[room] = max(self.floors[room], worth)
        if part is not Part.STATE:
            record.sequence = None
        if part is not Part.RESIDENT:
            record.state = None
        if record.sequence is None and record.state is None:
            self.records.remove(record)

    def twin(self, record: Record) -> Record | None:
        for other in self.records:
            same = other.namespace == record.namespace and other.path == record.path
            if same and not other.live and (other.sequence is not None or record.sequence is None):
                return other
        return None


class IndexMachine(RuleBasedStateMachine):
    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        settings = KvSettings(min_tokens=MIN_TOKENS, max_entries=MAX_ENTRIES)
        self.cache: PrefixCache[State] = PrefixCache(settings, sliceable=self.sliceable)
        self.model = Model(self.sliceable)
        self.sequences = 0

    def draw(self, data: st.DataObject, **wanted: bool) -> Record | None:
        """One of the records with these properties."""
        able = [
            record
            for record in self.model.records
            if all(bool(getattr(record, name)) is value for name, value in wanted.items())
        ]
        return able[data.draw(st.integers(0, len(able) - 1))] if able else None

    @rule(namespace=NAMESPACES, path=PATHS)
    def begin(self, namespace: str, path: list[int]) -> None:
        self.sequences += 1
        entry = self.cache.add(namespace, path, sequence=self.sequences, live=True)
        assert entry is not None
        record = Record(entry, namespace, path, self.sequences, None, True)
        self.model.records.append(record)
        self.model.touch(record)

    @rule(namespace=NAMESPACES, path=PATHS, size=st.integers(1, 5))
    def add_state(self, namespace: str, path: list[int], size: int) -> None:
        entry = self.cache.add(namespace, path, state=State(size))
        self.model.uses += 1  # that of the entry, whether it is kept or not
        record = Record(entry, namespace, path, None, size, False)  # type: ignore[arg-type]
        twin = self.model.twin(record)
        assert (entry is None) is (twin is not None or len(path) < MIN_TOKENS)
        if entry is not None:
            self.model.records.append(record)
            self.model.touch(record)
        elif twin is not None:
            self.model.touch(twin)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=3))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        if (record := self.draw(data, live=True)) is not None:
            self.cache.grow(record.entry, tokens)
            record.path = record.path + tokens

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), length=st.integers(0, 8))
    def truncate(self, data: st.DataObject, length: int) -> None:
        if (record := self.draw(data, live=True)) is not None:
            self.cache.truncate(record.entry, length)
            record.path = record.path[:length]
            if not record.path:
                self.model.records.remove(record)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        if (record := self.draw(data, live=True)) is None:
            return
        twin = self.model.twin(record)
        kept = self.cache.keep(record.entry)
        assert kept is (twin is None and len(record.path) >= MIN_TOKENS)
        if kept:
            record.live = False
            self.model.touch(record)
        else:
            self.model.records.remove(record)
            if twin is not None:
                self.model.touch(twin)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        record = self.draw(data, live=False, sequence=True, refs=False)
        if record is None:
            return
        taken = self.cache.take(record.entry)
        self.model.touch(record)
        if record.state is None:
            assert taken is record.entry
            record.live = True
            return
        other = Record(taken, record.namespace, record.path, record.sequence, None, True)
        record.sequence = None
        self.model.records.append(other)
        self.model.touch(other)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), size=st.integers(1, 5))
    def export(self, data: st.DataObject, size: int) -> None:
        record = self.draw(data, live=False, state=False)
        if record is not None:
            self.cache.set_state(record.entry, State(size))
            record.state = size
            record.bases = (record.bases[0], self.model.floors[1])

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        if (record := self.draw(data)) is not None:
            self.cache.acquire(record.entry)
            record.refs += 1

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if (record := self.draw(data, refs=True)) is not None:
            self.cache.release(record.entry)
            record.refs -= 1
            self.model.touch(record)

    @rule(resident=st.booleans())
    def evict(self, resident: bool) -> None:
        record = self.model.victim(0 if resident else 1)
        if record is not None:
            part = Part.RESIDENT if resident else Part.STATE
            self.cache.evict(record.entry, part)
            self.model.lose(record, part, evicted=True)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data(), part=st.sampled_from(Part))
    def drop(self, data: st.DataObject, part: Part) -> None:
        record = self.draw(data)
        assert record is not None
        if not (record.live and part is Part.STATE):
            self.cache.drop(record.entry, part)
            self.model.lose(record, part, evicted=False)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        record = self.draw(data, sequence=True)
        if record is not None and record.sequence is not None:
            self.cache.quarantine(record.sequence)
            assert record.sequence in self.cache.quarantined
            self.model.lose(record, Part.RESIDENT, evicted=False)

    @rule(namespace=NAMESPACES, tokens=st.lists(st.integers(0, 1), max_size=10))
    def match(self, namespace: str, tokens: list[int]) -> None:
        found, expected = self.cache.match(namespace, tokens), self.model.match(namespace, tokens)
        assert (found is None) is (expected is None)
        if found is not None and expected is not None:
            assert (found.entry, found.length) == (expected[0].entry, expected[1])
            assert list(found.entry.tokens[: found.length]) == tokens[: found.length]
            assert found.entry.namespace == namespace

    @invariant()
    def everything_agrees(self) -> None:
        model, cache = self.model, self.cache
        assert {id(entry) for entry in cache.entries()} == {id(record.entry) for record in model.records}
        for record in model.records:
            entry = record.entry
            assert list(entry.tokens) == record.path
            assert (entry.sequence, entry.live, entry.refs) == (record.sequence, record.live, record.refs)
            assert (entry.state and entry.state.size) == record.state
            assert cache.cost(entry) == model.cost(record)
        for room, resident in ((0, True), (1, False)):
            expected = model.victim(room)
            assert cache.victim(resident=resident) is (None if expected is None else expected.entry)
        self.limits_agree()

    def limits_agree(self) -> None:
        idle = [record for record in self.model.records if not record.live]
        expected = None
        if len(idle) > MAX_ENTRIES:
            expected = self.model.victim(1, lone_states=True) or self.model.victim(0)
        excess = self.cache.excess()
        assert excess == (None if expected is None else (expected.entry, Part.WHOLE))
        stats = self.cache.stats()
        assert (stats.entries, stats.live) == (len(self.model.records), len(self.model.records) - len(idle))
        assert stats.resident == sum(record.sequence is not None for record in idle)
        assert stats.state_bytes == sum(record.state or 0 for record in idle)
        assert stats.namespaces == len({record.namespace for record in self.model.records})


class WholeIndexMachine(IndexMachine):
    sliceable = False


TestSliceable = IndexMachine.TestCase
TestSliceable.settings = hypothesis_settings(stateful_step_count=30, deadline=None)
TestWhole = WholeIndexMachine.TestCase
TestWhole.settings = hypothesis_settings(stateful_step_count=30, deadline=None)
