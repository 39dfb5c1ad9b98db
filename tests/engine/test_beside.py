"""Calls beside the engine's thread: their results, their errors, and those that nobody waits for any more."""

from __future__ import annotations

import threading

import pytest

from skippy.engine.beside import Beside, RanAway


def test_results_and_errors_come_back() -> None:
    beside = Beside()
    assert beside.run(lambda: threading.current_thread().name, 5)[0] == "beside the engine"
    with pytest.raises(ZeroDivisionError):
        beside.run(lambda: 1 // 0, 5)
    assert beside.run(lambda: 7, 5)[0] == 7
    beside.close()


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    beside = Beside()
    go = threading.Event()
    for _ in range(2):
        with pytest.raises(RanAway):
            beside.run(go.wait, 0.001)  # by the wall clock: it uses no processor time
    assert beside.run(lambda: 7, 5)[0] == 7
    assert beside.settle(2, 0)
    assert not beside.settle(1, 0)
    go.set()
    assert beside.settle(0, 30)
    beside.close()


def test_processor_time_ends_it_before_the_wall_clock_does() -> None:
    beside = Beside()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pass

    with pytest.raises(RanAway):
        beside.run(work, 0.02)
    stop.set()
    assert beside.settle(0, 30)
