"""When a stage is started again, and how its end is told."""

from __future__ import annotations

import pytest

from skippy.cli.restarts import RestartPolicy, Restarts
from skippy.workers.obituary import obituary

POLICY = RestartPolicy(max_restarts=4, first_pause_secs=1, longest_pause_secs=5, well_secs=60)


def test_pauses_double_up_to_a_limit_and_then_it_is_given_up() -> None:
    restarts = Restarts(POLICY, chance=lambda: 1.0)
    assert [restarts.crashed(0) for _ in range(6)] == [1, 2, 4, 5, None, None]


def test_half_of_a_pause_is_jitter() -> None:
    restarts = Restarts(POLICY, chance=iter([0.0, 0.5, 1.0]).__next__)
    assert [restarts.crashed(0) for _ in range(3)] == [0.5, 1.5, 4]


def test_a_stage_that_has_been_well_starts_over() -> None:
    restarts = Restarts(POLICY, chance=lambda: 1.0)
    assert [restarts.crashed(secs) for secs in (0, 59.9, 60, 0, 0, 0, 0)] == [1, 2, 1, 2, 4, 5, None]


def test_a_stage_that_has_served_a_request_starts_over() -> None:
    restarts = Restarts(POLICY, chance=lambda: 1.0)
    served = (False, False, True, False, False, True)
    assert [restarts.crashed(1, served=once) for once in served] == [1, 2, 1, 2, 4, 1]


def test_very_many_restarts_do_not_overflow() -> None:
    restarts = Restarts(RestartPolicy(max_restarts=10_000), chance=lambda: 1.0)
    assert [restarts.crashed(0) for _ in range(10_000)][-1] == 30.0


@pytest.mark.parametrize(
    ("returncode", "tail", "text"),
    [
        (-11, [], "was killed by signal SIGSEGV (a crash in native code)"),
        (-7, [], "was killed by signal SIGBUS (a crash in native code)"),
        (-6, [], "was killed by signal SIGABRT (native code gave up)"),
        (-9, [], "was killed by signal SIGKILL (perhaps out of memory)"),
        (-15, [], "was killed by signal SIGTERM"),
        (-64, [], "was killed by signal SIGRTMAX"),
        (-99, [], "was killed by signal 99"),
        (70, [], "exited with status 70 (a native call outlived the grace period)"),
        (0, [], "exited with status 0"),
        (1, ["", "error: a", "bye"], "exited with status 1: a"),
        (1, ["", "one", "two"], "exited with status 1; its last lines were:\n  one\n  two"),
        (
            -11,
            ["error: earlier", "Fatal Python error: Segmentation fault"],
            "was killed by signal SIGSEGV (a crash in native code); its last lines were:\n"
            "  error: earlier\n  Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_how_it_ended(returncode: int, tail: list[str], text: str) -> None:
    assert obituary(returncode, tail) == text
