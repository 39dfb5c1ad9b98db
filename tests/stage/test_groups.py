"""Decode groups: who is in which, and when that may change."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.stage.groups import DecodeGroups
from skippy.stage.ring_model import Division, RingModel


def sizes(groups: DecodeGroups) -> list[int]:
    return [groups.size(group) for group in range(groups.count)]


def test_neighbours_are_dealt_to_one_group() -> None:
    """By rank, whatever the ids are and in whatever order they came."""
    groups = DecodeGroups(3, count=3)
    for session in (9, 2, 30, 4, 3, 7, 8):
        groups.join(session)
    ranked = (2, 3, 4, 7, 8, 9, 30)
    assert [groups.between_waves(session) for session in ranked] == [0, 0, 0, 1, 1, 2, 2]
    assert [groups.group_of(session) for session in ranked] == [0, 0, 0, 1, 1, 2, 2]
    assert sizes(groups) == [3, 2, 2]
    assert len(groups) == 7
    groups.leave(3)
    assert 3 not in groups
    assert sizes(groups) == [2, 2, 2]
    assert groups.join(5) == 0  # behind 2 and 4
    assert sizes(groups) == [3, 2, 2]


def test_one_that_joins_moves_nobody() -> None:
    groups = DecodeGroups(3, count=2)
    assert [groups.join(session) for session in range(4)] == [0, 1, 1, 1]
    assert sizes(groups) == [1, 3]
    assert [groups.group_of(session) for session in range(4)] == [0, 1, 1, 1]
    assert groups.between_waves(1) == 0
    assert sizes(groups) == [2, 2]


def test_there_are_no_more_groups_than_sessions() -> None:
    groups = DecodeGroups(3, count=4)
    assert groups.count == 1
    for session in range(6):
        groups.join(session)
        assert groups.count == min(4, session + 1)
    for session in range(5):
        groups.leave(session)
    assert groups.count == 1
    assert groups.between_waves(5) == 0
    assert sizes(groups) == [1]


def test_a_session_moves_between_its_waves_alone() -> None:
    groups = DecodeGroups(3, count=2)
    for session in range(6):
        groups.join(session)
    assert [groups.between_waves(session) for session in range(6)] == [0, 0, 0, 1, 1, 1]
    groups.leave(0)
    groups.leave(1)
    assert sizes(groups) == [1, 3]
    assert [groups.group_of(session) for session in (2, 3, 4, 5)] == [0, 1, 1, 1]
    assert groups.between_waves(5) == 1  # it is among the last two of four
    assert groups.between_waves(2) == 0
    assert sizes(groups) == [1, 3]
    assert groups.between_waves(3) == 0
    assert sizes(groups) == [2, 2]


def test_misuse_is_an_error() -> None:
    groups = DecodeGroups(3)
    groups.join(7)
    with pytest.raises(ValueError, match="session 7 decodes already, in group 0"):
        groups.join(7)
    assert len(groups) == 1
    for call in (groups.leave, groups.between_waves, groups.group_of):
        with pytest.raises(KeyError):
            call(8)


def test_a_fixed_number_stays() -> None:
    groups = DecodeGroups(3, count=1)
    for session in range(8):
        groups.join(session)
    for _ in range(200):
        groups.observe_step(8, 1.0)
        groups.observe_ring(8, 2.0)
    assert groups.count == 1


def test_a_number_is_chosen_once_its_batch_was_measured() -> None:
    groups = DecodeGroups(3)
    for session in range(8):
        groups.join(session)
    for _ in range(8):
        groups.observe_step(8, 1.0)
        assert groups.count == 1
        groups.observe_ring(8, 2.0)
    assert groups.count == 2
    for _ in range(100):  # smaller waves go behind the largest, so their rings say nothing
        groups.observe_step(3, 1.0)
        groups.observe_ring(3, 2.0)
    assert groups.count == 2


def test_rings_without_sessions_or_steps_are_no_error() -> None:
    """The last session may leave while its row is under way, and a clock may stand still."""
    groups = DecodeGroups(1)
    groups.observe_ring(1, 0.0)
    groups.join(1)
    for _ in range(50):
        groups.observe_ring(1, 0.5)
        groups.observe_step(1, 0.0)
        groups.observe_ring(1, 0.0)
    groups.leave(1)
    groups.observe_ring(1, 0.0)
    assert groups.count == 1


def test_what_was_found_for_so_many_sessions_is_taken_up_again() -> None:
    groups = DecodeGroups(3)
    for session in range(8):
        groups.join(session)
    for _ in range(8):
        groups.observe_step(8, 1.0)
        groups.observe_ring(8, 2.0)
    assert groups.count == 2
    for _ in range(8):
        groups.observe_step(4, 0.6)
        groups.observe_ring(4, 1.2)
    for session in range(1, 8):
        groups.leave(session)
    for _ in range(20):
        groups.observe_step(1, 0.3)
        groups.observe_ring(1, 0.6)
    assert groups.count == 1
    for session in range(1, 8):
        groups.join(session)
    assert groups.count == 2


def test_no_more_stages_compute_at_once_than_can() -> None:
    """Three stages on two processors: four waves of two, each half of a wave of four, gain nothing."""
    model = RingModel(3, 2)
    for _ in range(40):
        model.observe_step(1, 8, 8.0)
        model.observe_ring(Division(8, 1), 16.0)
        model.observe_step(2, 4, 4.0)
        model.observe_ring(Division(8, 2), 8.0)
    assert model.width == pytest.approx(2)
    assert model.rate(Division(8, 2)) == pytest.approx(8 / 12)
    assert model.rate(Division(8, 4)) == pytest.approx(8 / 12)
    for _ in range(40):  # a wave that was held up makes the chain no wider
        model.observe_ring(Division(8, 2), 80.0)
    assert model.width <= 2


class GroupsMachine(RuleBasedStateMachine):
    """Any order of events: nobody is lost, nobody moves unasked, and neighbours come together."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = DecodeGroups(3)
        self.places: dict[int, int] = {}

    @rule(session=st.integers(0, 19))
    def join(self, session: int) -> None:
        if session not in self.places:
            self.places[session] = self.groups.join(session)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.places)))
        self.groups.leave(session)
        del self.places[session]

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def return_row(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.places)))
        self.places[session] = self.groups.between_waves(session)

    @rule(step=st.floats(0, 1), ring=st.floats(0, 10), rows=st.integers(1, 9), times=st.integers(1, 40))
    def measure(self, step: float, ring: float, rows: int, times: int) -> None:
        before = self.groups.count
        for _ in range(times):
            self.groups.observe_step(rows, step)
            self.groups.observe_ring(rows, ring)
            assert self.groups.count <= 2 * before
            before = self.groups.count

    @precondition(lambda self: self.places)
    @rule(step=st.floats(0, 1), ring=st.floats(0, 10))
    def measure_the_largest(self, step: float, ring: float) -> None:
        self.measure(step, ring, -(-len(self.places) // self.groups.count), 10)

    @invariant()
    def everybody_is_where_they_were_put(self) -> None:
        assert {each: self.groups.group_of(each) for each in self.places} == self.places
        assert len(self.groups) == len(self.places)
        assert 1 <= self.groups.count <= max(1, len(self.places))
        taken = list(self.places.values())
        assert all(self.groups.size(group) == taken.count(group) for group in range(20))

    def teardown(self) -> None:
        ranked = [self.groups.between_waves(session) for session in sorted(self.places)]
        assert ranked == sorted(ranked)
        if self.places:
            assert max(sizes(self.groups)) - min(sizes(self.groups)) <= 1
            assert sum(sizes(self.groups)) == len(self.places)


TestGroups = GroupsMachine.TestCase


# -- the model ------------------------------------------------------------------------------------------


def measured(*rings: tuple[int, float, float]) -> RingModel:
    """A model of three stages that has seen (rows, step, ring behind it) with one group."""
    model = RingModel(3)
    for rows, step, ring in rings:
        for _ in range(40):
            model.observe_step(1, rows, step)
            model.observe_ring(Division(rows, 1), ring)
    return model


def test_with_one_batch_size_the_stages_are_taken_to_be_equal() -> None:
    model = measured((4, 1.0, 5.0))
    assert model.delay == pytest.approx(3.0)
    assert model.step(2) == pytest.approx(0.75)
    assert model.ring(2) == pytest.approx(3 + 3 * 0.75)


def test_with_one_batch_size_a_fast_rest_of_the_chain_has_no_delay() -> None:
    model = measured((4, 3.0, 2.0))
    assert model.delay == 0
    assert model.ring(2) == pytest.approx(5 * 0.75)


def test_with_two_batch_sizes_delay_and_compute_are_told_apart() -> None:
    """Five times the compute of stage 0, and 7 seconds under way."""
    model = measured((2, 3.0, 19.0), (6, 7.0, 35.0))
    assert model.step(4) == pytest.approx(5.0)
    assert model.delay == pytest.approx(7.0)
    assert model.ring(4) == pytest.approx(32.0)
    assert model.ring(10) == pytest.approx(42 + 0.7 * 20)  # beyond what was measured, it tapers off


def test_what_was_measured_counts_more_than_the_line() -> None:
    model = measured((1, 1.0, 2.0), (2, 1.9, 3.8), (8, 4.0, 8.0))
    assert model.ring(2) == pytest.approx(5.7)
    assert model.rate(Division(8, 1)) == pytest.approx(8 / 12)


def test_a_chain_that_is_busy_shows_how_wide_it_is() -> None:
    """Two groups of two take as long as if nothing overlapped: one processor for all."""
    model = measured((1, 1.0, 2.0), (2, 1.5, 3.0), (4, 2.5, 5.0))
    assert model.width == pytest.approx(3, abs=0.1)
    for _ in range(100):
        model.observe_step(2, 2, 3.0)
        model.observe_ring(Division(4, 2), 6.0)
    assert model.width == pytest.approx(1, abs=0.1)
    assert model.rate(Division(4, 2)) == pytest.approx(4 / 9)
    assert model.rate(Division(4, 4)) == pytest.approx(4 / 12, rel=0.1)
    assert model.ring(2) == pytest.approx(4.5)  # not what the waves took that waited


def test_divisions() -> None:
    assert Division(8, 3).largest == 3
    assert Division(8, 3).sum(float) == 8
    assert Division(8, 3).sum(lambda rows: rows**2) == 9 + 9 + 4
    assert Division(9, 3).sum(lambda rows: rows**2) == 27
