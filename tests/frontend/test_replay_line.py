"""Who is replayed next."""

from __future__ import annotations

from skippy.frontend.replay_line import ReplayLine


def test_replays_go_together_and_in_order() -> None:
    line: ReplayLine[str] = ReplayLine()
    for name in "abc":
        line.join(name, suspect=False)
    assert [line.take() for _ in range(4)] == ["a", "b", "c", None]
    assert len(line) == 3


def test_a_suspect_waits_until_it_is_alone_and_others_wait_for_it() -> None:
    line: ReplayLine[str] = ReplayLine()
    line.join("suspect", suspect=True)
    line.join("other suspect", suspect=True)
    line.join("a", suspect=False)
    assert [line.take(), line.take()] == ["a", None]
    line.leave("a")
    assert line.take() == "suspect"
    line.join("b", suspect=False)
    assert line.take() is None
    line.join("suspect", suspect=True)  # its lane was of no use
    assert [line.take(), line.take()] == ["b", None]
    line.leave("b")
    assert line.take() == "other suspect"
    line.leave("other suspect")
    assert line.take() == "suspect"
    line.leave("suspect")
    assert line.take() is None
    assert len(line) == 0


def test_one_that_leaves_keeps_nobody_waiting() -> None:
    line: ReplayLine[str] = ReplayLine()
    line.join("suspect", suspect=True)
    line.leave("suspect")
    line.leave("suspect")
    line.join("next", suspect=True)
    assert line.take() == "next"
