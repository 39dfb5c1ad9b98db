"""The failure table on the toy engine, a third of it, and that a red cell is seen. All: ``make faults``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skippy.cli.main import cli
from skippy.protocol import MessageKind as K, ReplyKind as R
from skippy.sim.faults import Direction
from skippy.sim.lies import Failure
from skippy.sim.table import FOUND_OUT, Cell, all_cells, frames_of_a_request, run_cell, run_cells, show
from skippy.sim.watching import Place
from skippy.stage import Lane

LANE = [K.CONFIGURE_GENERATION, *[K.PREFILL_EMBD] * 4, *[K.DECODE_EMBD] * 5, K.STOP]


def test_the_table_has_every_frame_of_a_request_of_four_chunks_and_five_tokens() -> None:
    frames = frames_of_a_request()
    assert frames == {
        **{(hop, Direction.FORWARD): LANE for hop in (0, 1)},
        # A token of each decode step comes on the return stream.
        **{(hop, Direction.BACK): [R.ACK] * 6 for hop in (0, 1)},
        (2, Direction.FORWARD): [R.PREDICTED_TOKEN] * 5,
    }
    places = 2 * (11 + 6) + 5 + 1
    cells = all_cells(frames)
    assert len(cells) == 2 * places * (len(Failure) - 1 + 3)
    assert len(set(map(str, cells))) == len(cells)


@pytest.mark.slow
def test_a_third_of_the_table_is_green() -> None:
    """With each failure, and each place."""
    cells = all_cells(frames_of_a_request())
    some = random.Random(5).sample(cells, len(cells) // 3)
    assert {each.failure for each in some} == {each.failure for each in cells}
    assert {each.place for each in some} == {each.place for each in cells}
    results = list(run_cells(some, seed=0, jobs=os.cpu_count() or 1))
    table = "\n".join(show(results))
    assert [f"{r.cell}: {r.violation}" for r in results if r.violation is not None] == [], table


def cell(failure: Failure, index: int, *, hop: int = 0, replay: bool = False) -> Cell:
    return Cell(failure, Place(hop, Direction.FORWARD, index), replay)


def test_requests_end_as_the_contract_says() -> None:
    """Before their first token and after it, with replay and without; what is only slow changes nothing."""
    assert run_cell(cell(Failure.RESET, 2)).outcome == "failed"
    assert run_cell(cell(Failure.RESET, 7)).outcome == "failed"
    assert run_cell(cell(Failure.RESET, 7, replay=True)).outcome == "completed"
    assert run_cell(cell(Failure.SLOW, 7)).outcome == "completed"
    assert (
        run_cell(Cell(Failure.KILL, Place(0, Direction.FORWARD, 7), False, victim=0)).outcome == "server died"
    )


def test_a_lie_about_the_end_is_found_out_by_the_next_request() -> None:
    """It is replayed, or fails; what follows is served."""
    assert run_cell(cell(Failure.WRONG_KIND, 10)).outcome == FOUND_OUT
    assert run_cell(cell(Failure.WRONG_KIND, 10, replay=True)).outcome == "completed"


def test_a_cell_runs_alike_each_time() -> None:
    garbage = cell(Failure.GARBAGE, 6, hop=1)
    assert run_cell(garbage, 3) == run_cell(garbage, 3)


def command(*words: str) -> Any:
    return CliRunner().invoke(cli, ["failure-table", "--jobs", "1", *words], standalone_mode=False)


def test_a_session_that_is_not_dropped_is_a_red_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Lane, "_drop_session", lambda self: None)
    result = run_cell(cell(Failure.RESET, 3))
    assert result.violation is not None
    assert result.violation == "stage-0 has 1 of 2 sequences free"
    words = [
        "failure-table",
        "--cell",
        "reset at 0>1[3] without",
        "--jobs",
        "1",
        "--trace",
        str(tmp_path / "t"),
    ]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    assert done.return_value == 1
    assert done.output.splitlines()[:3] == ["They are not:", "      0>1", "reset R"]
    assert "1 cells, 1 red" in done.output
    assert "strike: reset at 0>1[3]" in (tmp_path / "t").read_text()


def test_the_command_prints_a_green_table() -> None:
    done = CliRunner().invoke(
        cli, ["failure-table", "--cell", "cut at 2>0", "--jobs", "1"], standalone_mode=False
    )
    assert done.return_value == 0
    with_replay, without = ["    2>0", "cut cccccc"], ["    2>0", "cut ffffff"]
    assert done.output.splitlines() == [
        "Lost requests are replayed:",
        *with_replay,
        "",
        "They are not:",
        *without,
        "",
        "12 cells, 0 red",
    ]


def test_the_command_refuses_cells_that_there_are_not() -> None:
    done = command("--cell", "rain")
    assert "no cell has 'rain' in its name" in str(done.exception)
