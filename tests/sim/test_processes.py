"""One function over processes."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from skippy.sim.processes import run_each


def look(number: int) -> tuple[int, int, bool]:
    return number, os.getpid(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def fail(number: int) -> int:
    raise ValueError(f"not {number}")


def test_ctrl_c_is_for_the_first_process_alone() -> None:
    results = list(run_each(look, range(6), 2, at_once=2))
    assert [number for number, _, _ in results] == list(range(6))
    assert os.getpid() not in {process for _, process, _ in results}
    assert all(blocked for _, _, blocked in results)
    assert list(run_each(look, [6], 1, at_once=2)) == [(6, os.getpid(), False)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_exception_comes_through(jobs: int) -> None:
    with pytest.raises(ValueError, match="not 3"):
        list(run_each(fail, [3, 4], jobs, at_once=1))


def sleep_for_ever(number: int) -> int:
    if number:
        signal.pause()
    return number


def test_whoever_leaves_early_waits_for_nobody() -> None:
    before = set(multiprocessing.active_children())
    results = run_each(sleep_for_ever, range(9), 2, at_once=1)
    assert next(results) == 0
    started = set(multiprocessing.active_children()) - before
    assert started
    results.close()  # type: ignore[attr-defined]
    assert not any(process.is_alive() for process in started)
