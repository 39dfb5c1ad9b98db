"""Decode steps on their way into a native batch: who is batched with whom, and who is waited for."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.engine import Segment
from skippy.protocol import Wave
from skippy.stage.groups import DecodeGroups
from skippy.stage.wave_window import LEAST_SECS, MOST_SECS, WaveWindow
from skippy.stage.waves import WaveQueue
from skippy.stage.work import Work

MANY = 512
EPSILON = 1e-9
"""Times are sums of floats."""


def step_of(sequence: int, wave: Wave | None = None, *, forms_waves: bool = False, rows: int = 1) -> Work:
    segment = Segment(sequence=sequence, position=0, count=rows, tokens=[1] * rows, logits=rows)
    return Work(segment, None, lambda *_: False, decodes=True, wave=wave, forms_waves=forms_waves)


def sequences(rows: list[Work]) -> list[int]:
    return [work.segment.sequence for work in rows]


# -- the window -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "step", "seconds"),
    [
        (0.0004, 1.0, 0.0008),  # twice what the slowest row took
        (0.0, 1.0, LEAST_SECS),
        (0.003, 0.008, 0.004),  # half of a step
        (60.0, 1.0, MOST_SECS),
        (0.001, 0.0, 0.002),
    ],
)
def test_the_window(spread: float, step: float, seconds: float) -> None:
    window = WaveWindow()
    for _ in range(300):
        window.observe(spread)
    assert window.seconds(step) == pytest.approx(seconds, rel=1e-3)


def test_the_slowest_row_counts_and_fades() -> None:
    window = WaveWindow()
    for _ in range(300):
        window.observe(0.0002)
    window.observe(0.002)
    assert window.seconds(1.0) == pytest.approx(0.004)
    for wave in range(1, 100):
        window.observe(0.0002)
        assert window.seconds(1.0) == pytest.approx(0.004 * 0.98**wave)
    for _ in range(50):
        window.observe(0.0002)
    assert window.seconds(1.0) == pytest.approx(0.0004)


def test_a_row_that_hung_counts_for_a_window_and_fades_as_others() -> None:
    window = WaveWindow()
    window.observe(3600.0)
    assert window.seconds(1.0) == MOST_SECS
    for _ in range(150):
        window.observe(0.0002)
    assert window.seconds(1.0) == pytest.approx(2 * MOST_SECS * 0.98**150)


# -- later stages ---------------------------------------------------------------------------------------


def test_a_wave_that_is_whole_runs_at_once_and_alone() -> None:
    queue, one, other = WaveQueue(), Wave(1, 2), Wave(2, 2)
    queue.add(step_of(0, one), 0.0)
    queue.add(step_of(2, other), 0.0)
    assert queue.take_ready(0.0, MANY) == []
    queue.add(step_of(3, other), 0.0)
    queue.add(step_of(1, one), 0.0)
    assert sequences(queue.take_ready(0.0, MANY)) == [0, 1]
    assert sequences(queue.take_ready(0.0, MANY)) == [2, 3]
    assert queue.wait_secs(0.0) is None


def test_what_belongs_to_no_wave_waits_for_nothing() -> None:
    queue = WaveQueue()
    queue.add(step_of(0), 0.0)
    queue.add(step_of(1), 0.0)
    assert queue.wait_secs(0.0) == 0
    assert sequences(queue.take_ready(0.0, MANY)) == [0, 1]


def test_a_wave_of_one_row_waits_for_nothing_and_stays_alone() -> None:
    queue = WaveQueue()
    queue.add(step_of(0), 0.0)
    queue.add(step_of(1, Wave(3, 1)), 0.0)
    queue.add(step_of(2, Wave(4, 1)), 0.0)
    assert queue.wait_secs(0.0) == 0
    assert queue.ready_count(0.0) == 3
    assert [sequences(queue.take_ready(0.0, MANY)) for _ in range(3)] == [[1], [2], [0]]


def test_a_row_that_never_comes_costs_one_window() -> None:
    queue, wave = WaveQueue(), Wave(1, 3)
    queue.add(step_of(0, wave), 1.0)
    due = queue.wait_secs(1.0)
    assert due is not None
    assert due == pytest.approx(MOST_SECS)  # until it is known better
    queue.add(step_of(1, wave), 1.0 + due / 2)
    assert queue.wait_secs(1.0 + due / 2) == pytest.approx(due / 2)  # the second row starts no new window
    assert sequences(queue.take_ready(1.0 + due, MANY)) == [0, 1]
    queue.add(step_of(2, wave), 2.0)
    assert queue.wait_secs(2.0) == 0
    assert sequences(queue.take_ready(2.0, MANY)) == [2]


def test_a_stage_zero_that_starts_again_may_count_its_waves_alike() -> None:
    """The wave that left without a row is another one's by then, whose rows wait for each other."""
    queue, wave = WaveQueue(), Wave(1, 2)
    queue.add(step_of(0, wave), 1.0)
    assert sequences(queue.take_ready(1.1, MANY)) == [0]
    queue.add(step_of(1, wave), 5.0)
    assert queue.take_ready(5.0, MANY) == []
    assert sequences(queue.take_ready(5.1, MANY)) == [1]
    queue.add(step_of(2, wave), 5.2)  # and this one is late
    assert sequences(queue.take_ready(5.2, MANY)) == [2]


def test_rows_that_come_too_late_again_and_again_widen_the_window() -> None:
    queue = WaveQueue()
    for number in range(300):  # they are always together
        for sequence in range(2):
            queue.add(step_of(sequence, Wave(number, 2)), number)
        queue.take_ready(number, MANY)
    assert queue._window.seconds(0.0) == LEAST_SECS
    whole = 0
    for number in range(300, 340):  # and now a millisecond apart
        wave = Wave(number, 2)
        queue.add(step_of(0, wave), number)
        whole += not queue.take_ready(number + 0.00099, MANY)
        queue.add(step_of(1, wave), number + 0.001)
        queue.take_ready(number + 0.001, MANY)
    assert whole == 39  # the first one was too late, and that was enough


def test_without_patience_nothing_is_waited_for() -> None:
    queue = WaveQueue(patient=False)
    queue.add(step_of(0, Wave(1, 3)), 0.0)
    assert sequences(queue.take_ready(0.0, MANY)) == [0]


def test_a_batch_has_as_many_rows_as_the_engine_takes() -> None:
    queue = WaveQueue()
    for sequence in range(3):
        queue.add(step_of(sequence, rows=3), 0.0)
    assert sequences(queue.take_ready(0.0, 7)) == [0, 1]
    assert sequences(queue.take_ready(0.0, 2)) == [2]  # one that is too large on its own runs all the same


def test_what_waits_at_the_end_is_handed_out() -> None:
    queue = WaveQueue(DecodeGroups(3))
    queue.add(step_of(0), 0.0)
    queue.add(step_of(1, Wave(1, 2)), 0.0)
    queue.add(step_of(2, forms_waves=True), 0.0)
    assert sorted(sequences(queue.take_all())) == [0, 1, 2]
    assert queue.wait_secs(9.0) is None
    assert queue.take_all() == []


# -- stage 0 --------------------------------------------------------------------------------------------


def local(*members: int, count: int = 1) -> WaveQueue:
    """Stage 0 with these sessions, whose first steps are here."""
    queue = WaveQueue(DecodeGroups(3, count))
    for sequence in members:
        queue.add(step_of(sequence, forms_waves=True), 0.0)
    return queue


def test_one_session_waits_for_nobody() -> None:
    queue = local(0)
    for now in range(1, 5):
        (work,) = queue.take_ready(now, MANY)
        assert work.wave == Wave(now, 1)
        queue.observe_step(1, 0.1)
        queue.add(step_of(0, forms_waves=True), now + 0.5)
        assert queue.wait_secs(now + 0.5) == 0


def test_a_group_goes_round_together() -> None:
    queue = local(0, 1, 2)
    rows = queue.take_ready(0.0, MANY)
    assert {work.wave for work in rows} == {Wave(1, 3)}
    queue.observe_step(3, 0.1)
    for sequence in range(3):
        assert queue.take_ready(1.0, MANY) == []
        queue.add(step_of(sequence, forms_waves=True), 1.0)
    rows = queue.take_ready(1.0, MANY)
    assert {work.wave for work in rows} == {Wave(2, 3)}
    assert sequences(rows) == [0, 1, 2]


def test_groups_do_not_mix() -> None:
    queue = local(0, 1, 2, 3, count=2)
    one, other = queue.take_ready(0.0, MANY), queue.take_ready(0.0, MANY)
    # The first session was alone when it joined, and those behind it the upper half of what was there.
    assert [sequences(one), sequences(other)] == [[0], [1, 2, 3]]
    for sequence in range(4):
        queue.add(step_of(sequence, forms_waves=True), 1.0)
    one, other = queue.take_ready(1.0, MANY), queue.take_ready(1.0, MANY)
    assert [sequences(one), sequences(other)] == [[0, 1], [2, 3]]
    assert [work.wave for work in [*one, *other]] == [Wave(3, 2), Wave(3, 2), Wave(4, 2), Wave(4, 2)]


def test_one_that_hangs_is_waited_for_a_window_and_then_goes_on_later() -> None:
    queue = local(0, 1)
    queue.take_ready(0.0, MANY)
    queue.observe_step(2, 0.1)
    for sequence in (0, 1):
        queue.add(step_of(sequence, forms_waves=True), 1.0)
    queue.take_ready(1.0, MANY)
    queue.observe_step(2, 0.1)
    queue.add(step_of(0, forms_waves=True), 2.0)
    wait = queue.wait_secs(2.0)
    assert wait is not None
    assert 0 < wait <= MOST_SECS + EPSILON
    (alone,) = queue.take_ready(2.0 + wait, MANY)
    assert alone.wave == Wave(3, 1)
    queue.observe_step(1, 0.1)
    queue.add(step_of(1, forms_waves=True), 2.5)  # it waits for the other to come round
    assert queue.take_ready(2.6, MANY) == []
    queue.add(step_of(0, forms_waves=True), 3.0)
    assert sorted(sequences(queue.take_ready(3.0, MANY))) == [0, 1]


def test_one_that_has_left_is_not_waited_for() -> None:
    queue = local(0, 1)
    queue.take_ready(0.0, MANY)
    queue.observe_step(2, 0.1)
    queue.add(step_of(0, forms_waves=True), 1.0)
    assert queue.take_ready(1.0, MANY) == []
    queue.leave(1)
    assert sequences(queue.take_ready(1.0, MANY)) == [0]


class Rings(DecodeGroups):
    """Notes what it is told of rings."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.seen: list[float] = []

    def observe_ring(self, batch_size: int, seconds: float) -> None:
        self.seen.append(seconds)


def test_rings_that_may_have_met_prefill_do_not_count() -> None:
    """Prefill that has left this stage may still be ahead, until a wave sent behind it is back."""
    groups = Rings()
    queue = WaveQueue(groups)
    queue.add(step_of(0, forms_waves=True), 0.0)

    def ring(start: float, seconds: float, *, prefill: bool = False) -> None:
        queue.take_ready(start, MANY)
        queue.observe_step(1, 0.0)
        if prefill:
            queue.disturbed()
        queue.add(step_of(0, forms_waves=True), start + seconds)

    ring(1.0, 0.5)
    assert groups.seen == [0.5]
    ring(2.0, 0.7, prefill=True)  # it may meet the prefill
    ring(3.0, 0.8)  # or wait behind it
    assert groups.seen == [0.5]
    ring(4.0, 0.6)
    assert groups.seen == pytest.approx([0.5, 0.6])
    queue.disturbed()
    queue.take_ready(5.0, MANY)
    queue.observe_step(1, 0.0)
    queue.leave(0)  # the wave that was to come back does not
    queue.add(step_of(0, forms_waves=True), 6.0)
    ring(6.0, 0.9)
    ring(7.0, 0.4)
    assert groups.seen == pytest.approx([0.5, 0.6, 0.4])


def test_no_stage_is_told_to_wait_for_a_row_that_nobody_wants() -> None:
    queue = local(0, 1)
    gone = step_of(2, forms_waves=True)
    gone.cancelled = True
    queue.add(gone, 0.0)
    rows = queue.take_ready(0.0, MANY)
    assert sequences(rows) == [0, 1, 2]  # it is handed out all the same, to be ended
    assert rows[0].wave == Wave(1, 2)


@pytest.mark.parametrize("alone", [False, True])
def test_a_row_that_was_given_up_while_it_waited_is_not_expected_back(alone: bool) -> None:
    queue = local() if alone else local(0)
    gone = step_of(1, forms_waves=True)
    queue.add(gone, 0.0)
    gone.cancelled = True
    queue.leave(1)  # before its row is taken: nobody will say so again
    assert gone in queue.take_ready(0.0, MANY)
    queue.observe_step(1, 0.1)
    for now in range(1, 4):
        queue.add(step_of(0, forms_waves=True), now)
        assert sequences(queue.take_ready(now, MANY)) == [0]
        queue.observe_step(1, 0.1)


class Observed(DecodeGroups):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.rings: list[tuple[int, float]] = []
        self.steps: list[tuple[int, float]] = []

    def observe_step(self, batch_size: int, seconds: float) -> None:
        self.steps.append((batch_size, seconds))

    def observe_ring(self, batch_size: int, seconds: float) -> None:
        self.rings.append((batch_size, seconds))


def test_a_ring_is_measured_from_the_end_of_its_step() -> None:
    groups = Observed()
    queue = WaveQueue(groups)
    for sequence in (0, 1):
        queue.add(step_of(sequence, forms_waves=True), 0.0)
    queue.take_ready(0.0, MANY)
    queue.observe_step(2, 0.25)
    queue.add(step_of(0, forms_waves=True), 1.0)
    assert groups.rings == []
    queue.add(step_of(1, forms_waves=True), 1.25)
    assert groups.rings == [(2, 1.0)]
    assert groups.steps == [(2, 0.25)]


def test_rings_that_tell_nothing_are_not_measured() -> None:
    groups = Observed()
    queue = WaveQueue(groups)
    for sequence in (0, 1):
        queue.add(step_of(sequence, forms_waves=True), 0.0)
    queue.take_ready(0.0, MANY)  # computed together with prefill, so nothing is said of its step
    for sequence in (0, 1):
        queue.add(step_of(sequence, forms_waves=True), 1.0)
    queue.take_ready(1.0, MANY)
    queue.observe_step(2, 0.25)
    queue.leave(1)  # one of its rows does not come back
    queue.add(step_of(0, forms_waves=True), 2.0)
    queue.add(step_of(5, rows=4), 2.0)
    assert len(queue.take_ready(2.0, MANY)) == 1  # a verify window is no wave of a group
    queue.observe_step(4, 0.5)
    assert groups.rings == []
    assert groups.steps == [(2, 0.25)]


# -- in any order ---------------------------------------------------------------------------------------


class ArrivingMachine(RuleBasedStateMachine):
    """A later stage: rows of waves, whole or not, in any order, and rows of none."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaveQueue()
        self.now = 0.0
        self.next = 0
        self.here: dict[Work, float] = {}
        """Rows that wait, and since when."""
        self.late: set[Wave] = set()
        """Waves that have run, with or without all their rows."""

    def arrive(self, wave: Wave | None, rows: int = 1) -> None:
        work = step_of(self.next, wave, rows=rows)
        self.next += 1
        self.queue.add(work, self.now)
        self.here[work] = self.now

    @rule(number=st.integers(0, 5), rows=st.integers(1, 4), count=st.integers(1, 4))
    def arrive_together(self, number: int, rows: int, count: int) -> None:
        for _ in range(min(rows, count)):
            self.arrive(Wave(number, rows))

    @rule(rows=st.integers(1, 5))
    def arrive_alone(self, rows: int) -> None:
        self.arrive(None, rows)

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.001, 0.01]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0, 0.1))
    def compute(self, seconds: float) -> None:
        self.queue.observe_step(1, seconds)

    @rule(most=st.integers(4, 20))
    def take(self, most: int) -> None:
        wait = self.queue.wait_secs(self.now)
        rows = self.queue.take_ready(self.now, most)
        assert bool(rows) == (wait == 0)
        assert sum(work.rows_left for work in rows) <= max(most, rows[0].rows_left if rows else 0)
        waves = {work.wave for work in rows if work.wave is not None and work.wave.rows > 1}
        if waves:
            assert {work.wave for work in rows} == waves
            assert len(waves) == 1
        for work in rows:
            del self.here[work]  # each comes out once

    @invariant()
    def nobody_waits_for_longer_than_a_window(self) -> None:
        wait = self.queue.wait_secs(self.now)
        assert (wait is None) == (not self.here)
        if wait is not None:
            assert 0 <= wait <= MOST_SECS + EPSILON
            assert self.now + wait <= max(self.now, min(self.here.values()) + MOST_SECS) + EPSILON

    def teardown(self) -> None:
        assert set(self.queue.take_all()) == set(self.here)


class LocalMachine(RuleBasedStateMachine):
    """Stage 0: sessions whose steps go round, hang, leave and come again."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = DecodeGroups(3)
        self.queue = WaveQueue(self.groups)
        self.now = 0.0
        self.here: dict[int, Work] = {}
        self.away: set[int] = set()
        self.ring = 0.0

    @rule(sequence=st.integers(0, 7))
    def step(self, sequence: int) -> None:
        """A session's next step is here: its first, or as its last has come round."""
        if sequence not in self.here:
            self.away.discard(sequence)
            self.here[sequence] = step_of(sequence, forms_waves=True)
            self.queue.add(self.here[sequence], self.now)

    @precondition(lambda self: self.away)
    @rule()
    def all_come_round(self) -> None:
        for sequence in sorted(self.away):
            self.step(sequence)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.away)))
        self.away.discard(sequence)
        self.queue.leave(sequence)

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 0.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0.0001, 0.05), alone=st.booleans())
    def run(self, seconds: float, alone: bool) -> None:
        wait = self.queue.wait_secs(self.now)
        rows = self.queue.take_ready(self.now, MANY)
        assert bool(rows) == (wait == 0)
        if not rows:
            return
        waves = {work.wave for work in rows}
        assert len(waves) == 1
        (wave,) = waves
        assert wave is not None
        assert wave.rows == len(rows)
        for work in rows:
            assert self.here.pop(work.segment.sequence) is work
            self.away.add(work.segment.sequence)
        self.now += seconds
        if alone:
            self.queue.observe_step(len(rows), seconds)

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        """Rows that are here run in the end, whoever does not come back."""
        wait = self.queue.wait_secs(self.now)
        assert (wait is None) == (not self.here)
        assert wait is None or wait < 1e6

    def teardown(self) -> None:
        for _ in range(20):
            wait = self.queue.wait_secs(self.now)
            if wait is None:
                break
            self.now += wait + 1e-9
            self.run(0.001, True)
        assert not self.here


TestArriving = ArrivingMachine.TestCase
TestLocal = LocalMachine.TestCase
