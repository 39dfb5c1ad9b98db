"""A chain of real processes under clients that leave, break off and stall, while stages are killed.

    python -m bench.soak [--minutes 10 | --requests 2000] [--kill-every 30] [--stages 3] [--seed 0]

Every now and then the clients pause until the chain has come to rest. At rest, nothing may be held that was
not held at an early rest: every lane is idle, every sequence free, and there are no more tasks, threads and
descriptors; at the end the memory of each process that has lived since the first third of the run may be at
most 2 % above what it was then, unless the run is below 5 minutes. What the stages remember of prompts is
bounded, but only grows until it is full: the clients fill it before memory is judged. Requests may end in
an answer, a refusal or an error of their own kind, and in nothing else, except where stage 0 itself was
killed, which is early alone; later, stage 1 is, so that of four stages one in between lives, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from skippy.cli.demo import find_model
from skippy.stage.nurseries import leaves

from .common import BenchError, Report, Spread, machine, parser, table
from .plots import line_chart
from .soak_run import COUNTS, GROWTH_SECS, Soak
from .soak_server import serving

INTERVALS: Final = 12
MIB: Final = 1 << 20


def chart(soak: Soak, title: str, unit: str, names: Sequence[str], value: Any) -> str:
    """One line per process: ``value`` of its samples, in intervals of the run."""
    end = soak.samples[-1].at
    ticks = [f"{end * (index + 1) / INTERVALS / 60:.1f}" for index in range(INTERVALS)]
    series: dict[str, list[Spread | None]] = {}
    for name in names:
        own = [s for s in soak.samples if s.name == name]
        parts: list[list[float]] = [[] for _ in ticks]
        for sample in own:
            parts[min(INTERVALS - 1, int(sample.at / end * INTERVALS))].append(float(value(sample)))
        series[name] = [Spread.of(part) if part else None for part in parts]
    return line_chart(title, "minutes", unit, ticks, series)


def report(soak: Soak, out: Report) -> list[str]:
    """Tables and plots; returns what is wrong."""
    _report_requests(soak, out)
    _report_processes(soak, out)
    _plot(soak, out)
    wrong = [*soak.wrong, *soak.leaks()]
    out.add("\n".join(f"* {line}" for line in wrong) or "Nothing is left that was not there at first.")
    return wrong


def _report_requests(soak: Soak, out: Report) -> None:
    total = sum(soak.outcomes.values())
    out.add(
        f"{total} requests in {soak.samples[-1].at / 60:.1f} minutes, {soak.given_up} of them cancelled or "
        f"broken; {len(soak.kills)} stages killed ({machine()})"
    )
    results = sorted({result for _, result in soak.outcomes})
    habits = sorted({habit for habit, _ in soak.outcomes})
    rows = [[habit, *(str(soak.outcomes[habit, result] or "") for result in results)] for habit in habits]
    out.add(table(["client", *results], rows))
    out.add(table(["why not", ""], [[why, str(count)] for why, count in soak.reasons.most_common(12)]))


def _report_processes(soak: Soak, out: Report) -> None:
    unjudged = "too short to judge" if soak.samples[-1].at < GROWTH_SECS else ""
    rows = []
    for name in soak.names:
        first, last = soak.baseline(name), [s for s in soak.samples if s.name == name][-1]
        growth = soak.growth(name)
        lives = len({s.pid for s in soak.samples if s.name == name})
        counts = [
            f"{getattr(first, what) if first is not None else '?'} / {getattr(last, what)}" for what in COUNTS
        ]
        rows.append(
            [
                name,
                str(lives),
                ", ".join(f"{count} {state}" for state, count in last.lanes.items()),
                "" if last.sequences is None else f"{last.free_sequences} of {last.sequences}",
                *counts,
                f"{last.resident / MIB:.1f}",
                unjudged if growth is None else f"{100 * (growth - 1):+.1f} %",
            ]
        )
    out.add(
        table(
            [
                "process",
                "lives",
                "lanes",
                "free sequences",
                *(f"{what}, first rest / last" for what in COUNTS),
                "MiB",
                "since the first third",
            ],
            rows,
        )
    )


def _plot(soak: Soak, out: Report) -> None:
    names = soak.names
    out.plot("memory", chart(soak, "Resident memory", "MiB", names, lambda s: s.resident / MIB))
    for what in COUNTS:
        out.plot(what, chart(soak, what.capitalize(), what, names, lambda s, w=what: getattr(s, w)))
    held = [name for name in names if name != "run"]
    busy = chart(
        soak, "Lanes in use", "lanes", held, lambda s: sum(s.lanes.values()) - s.lanes.get("idle", 0)
    )
    out.plot("lanes", busy)
    used = chart(
        soak, "Sequences in use", "sequences", held, lambda s: (s.sequences or 0) - (s.free_sequences or 0)
    )
    out.plot("sequences", used)


async def run(model: Path, options: Any) -> list[str]:
    async with serving(model, options.stages) as server:
        target = await server.wait_up()
        soak = Soak(
            server,
            target,
            secs=None if options.requests else options.minutes * 60,
            requests=options.requests or 1,
            kill_every=options.kill_every,
            seed=options.seed,
        )
        await soak.run()
        if server.process.returncode is not None:
            raise BenchError("skippy run has ended:\n" + "\n".join(server.lines))
    out = Report(options.out, "soak")
    wrong = report(soak, out)
    out.finish(
        {
            "samples": [attrs.asdict(sample) for sample in soak.samples],
            "kills": soak.kills,
            "wrong": wrong,
        }
    )
    if wrong:
        out.add("last words of the chain:\n" + "\n".join(server.lines[-20:]))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__, rounds=1)
    made.add_argument("--minutes", type=float, default=10, metavar="N", help="default: 10")
    made.add_argument(
        "--requests", type=int, metavar="N", help="until so many were cancelled or broken, instead"
    )
    made.add_argument(
        "--kill-every", type=float, default=30, metavar="SECONDS", help="on average; 0: never; default: 30"
    )
    made.add_argument("--stages", type=int, default=3, metavar="N", help="default: 3")
    made.add_argument("--seed", type=int, default=0, metavar="N")
    options = made.parse_args(arguments)
    status = 2
    try:
        status = 1 if trio.run(run, find_model(options.model), options) else 0
    except* BenchError as group:
        for error in leaves(group):
            print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
