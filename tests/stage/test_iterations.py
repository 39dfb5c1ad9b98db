"""Which rows run together, in what order, and what becomes of each work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skippy.engine import EngineError, Segment, StageEngine
from skippy.engine.toy import ToyEngine
from skippy.stage.clock import measured_on
from skippy.stage.iterations import LEAST_PREFILL_ROWS, MOST_PREFILL_ROWS
from skippy.stage.work import Work, WorkCancelled
from tests.support.iterations import RecordingEngine, bench, ended_well

SLICE = LEAST_PREFILL_ROWS


@pytest.fixture
def clock() -> Iterator[list[RecordingEngine]]:
    """Compute times are those of the last engine in the list, and 0 without one."""
    engines: list[RecordingEngine] = []
    with measured_on(lambda: (engines[-1].now_us + 0.5) / 1e6 if engines else 0.0):
        yield engines


pytestmark = pytest.mark.usefixtures("no_compute_time")

# -- who runs when --------------------------------------------------------------------------------------


def test_steps_of_several_sessions_share_a_call() -> None:
    b = bench()
    works = b.steps(0, 1, 2)
    assert b.run() == [[(0, 1), (1, 1), (2, 1)]]
    assert ended_well(*works)
    assert [work.batch_size for work in works] == [3, 3, 3]
    assert b.iterations.wait_secs() is None


def test_steps_go_first_and_prefill_has_its_turn_between_them() -> None:
    b = bench()
    prompt = b.work(9, 40)
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1)]]
    b.steps(0, 1)
    assert b.run() == [[(9, SLICE)]]  # the steps that were ready have run, so these come second
    assert b.run() == [[(0, 1), (1, 1)]]
    assert b.run() == [[(9, SLICE)]]  # no step is there, so nothing is waited for
    assert not prompt.over
    b.steps(1)
    assert b.run() == [[(1, 1)]]
    b.steps(1)
    assert b.run(2) == [[(9, 40 - 2 * SLICE)], [(1, 1)]]
    assert ended_well(prompt)
    assert b.iterations.wait_secs() is None


def test_many_that_wait_for_their_prompts_do_not_wait_long_for_one_that_decodes() -> None:
    """Slices are as many times larger as there are more that wait."""
    b = bench()
    prompts = [b.work(sequence, 40) for sequence in range(3, 8)]
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1)]]
    assert b.run() == [[(3, 2 * SLICE)]]  # five wait, two decode
    b.steps(0, 1)
    assert b.run(2) == [[(0, 1), (1, 1)], [(3, 8), (4, 24)]]
    b.iterations.leave(1)
    b.steps(0)
    assert b.run(2) == [[(0, 1)], [(4, 16), (5, 40), (6, 8)]]
    assert ended_well(*prompts[:3])
    assert not any(prompt.over for prompt in prompts[3:])
    b.steps(0)
    assert b.run(2) == [[(0, 1)], [(6, 32)]]  # two wait, one decodes
    assert b.run() == [[(7, SLICE)]]


def test_chunks_run_whole_while_nobody_else_decodes() -> None:
    b = bench()
    b.work(9, 700)
    assert b.run() == [[(9, 700)]]
    b.steps(9)
    b.run()
    b.work(9, 40)  # its own steps do not count
    assert b.run() == [[(9, 40)]]
    b.steps(0)
    b.run()
    b.work(9, 40)
    assert b.run() == [[(9, SLICE)]]
    b.iterations.leave(0)
    b.iterations.leave(9)
    assert b.run() == [[(9, 40 - SLICE)]]


def test_prefill_of_several_sessions_shares_a_call() -> None:
    b = bench()
    works = [b.work(sequence, 200) for sequence in range(3)]
    rest = 600 - MOST_PREFILL_ROWS
    assert b.run_all() == [[(0, 200), (1, 200), (2, 200 - rest)], [(2, rest)]]
    assert ended_well(*works)
    assert [work.batch_size for work in works] == [3, 3, 1]


def test_a_long_chunk_runs_alone_and_a_session_is_in_a_call_once() -> None:
    b = bench()
    b.work(0, MOST_PREFILL_ROWS + 1)
    b.work(1, 5)
    b.work(1, 6)
    b.work(2, 7)
    assert b.run_all() == [[(0, MOST_PREFILL_ROWS + 1)], [(1, 5)], [(1, 6), (2, 7)]]


def test_no_batch_is_larger_than_the_engine_takes() -> None:
    b = bench(RecordingEngine(max_batch=32))
    b.work(0, 20)
    b.work(1, 20)
    assert b.run_all() == [[(0, 20), (1, 12)], [(1, 8)]]


def test_rows_that_want_logits_each_are_not_cut() -> None:
    b = bench()
    b.steps(0, 8, 9)
    b.run()
    b.work(1, 10)
    b.work(2, 30, logits=30)
    b.work(3, 4)
    assert b.run_all() == [[(1, 10)], [(2, 30)], [(3, 4)]]
    assert len(b.logits[2]) == 30


# -- both in one batch ----------------------------------------------------------------------------------


def test_prefill_beside_steps() -> None:
    b = bench(mixed_rows=24)
    prompt = b.work(9, 40, logits=1)
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1), (9, 22)]]
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1), (9, 18)]]
    assert ended_well(prompt)
    alone = bench()
    alone.work(9, 40, logits=1)
    alone.run_all()
    assert b.logits[9] == alone.logits[9]


def test_an_engine_that_cannot_mix_is_not_asked_to() -> None:
    b = bench(RecordingEngine(can_mix=False), mixed_rows=24)
    b.work(9, 20)
    b.steps(0, 1)
    assert b.run_all() == [[(0, 1), (1, 1)], [(9, SLICE)], [(9, 20 - SLICE)]]


def test_where_steps_fill_the_batch_prefill_still_has_its_turn() -> None:
    b = bench(mixed_rows=2)
    b.work(9, 2 * SLICE)
    b.steps(0, 1)
    for _ in range(2):
        assert b.run() == [[(0, 1), (1, 1)]]
        b.steps(0, 1)  # there are always as many as fit
        assert b.run() == [[(9, SLICE)]]


# -- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_end", [2, 4], ids=["middle", "last"])
def test_a_bad_row_fails_alone(layer_end: int) -> None:
    b, undisturbed = bench(RecordingEngine(layer_end)), bench(RecordingEngine(layer_end))
    b.engine.bad = {1}
    works, others = b.steps(0, 1, 2), undisturbed.steps(0, 2)
    assert b.run() == [[(0, 1), (1, 1), (2, 1)], [(0, 1)], [(1, 1)], [(2, 1)]]
    undisturbed.run_all()
    assert isinstance(works[1].error, EngineError)
    assert str(works[1].error) == "sequence 1 is bad"
    assert ended_well(works[0], works[2])
    assert b.logits == undisturbed.logits
    assert [works[0].output, works[2].output] == [other.output for other in others]
    assert [b.engine.length(sequence) for sequence in range(3)] == [1, 0, 1]


def test_a_chunk_that_fails_in_the_middle_does_not_go_on() -> None:
    b = bench()
    b.steps(0)
    b.run()
    prompt = b.work(9, 40)
    b.run()
    b.engine.bad = {9}
    assert b.run_all() == [[(9, SLICE)]]
    assert isinstance(prompt.error, EngineError)


def test_what_must_come_first_may_fail() -> None:
    def before(_: StageEngine) -> None:
        raise EngineError("cannot be trimmed")

    b = bench()
    segment = Segment(3, 0, 1, tokens=[1], logits=1)
    work = Work(segment, None, lambda *_: False, before=before, decodes=True)
    b.iterations.add(work)
    others = b.steps(0)
    assert b.run_all() == [[(0, 1)]]
    assert str(work.error) == "cannot be trimmed"
    assert ended_well(*others)


def test_what_nobody_wants_any_more_does_not_run() -> None:
    b = bench()
    step, other = b.steps(0, 1)
    prompt = b.work(9, 40)
    step.cancelled = prompt.cancelled = True
    assert b.run_all() == [[(1, 1)]]
    assert isinstance(step.error, WorkCancelled)
    assert isinstance(prompt.error, WorkCancelled)
    assert b.ended == [other]


def test_a_chunk_cancelled_between_its_slices_ends() -> None:
    b = bench()
    b.steps(0)
    b.run()
    prompt = b.work(9, 40)
    b.run()
    prompt.cancelled = True
    assert b.run_all() == []
    assert isinstance(prompt.error, WorkCancelled)
    assert b.engine.length(9) == SLICE


def test_a_batch_is_interrupted_when_nobody_wants_any_of_it() -> None:
    b = bench()
    works = b.steps(0, 1, 2)
    waiting = b.work(9, 40)

    def leave() -> None:
        for work in works:
            work.cancelled = True
            b.iterations.interrupt(work)

    b.engine.during = leave
    assert b.run() == [[(0, 1), (1, 1), (2, 1)]]
    assert all(isinstance(work.error, WorkCancelled) for work in works)
    assert [b.engine.length(sequence) for sequence in range(3)] == [0, 0, 0]
    b.engine.during = lambda: b.iterations.interrupt(works[0])  # it is not in this batch
    assert b.run() == [[(9, 40)]]
    assert ended_well(waiting)


def test_a_batch_goes_on_while_one_of_it_is_wanted() -> None:
    b = bench()
    gone, wanted = b.steps(0, 1)

    def leave() -> None:
        gone.cancelled = True
        b.iterations.interrupt(gone)

    b.engine.during = leave
    assert b.run() == [[(0, 1), (1, 1)]]
    assert ended_well(gone, wanted)
    b.iterations.interrupt(gone)  # over long since


def test_the_end_cancels_what_waits() -> None:
    b = bench()
    waiting = [*b.steps(0, 1), b.work(8, 40), b.work(9, 40)]
    woken = b.iterations.end()
    assert sorted(map(id, woken)) == sorted(map(id, waiting))
    assert all(isinstance(work.error, WorkCancelled) for work in waiting)
    assert b.engine.calls == []
    assert b.iterations.wait_secs() is None


# -- whose rows are whose -------------------------------------------------------------------------------


def test_boundary_rows_land_in_each_works_own_output() -> None:
    b = bench(RecordingEngine(2), mixed_rows=24)
    works = [b.work(9, 40), *b.steps(0, 1), b.work(8, 5)]
    assert b.run_all()[0] == [(0, 1), (1, 1), (9, 22)]
    assert ended_well(*works)
    for work in works:
        assert work.output is not None
        expected = memoryview(bytearray(len(work.output)))
        ToyEngine(0, 2, 4, max_sequences=16).decode([work.segment], expected)
        assert work.output == expected


def test_logits_rows_are_those_of_the_work() -> None:
    b, alone = bench(), bench()
    b.steps(0)
    b.work(1, 3, decodes=True, logits=3)
    b.work(2, 2, decodes=True)
    b.steps(3)
    assert b.run() == [[(0, 1), (1, 3), (2, 2), (3, 1)]]
    alone.steps(0)
    alone.run()
    alone.work(1, 3, decodes=True, logits=3)
    alone.run()
    alone.steps(3)
    alone.run()
    assert b.logits == alone.logits | {2: []}


# -- how much at a time ---------------------------------------------------------------------------------


def test_slices_grow_while_they_are_cheap_and_shrink_again(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.steps(0)
    b.run()
    b.work(9, 1000)
    b.engine.slice_us = b.engine.step_us // 2
    assert b.run(3) == [[(9, 16)], [(9, 32)], [(9, 64)]]
    b.engine.slice_us = b.engine.step_us + 1
    assert b.run(5) == [[(9, 128)], [(9, 64)], [(9, 32)], [(9, 16)], [(9, 16)]]
    b.engine.slice_us = b.engine.step_us  # neither cheap nor dear
    assert b.run(2) == [[(9, 16)], [(9, 16)]]


def test_slices_do_not_grow_beyond_a_batch(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.steps(0)
    b.run()
    b.work(9, 2000)
    b.engine.slice_us = 1
    assert [call[0][1] for call in b.run(7)] == [16, 32, 64, 128, 256, 512, 512]


def test_time_is_shared_out_by_rows(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.engine.slice_us = 1000
    works = [b.work(0, 30), b.work(1, 10)]
    b.run_all()
    assert [work.compute_us for work in works] == [750, 250]
