"""``skippy failure-table``."""

from __future__ import annotations

from pathlib import Path

import click

from .ending import ending_in_order
from .errors import FAILURE
from .sim import jobs_option

EXAMPLE = "stall at 0>1[3] without replay"


@click.command("failure-table")
@click.option("--cell", default="", metavar="TEXT", help="Only the cells with this in their name.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Draws the lies.")
@jobs_option
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write everything that happened in the first red cell there.",
)
def failure_table(cell: str, seed: int, jobs: int, trace: Path | None) -> int:
    """Let every failure strike every frame of a request, on every link of three toy stages.

    Each cell is a chain of its own, on virtual time. A letter is a frame: c, the request completed; f, it
    failed as it should; n, the next one on its lane did, which found a lie out; -, its server died; R,
    something did not hold, which is told below. Exit status 1 if any is red.
    """
    from skippy.sim.table import all_cells, frames_of_a_request, run_cells, show

    with ending_in_order():
        cells = [each for each in all_cells(frames_of_a_request(seed)) if cell in str(each)]
        if not cells:
            raise click.UsageError(f"no cell has {cell!r} in its name; one is called {EXAMPLE!r}")
        results = list(run_cells(cells, seed, jobs))
        for replay in (True, False):
            half = [result for result in results if result.cell.replay is replay]
            if half:
                click.echo("Lost requests are replayed:" if replay else "They are not:")
                for line in show(half):
                    click.echo(line)
                click.echo()
        red = [result for result in results if result.violation is not None]
        for result in red:
            click.echo(f"{result.cell}: {result.violation}")
        if red and trace is not None:
            trace.write_text("".join(f"{line}\n" for line in red[0].lines), "utf-8")
    click.echo(f"{len(results)} cells, {len(red)} red")
    return FAILURE if red else 0
