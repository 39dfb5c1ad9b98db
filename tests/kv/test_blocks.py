"""States in RAM: what comes back, what is shared, what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.kv.blocks import BlockStore, StateRef, digest_of, digest_of_pieces

STATES = st.lists(st.sampled_from([b"aaaa", b"bbbb", b"cccc", b"dd", b""]), max_size=6).map(b"".join)


@given(st.binary(max_size=100), st.integers(1, 40))
def test_a_state_comes_back_in_blocks(state: bytes, block_bytes: int) -> None:
    store = BlockStore(1000, block_bytes=block_bytes)
    ref = store.put(memoryview(state))
    assert ref is not None
    assert ref.size == len(state)
    pieces = store.get(ref)
    assert b"".join(pieces) == state
    assert all(len(piece) == block_bytes for piece in pieces[:-1])
    assert ref.digests == tuple(map(digest_of, pieces))
    assert digest_of_pieces(pieces) == (digest_of(state), len(state))


def test_equal_blocks_are_kept_once_and_go_with_the_last_state() -> None:
    store = BlockStore(100, block_bytes=4)
    one, two = store.put(b"aaaabbbbaaaa"), store.put(b"aaaacccc")
    assert one is not None
    assert two is not None
    stats = store.stats()
    assert (stats.states, stats.blocks, stats.logical_bytes, stats.physical_bytes) == (2, 3, 20, 12)
    assert store.unique_bytes(one) == 4
    assert store.drop(one) == 4
    assert b"".join(store.get(two)) == b"aaaacccc"
    assert store.unique_bytes(two) == store.drop(two) == 8
    assert store.used_bytes == 0
    assert store.stats().logical_bytes == 0


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    store = BlockStore(8, block_bytes=4)
    kept = store.put(b"aaaabbbb")
    assert kept is not None
    assert store.put(b"aaaac") is None
    assert store.used_bytes == 8
    shared = store.put(b"bbbbaaaabbbb")  # nothing new in it
    assert shared is not None
    assert store.stats().refused == 1
    store.drop(kept)
    store.drop(shared)
    assert store.put(b"123456789") is None
    assert store.put(b"12345678") is not None


def test_without_a_budget_everything_fits() -> None:
    store = BlockStore(0, block_bytes=4)
    assert all(store.put(bytes([n]) * 4) for n in range(50))
    assert store.used_bytes == 200


def test_dropping_twice_is_refused_and_harms_nobody() -> None:
    store = BlockStore(100, block_bytes=4)
    one, two = store.put(b"aaaa"), store.put(b"aaaa")
    assert one is not None
    assert two is not None
    store.drop(one)
    for wrong in (one, StateRef(4, (digest_of(b"aaaa"),))):
        with pytest.raises(LookupError, match="a state of 4 bytes that this store does not keep"):
            store.drop(wrong)
        with pytest.raises(LookupError):
            store.get(wrong)
    assert store.get(two) == [b"aaaa"]


def test_blocks_do_not_keep_the_buffer_they_came_in() -> None:
    buffer = bytearray(b"aaaabbbb")
    store = BlockStore(100, block_bytes=4)
    ref = store.put(buffer)
    assert ref is not None
    buffer[:] = bytes(8)
    buffer.clear()  # which a view of it would forbid
    assert store.get(ref) == [b"aaaa", b"bbbb"]


class Model(RuleBasedStateMachine):
    """Against a model that keeps whole states."""

    BUDGET = 40

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(self.BUDGET, block_bytes=4)
        self.kept: dict[StateRef, bytes] = {}

    def blocks(self, states: list[bytes]) -> int:
        return sum(len(b) for b in {s[i : i + 4] for s in states for i in range(0, len(s), 4)})

    @rule(state=STATES)
    def put(self, state: bytes) -> None:
        fits = self.blocks([*self.kept.values(), state]) <= self.BUDGET
        ref = self.store.put(state)
        assert (ref is not None) == fits
        if ref is not None:
            self.kept[ref] = state

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(list(self.kept)))
        del self.kept[ref]
        before = self.store.used_bytes
        assert self.store.drop(ref) == before - self.blocks(list(self.kept.values()))

    @invariant()
    def same(self) -> None:
        for ref, state in self.kept.items():
            assert b"".join(self.store.get(ref)) == state
        stats = self.store.stats()
        assert stats.physical_bytes == self.store.used_bytes == self.blocks(list(self.kept.values()))
        assert stats.logical_bytes == sum(map(len, self.kept.values()))
        assert stats.states == len(self.kept)


TestModel = Model.TestCase
