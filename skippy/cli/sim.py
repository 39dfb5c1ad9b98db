"""``skippy sim``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .ending import ending_in_order
from .errors import FAILURE

if TYPE_CHECKING:
    from skippy.sim.batch import Result, Settings


def _faults(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    from skippy.sim.scenario import FAULT_NAMES

    if value is None:
        return FAULT_NAMES
    names = tuple(name for name in value.replace(" ", "").split(",") if name and name != "none")
    for name in names:
        if name not in FAULT_NAMES:
            raise click.BadParameter(f"{name!r} is not known; use none, or some of {', '.join(FAULT_NAMES)}")
    return names


jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="cores",
    help="Processes.",
)
"""Of every command that simulates."""


@click.command("sim")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, help="How many seeds, one by one."
)
@click.option(
    "--size",
    type=click.Choice(["small", "large"]),
    help="How many stages, requests and tokens the seed chooses between; else it chooses that, too.",
)
@click.option("--stages", type=click.IntRange(1, 8), help="Stages of the chain; else the seed says.")
@click.option("--requests", type=click.IntRange(0, 1000), help="Requests; else the seed says.")
@click.option(
    "--faults",
    callback=_faults,
    metavar="NAMES",
    help="What may go wrong, with commas between: weather, reset, close, half-close, stall, trickle, "
    "corrupt, lie, crash, vanish; or none. Default: all of it.",
)
@jobs_option
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write everything that happened there; for one seed.",
)
def sim(
    seed: int,
    count: int,
    size: str | None,
    stages: int | None,
    requests: int | None,
    faults: tuple[str, ...],
    jobs: int,
    trace: Path | None,
) -> int:
    """Simulate chains of toy stages whose links and processes fail, and check what must always hold.

    Everything is in one process and on virtual time, and depends on nothing but the seed: the same seed gives
    the same trace. Exit status 1 where a seed has shown a fault.
    """
    from skippy.sim.batch import Settings, run_seed, run_seeds

    if trace is not None and count != 1:
        raise click.UsageError("--trace is for one seed; leave --count out")
    settings = Settings(size=size, stages=stages, requests=requests, faults=faults)
    with ending_in_order():
        if count == 1:
            result = run_seed(settings, seed, all_lines=trace is not None)
            if trace is not None:
                trace.write_text("".join(f"{line}\n" for line in result.lines), "utf-8")
            return _show([result], settings)
        return _show(run_seeds(settings, range(seed, seed + count), jobs), settings)


def _show(results: Iterable[Result], settings: Settings) -> int:
    """Tell what has come of each seed that failed, and of all; returns the exit status."""
    from skippy.sim.batch import LAST_LINES

    total, faulty, failed, secs = 0, 0, 0, 0.0
    outcomes: Counter[str] = Counter()
    digest = ""
    for result in results:
        total, faulty, secs = total + 1, faulty + result.faulty, secs + result.secs
        digest = result.digest
        outcomes.update(result.outcomes)
        if result.violation is not None:
            failed += 1
            for line in result.lines[-LAST_LINES:]:
                click.echo(line)
            click.echo(f"seed {result.seed}: {result.violation}")
            click.echo(f"run it again with: {settings.command(result.seed)} --trace FILE\n")
    requests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    click.echo(f"{total} seeds, {faulty} with faults, {secs:.0f} s of virtual time")
    click.echo(f"requests: {requests or 'none'}")
    if total == 1:
        click.echo(f"trace {digest}")
    click.echo(f"{failed} seeds failed" if failed else "everything held that must hold")
    return FAILURE if failed else 0
