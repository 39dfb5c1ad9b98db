"""The index of a stage: what it finds, what it gives up, and what it refuses."""

from __future__ import annotations

import attrs
import pytest

from skippy.kv.cache import PrefixCache
from skippy.kv.entries import Entry, Part
from skippy.kv.schedule import ChunkPlan
from skippy.kv.settings import KvSettings


@attrs.frozen
class State:
    """What a store would hand out."""

    size: int


def cache(*, sliceable: bool = True, min_tokens: int = 2, max_entries: int = 64) -> PrefixCache[State]:
    settings = KvSettings(min_tokens=min_tokens, max_entries=max_entries)
    return PrefixCache(settings, sliceable=sliceable)


def kept(index: PrefixCache[State], path: str, sequence: int, namespace: str = "") -> Entry[State]:
    entry = index.add(namespace, list(map(ord, path)), sequence=sequence)
    assert entry is not None
    return entry


def found(index: PrefixCache[State], path: str, namespace: str = "") -> tuple[int | None, int]:
    match = index.match(namespace, list(map(ord, path)))
    return (None, 0) if match is None else (match.entry.sequence, match.length)


def test_an_entry_serves_every_prefix_of_its_path() -> None:
    index = cache()
    kept(index, "abcdef", 1)
    kept(index, "abcxyz", 2)
    assert found(index, "abcdef") == (1, 6)
    assert found(index, "abcdefgh") == (1, 6)
    assert found(index, "abcde") == (1, 5)
    assert found(index, "abcxq") == (2, 4)
    assert found(index, "abq") == (2, 2), "both hold it; the last one used"
    assert found(index, "aq") == (None, 0), "shorter than min_tokens"
    assert found(index, "q") == found(index, "") == (None, 0)


def test_what_cannot_be_sliced_serves_only_all_of_its_path() -> None:
    index = cache(sliceable=False)
    kept(index, "abc", 1)
    kept(index, "abcdef", 2)
    live = index.add("", list(map(ord, "abcde")), sequence=3, live=True)
    assert live is not None
    assert found(index, "abcdef") == (2, 6)
    assert found(index, "abcdex") == (1, 3), "a live one runs ahead of what is known of it"
    assert found(index, "ab") == (None, 0)
    assert index.keep(live)
    assert found(index, "abcdex") == (3, 5)


def test_namespaces_never_meet() -> None:
    index = cache()
    kept(index, "abcdef", 1, "one")
    kept(index, "abcdef", 2, "two")
    assert found(index, "abcdef", "one") == (1, 6)
    assert found(index, "abcdef", "two") == (2, 6)
    assert found(index, "abcdef") == (None, 0)
    assert index.stats().namespaces == 2
    index.drop(index.entries("one")[0])
    assert found(index, "abcdef", "one") == (None, 0)
    assert index.stats().namespaces == 1


def test_a_session_from_its_first_chunk_to_the_next_turn() -> None:
    index = cache()
    live = index.add("", [1, 2, 3, 4], sequence=0, live=True, schedule=(4,), alone=True)
    assert live is not None
    index.grow(live, [5, 6])
    index.grow(live, [7, 8, 9], chunks=(1, 1, 1))
    assert live.schedule == (4, 2, 1, 1, 1)
    assert live.alone
    assert index.match("", [1, 2, 3, 4, 5, 0]) is not None, "live ones serve too"
    assert index.keep(live)
    match = index.match("", [1, 2, 3, 4, 5, 6, 7, 0])
    assert match is not None
    assert (match.entry, match.length) == (live, 7)
    assert index.take(live) is live
    index.truncate(live, 7)
    assert (list(live.tokens), live.schedule, live.alone) == ([1, 2, 3, 4, 5, 6, 7], (4, 2, 1), True)
    index.truncate(live, 5)
    assert (live.schedule, live.alone) == ((4, 1), False), "a chunk was cut"
    index.truncate(live, 0)
    assert live.removed
    assert index.stats().entries == 0


def test_taking_an_entry_leaves_its_state_where_it_is() -> None:
    index = cache(sliceable=False)
    entry = kept(index, "abcdef", 1)
    index.set_state(entry, State(10))
    taken = index.take(entry)
    assert (taken.sequence, taken.state, taken.live) == (1, None, True)
    assert (entry.sequence, entry.state, entry.live) == (None, State(10), False)
    index.grow(taken, [1, 2])
    assert index.match("", list(map(ord, "abcdef"))).entry is entry  # type: ignore[union-attr]
    assert index.keep(taken)
    assert [e.length for e in index.entries()] == [6, 8]


def test_what_is_there_already_or_too_short_is_not_kept() -> None:
    index = cache()
    first = kept(index, "abcdef", 1)
    other = kept(index, "xyz", 2)
    assert index.add("", list(map(ord, "abcdef")), sequence=3) is None
    assert index.entries() == [other, first], "the first one counts as used"
    assert index.add("", list(map(ord, "abcdef")), state=State(1)) is None
    assert index.add("", [1], sequence=3) is None
    assert (index.counters.duplicates, index.counters.too_short, index.counters.records) == (2, 1, 2)
    index.set_state(first, State(5))
    index.drop(first, Part.RESIDENT)
    again = kept(index, "abcdef", 3)
    assert found(index, "abcdef") == (3, 6), "one with a sequence beside one that is a state alone"
    assert index.cost(again) == index.cost(first) == 0


def test_the_shared_prefix_costs_nothing_while_another_has_it() -> None:
    index = cache()
    one, two = kept(index, "sssssa", 1), kept(index, "sssssbc", 2)
    assert (index.cost(one), index.cost(two)) == (1, 2)
    inner = kept(index, "sss", 3)
    assert index.cost(inner) == 0
    index.evict(one, Part.WHOLE)
    index.evict(inner, Part.WHOLE)
    assert index.cost(two) == 7


def test_costs_of_what_cannot_be_sliced_count_from_the_checkpoint_before() -> None:
    index = cache(sliceable=False)
    system, turn, other = kept(index, "sss", 1), kept(index, "sssaa", 2), kept(index, "sssb", 3)
    assert [index.cost(entry) for entry in (system, turn, other)] == [3, 2, 1]
    index.take(system)
    assert [index.cost(entry) for entry in (turn, other)] == [5, 4], "a live one is no checkpoint"


def test_equal_costs_are_plain_lru() -> None:
    index = cache()
    a, b, c = (kept(index, letter * 4, number) for number, letter in enumerate("abc"))
    index.touch(a)
    assert index.victim(resident=True) is b
    index.evict(b, Part.RESIDENT)
    assert index.victim(resident=True) is c
    assert b.removed
    assert index.counters.evicted_resident == 1


def test_what_costs_more_stays_longer_but_not_for_ever() -> None:
    index = cache()
    dear = kept(index, "d" * 30, 0)
    number = 1
    for letter in map(chr, range(ord("A"), ord("A") + 12)):
        kept(index, letter * 10, number)
        number += 1
        if (victim := index.victim(resident=True)) is dear:
            break
        assert victim is not None
        index.evict(victim, Part.RESIDENT)
    assert number == 4, "two cheap ones went, worth 10 and 20; the third is worth 30, too, and dear is older"


def test_a_reference_or_a_session_keeps_an_entry() -> None:
    index = cache(max_entries=1)
    entry = kept(index, "abcd", 1)
    index.acquire(entry)
    assert index.victim(resident=True) is None
    with pytest.raises(ValueError, match="idle entry without references"):
        index.evict(entry, Part.WHOLE)
    with pytest.raises(ValueError, match="without references can be taken"):
        index.take(entry)
    index.release(entry)
    with pytest.raises(ValueError, match="no references"):
        index.release(entry)
    assert index.victim(resident=True) is entry
    index.take(entry)
    assert index.victim(resident=True) is None
    with pytest.raises(ValueError, match="without references can be taken"):
        index.take(entry)


def test_an_entry_that_goes_while_it_is_used() -> None:
    index = cache()
    entry = kept(index, "abcd", 1)
    index.acquire(entry)
    index.drop(entry)
    index.drop(entry)
    assert index.counters.dropped == 1
    index.release(entry)
    with pytest.raises(ValueError, match="was removed"):
        index.acquire(entry)
    with pytest.raises(ValueError, match="was removed"):
        index.cost(entry)


def test_more_entries_than_allowed() -> None:
    index = cache(max_entries=2)
    one, two = kept(index, "aaaa", 1), kept(index, "bbbb", 2)
    assert index.excess() is None
    state = index.add("", list(map(ord, "cccc")), state=State(7))
    assert index.excess() == (state, Part.WHOLE), "what is a state alone goes first"
    assert state is not None
    index.evict(state, Part.WHOLE)
    kept(index, "dddd", 3)
    assert index.excess() == (one, Part.WHOLE)
    index.acquire(one)
    assert index.excess() == (two, Part.WHOLE)
    index.evict(two, Part.WHOLE)
    assert index.excess() is None
    assert (index.counters.evicted_state, index.counters.evicted_resident) == (1, 1)


def test_tokens_of_idle_sequences_where_cells_are_shared() -> None:
    index: PrefixCache[State] = PrefixCache(
        KvSettings(min_tokens=1, shared_cells=True, max_resident_tokens=10), sliceable=True
    )
    kept(index, "ssssssaa", 1)
    kept(index, "ssssssbb", 2)
    assert index.stats().resident_tokens == 10, "the shared prefix counts once"
    assert index.excess() is None
    long = kept(index, "x" * 9, 3)
    assert index.excess() == (index.entries()[0], Part.RESIDENT), "all weigh the same, so the oldest"
    index.evict(index.entries()[0], Part.RESIDENT)
    index.evict(index.entries()[0], Part.RESIDENT)
    assert index.entries() == [long]
    assert index.excess() is None


def test_states_weigh_by_their_bytes() -> None:
    index = cache()
    small = index.add("", list(map(ord, "aaaaaaaa")), state=State(100))
    large = index.add("", list(map(ord, "bbbbbbbb")), state=State(1000))
    assert index.victim(resident=False) is large
    assert small is not None
    index.drop(small)
    assert index.stats().state_bytes == 1000


def test_an_entry_in_two_places_gives_up_either_for_nothing() -> None:
    index = cache()
    both, other = kept(index, "a" * 50, 1), kept(index, "bb", 2)
    index.set_state(both, State(1))
    assert index.victim(resident=True) is both
    index.evict(both, Part.RESIDENT)
    assert not both.removed
    assert index.victim(resident=True) is other
    assert index.victim(resident=False) is both


def test_take_or_copy() -> None:
    index = cache(min_tokens=3)
    entry = kept(index, "ssssaaaa", 1)
    whole = index.match("", list(map(ord, "ssssaaaab")))
    part = index.match("", list(map(ord, "ssssb")))
    assert whole is not None
    assert part is not None
    assert index.takes(whole, free_sequences=1)
    assert not index.takes(part, free_sequences=1)
    assert index.takes(part, free_sequences=0), "nothing else could be evicted for a copy"
    cheap = kept(index, "ccc", 2)
    assert not index.takes(part, free_sequences=0), "the tail of four is worth more than three tokens"
    index.drop(cheap)
    kept(index, "d" * 20, 3)
    assert index.takes(part, free_sequences=0), "the tail of four is worth less than twenty tokens"
    index.acquire(entry)
    assert not index.takes(whole, free_sequences=0)


def test_a_take_loses_the_path_of_what_cannot_be_sliced() -> None:
    index = cache(sliceable=False)
    kept(index, "ssss", 1)
    match = index.match("", list(map(ord, "ssssa")))
    assert match is not None
    assert not index.takes(match, free_sequences=1)
    assert index.takes(match, free_sequences=0)
    index.set_state(match.entry, State(1))
    assert index.takes(match, free_sequences=1), "its state stays"


def test_a_quarantined_sequence_is_in_no_entry() -> None:
    index = cache()
    idle, both = kept(index, "abcd", 1), kept(index, "abce", 2)
    index.set_state(both, State(3))
    live = index.add("", [1, 2, 3], sequence=3, live=True)
    assert live is not None
    for sequence in (1, 2, 3):
        index.quarantine(sequence)
    assert idle.removed
    assert live.removed
    assert (both.sequence, both.state) == (None, State(3))
    assert index.quarantined == {1, 2, 3}
    assert index.stats().quarantined == 3


def test_what_makes_no_sense_is_refused() -> None:
    index = cache()
    with pytest.raises(ValueError, match="needs a sequence or a state"):
        index.add("", [1, 2, 3])
    with pytest.raises(ValueError, match="a live one a sequence"):
        index.add("", [1, 2, 3], state=State(1), live=True)
    with pytest.raises(ValueError, match="at least one token"):
        index.add("", [], sequence=1)
    assert index.stats().entries == index.stats().namespaces == 0
    entry = kept(index, "abc", 1)
    for change in (
        lambda: index.grow(entry, [1]),
        lambda: index.truncate(entry, 1),
        lambda: index.keep(entry),
    ):
        with pytest.raises(ValueError, match="only a live entry"):
            change()
    index.set_state(entry, State(1))
    with pytest.raises(ValueError, match="without a state"):
        index.set_state(entry, State(1))


def test_of_an_entry_only_what_was_computed_alone_and_in_the_same_chunks() -> None:
    """Where several hold as much of the tokens, the one of which most is of use."""
    index, plan = cache(), ChunkPlan((4,), 10)
    tokens = list(range(20))
    index.add("", tokens, sequence=1, schedule=(4, 4, 4, 4, 4), alone=False)
    assert index.match("", tokens, plan) is None
    index.add("", tokens[:16], sequence=2, schedule=(4, 3, *(1,) * 9), alone=True)
    index.add("", tokens[:12], sequence=3, schedule=(4, 4, 2, 1, 1), alone=True)
    for limit, expected in ((3, None), (4, (3, 4)), (9, (3, 8)), (12, (3, 12))):
        match = index.match("", tokens[:limit], plan)
        assert (match and (match.entry.sequence, match.length)) == expected, limit
    match = index.match("", tokens[:16], plan)
    assert match is not None
    assert (match.entry.sequence, match.length) == (2, 4), "of those that hold most of the tokens"
    assert found(index, "".join(map(chr, tokens[:12]))) == (3, 12)


def test_what_cannot_be_sliced_is_of_use_if_all_of_it_was_computed_in_the_same_chunks() -> None:
    index, plan = cache(sliceable=False), ChunkPlan((4,), 10)
    tokens = list(range(20))
    index.add("", tokens[:8], sequence=1, schedule=(4, 4), alone=True)
    index.add("", tokens[:9], sequence=2, schedule=(4, 5), alone=True)
    index.add("", tokens[:10], sequence=3, schedule=(4, 4, 2), alone=True)
    index.add("", tokens[:12], sequence=4, schedule=(4, 4, 4), alone=True)
    lengths = [index.match("", tokens[:limit], plan) for limit in (7, 8, 9, 10, 12)]
    assert [match and match.length for match in lengths] == [None, 8, 8, 10, 10]
