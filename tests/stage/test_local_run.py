"""Decode steps that follow each other in the engine's thread, where one stage is all of the chain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.protocol import FinishHint, ReplyAnnex
from skippy.stage.iterations import LEAST_PREFILL_ROWS as SLICE
from skippy.stage.runs import MAX_AHEAD, LocalRun
from skippy.stage.work import Work, WorkCancelled
from tests.support.iterations import Bench, bench, ended_well

pytestmark = pytest.mark.usefixtures("no_compute_time")

NO_ANNEXES = itertools.repeat(None)


def run_of(b: Bench, sequence: int, run: LocalRun, annexes: Iterator[ReplyAnnex | None] = NO_ANNEXES) -> Work:
    work = Work(
        Segment(sequence, 0, 1, tokens=[65], logits=1),
        None,
        lambda engine, row: run.made(int(engine.logits(row).argmax()), next(annexes), work),
        decodes=True,
    )
    work.report = run.report
    b.iterations.add(work)
    return work


def local_run(steps: int, taken: int = 1000) -> tuple[LocalRun, list[tuple[int, bool]]]:
    told: list[tuple[int, bool]] = []

    def arrived(token: int, _: ReplyAnnex | None, goes_on: bool) -> None:
        told.append((token, goes_on))

    return LocalRun(steps, lambda _: False, arrived, taken=taken), told


def test_steps_that_follow_by_themselves_join_those_of_others() -> None:
    b = bench()
    (one, told), (other, _) = local_run(3), local_run(4)
    works = [run_of(b, 0, one), run_of(b, 1, other)]
    prompt = b.work(9, 40)
    both = [(0, 1), (1, 1)]
    assert b.run(6) == [both, [(9, SLICE)], both, [(9, SLICE)], both, [(9, 40 - 2 * SLICE)]]
    assert b.run_all() == [[(1, 1)]]
    assert ended_well(prompt, *works)
    one.report()
    assert [goes_on for _, goes_on in told] == [True, True, False]
    engine, token = ToyEngine(), 65
    for position, (drawn, _) in enumerate(told):
        engine.decode([Segment(0, position, 1, tokens=[token], logits=1)])
        token = int(engine.logits(0).argmax())
        assert drawn == token


def test_a_run_does_not_run_away_from_its_reader() -> None:
    b = bench()
    run, told = local_run(100, taken=0)
    work = run_of(b, 0, run)
    assert b.run_all() == [[(0, 1)]] * MAX_AHEAD
    assert ended_well(work)
    run.report()
    assert [goes_on for _, goes_on in told] == [True] * (MAX_AHEAD - 1) + [False]


@pytest.mark.parametrize(("hint", "steps"), [(FinishHint.MUST_END, 2), (FinishHint.MAY_END, 5)])
def test_a_run_ends_where_nothing_may_follow(hint: FinishHint, steps: int) -> None:
    b = bench()
    run, told = local_run(5)
    annexes = iter([None, ReplyAnnex(finish_hint=hint), None, None, None])
    work = run_of(b, 0, run, annexes)
    assert b.run_all() == [[(0, 1)]] * steps
    assert ended_well(work)
    run.report()
    assert [goes_on for _, goes_on in told] == [True] * (steps - 1) + [False]


def test_a_run_that_nobody_wants_ends() -> None:
    b = bench()
    (stopped, _), (cancelled, _) = local_run(100), local_run(100)
    one, other = run_of(b, 0, stopped), run_of(b, 1, cancelled)
    b.run()
    stopped.stopped = other.cancelled = True
    assert b.run_all() == [[(0, 1)]]
    assert ended_well(one)
    assert isinstance(other.error, WorkCancelled)


def test_safe_mode_lets_others_go_on_between_the_steps_of_a_run() -> None:
    b = bench(safe=True)
    run_of(b, 0, local_run(3)[0])
    b.steps(1)
    b.work(2, 40)
    assert b.run_all() == [[(0, 1)], [(1, 1)], [(2, 40)], [(0, 1)], [(0, 1)]]
