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

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import trio

from skippy.cli.demo import find_model
from skippy.config import KvCacheConfig
from skippy.stage.nurseries import leaves

from .common import BenchError, Report, Spread, machine, parser, percentile, table
from .plots import line_chart
from .servers import skippy_command
from .soak_clients import Habit, Outcome, Target, draw_habit, one_request

LANES: Final = 4
CONTEXT: Final = 1024
CLIENTS: Final = 10
START_SECS: Final = 120
STATISTICS_SECS: Final = 10.0
SAMPLE_EVERY_SECS: Final = 2.0
REST_EVERY_SECS: Final = 60.0
FRONT_PART: Final = 0.2
"""Of the run, in which stage 0 and the last stage may be killed, too: their memory is judged afterwards."""
FILL_PROMPTS: Final = 2 * KvCacheConfig().max_entries
REST_TRIES: Final = 30
REST_SECS: Final = 60.0
"""Longest until a chain that nobody asks is at rest; a thread that has nothing to do stays for 10."""
GROWTH_TARGET: Final = 1.02
GROWTH_SECS: Final = 300.0
"""Memory of a shorter run still grows by what is needed once, so that it says nothing."""
INTERVALS: Final = 12
COUNTS: Final = ("tasks", "threads", "descriptors")
MIB: Final = 1 << 20


@attrs.frozen(slots=True)
class Sample:
    """What one process said of itself.

    Attributes:
        at: seconds since the soak began.
        name: of the stage; ``run`` for the process that started them.
        rest: nobody asked anything.
    """

    at: float
    name: str
    pid: int
    lanes: Mapping[str, int]
    sequences: int | None
    free_sequences: int | None
    tasks: int
    threads: int
    descriptors: int
    resident: int
    rest: bool

    @property
    def idle(self) -> bool:
        """Every lane is idle, of stages that have some, and every sequence is free."""
        if self.name == "run":
            return True
        return set(self.lanes) == {"idle"} and self.free_sequences == self.sequences is not None


class Server:
    """A running ``skippy run``.

    Attributes:
        lines: what it has written to stderr that is no statistics, the last of it.
    """

    def __init__(self, process: trio.Process, stages: int) -> None:
        self.process = process
        self.stages = stages
        self.lines: list[str] = []
        self.url = ""
        self.model = ""
        self._answers, self._statistics = trio.open_memory_channel[dict[str, Any]](1000)
        self._up = trio.Event()

    async def read(self, stream: trio.abc.ReceiveStream) -> None:
        """Take lines of one of its outputs until it ends."""
        rest = b""
        async for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        if match := re.search(r"serves (\S+) in", line):
            self.model = match[1]
        if match := re.search(r"OpenAI endpoint: (\S+)", line):
            self.url = match[1]
            self._up.set()
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == "statistics":
                    self._answers.send_nowait(entry)
                    return
        self.lines = [*self.lines[-200:], line]

    async def wait_up(self) -> Target:
        with trio.move_on_after(START_SECS):
            await self._up.wait()
        if not self.url:
            raise BenchError("the chain did not start:\n" + "\n".join(self.lines))
        where = urlsplit(self.url)
        assert where.hostname is not None
        assert where.port is not None
        return Target(where.hostname, where.port, self.model)

    async def statistics(self) -> list[dict[str, Any]]:
        """What every process says of itself now; those that are being started may be missing."""
        with contextlib.suppress(trio.WouldBlock):
            while True:
                self._statistics.receive_nowait()
        self.process.send_signal(signal.SIGUSR1)
        entries: list[dict[str, Any]] = []
        with trio.move_on_after(STATISTICS_SECS):
            while len(entries) < self.stages + 1:
                entries.append(await self._statistics.receive())
        return entries


@contextlib.asynccontextmanager
async def serving(model: Path, stages: int) -> AsyncIterator[Server]:
    """``skippy run``, stopped with the block."""
    # It would take a stage that is killed so often for one that cannot be helped.
    command = skippy_command(model, stages, 1, LANES, CONTEXT, ["--max-restarts", "100000"], cached=True)
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        server = Server(process, stages)
        assert process.stdout is not None
        assert process.stderr is not None
        nursery.start_soon(server.read, process.stdout)
        nursery.start_soon(server.read, process.stderr)
        try:
            yield server
        finally:
            process.terminate()
            with trio.move_on_after(15, shield=True):
                await process.wait()
            if process.returncode is None:
                process.kill()
            nursery.cancel_scope.cancel()


class Soak:
    """One run. :meth:`run` fills the attributes.

    Args:
        secs: how long; None: until there were ``requests`` cancelled or broken ones.

    Attributes:
        outcomes: of all requests.
        reasons: of refusals and errors, without their numbers.
        samples: of all processes.
        kills: when which stage was killed.
        wrong: what must not have happened.
    """

    def __init__(
        self,
        server: Server,
        target: Target,
        *,
        secs: float | None,
        requests: int,
        kill_every: float,
        seed: int,
    ) -> None:
        self._server = server
        self._target = target
        self._secs = secs
        self._requests = requests
        self._kill_every = kill_every
        self._chance = random.Random(seed)
        self._began = trio.current_time()
        self._pause = False
        self._resumed = trio.Event()
        self._busy = 0
        self._quiet = trio.lowlevel.ParkingLot()
        self._pids: dict[str, int] = {}
        self._front_down = -1e9
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.given_up = 0
        self.samples: list[Sample] = []
        self.kills: list[tuple[float, str]] = []
        self.wrong: list[str] = []

    @property
    def now(self) -> float:
        return trio.current_time() - self._began

    @property
    def part(self) -> float:
        """How much of the run is over, 0 to 1 and beyond."""
        return self.now / self._secs if self._secs is not None else self.given_up / self._requests

    async def run(self) -> None:
        await self._come_to_rest()
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._client, random.Random(self._chance.random() + number))
            if self._kill_every:
                nursery.start_soon(self._kill)
            filled = False
            while self.part < 1:
                began = self.now
                while self.part < 1 and self.now - began < REST_EVERY_SECS:
                    await trio.sleep(SAMPLE_EVERY_SECS)
                    await self._sample(rest=False)
                await self._come_to_rest()
                if not filled and self.part >= FRONT_PART:
                    filled = True
                    await self._come_to_rest(fill=True)
            nursery.cancel_scope.cancel()

    # -- clients ---------------------------------------------------------------------------------------

    async def _client(self, chance: random.Random) -> None:
        while True:
            if self._pause:
                await self._resumed.wait()
            self._busy += 1
            began = self.now
            outcome = await one_request(self._target, draw_habit(chance), chance)
            self._busy -= 1
            self._quiet.unpark_all()
            self._judge(outcome, began)
            if outcome.result == "refused":
                await trio.sleep(0.2)

    def _judge(self, outcome: Outcome, began: float) -> None:
        result = outcome.result
        front_died = self._front_down > began - 30
        if result == "broken":
            result = "server died" if front_died else result
            if not front_died:
                self.wrong.append(f"at {self.now:.1f} s, {outcome.habit.value}: {outcome.detail}")
        self.outcomes[outcome.habit.value, result] += 1
        if result in ("refused", "error"):
            self.reasons[re.sub(r"\d+", "N", outcome.detail)[:140]] += 1
        self.given_up += outcome.cancelled_or_broken

    async def _come_to_rest(self, *, fill: bool = False) -> None:
        """Let requests end, and look at what is left; clients go on afterwards.

        Args:
            fill: first ask for as much as the stages remember, and as much again.
        """
        self._pause, self._resumed = True, trio.Event()
        while self._busy:
            await self._quiet.park()
        async with trio.open_nursery() as nursery:  # a lane that was never used has no return stream
            for _ in range(LANES):
                nursery.start_soon(one_request, self._target, Habit.READ, self._chance)
                if fill:
                    nursery.start_soon(self._fill_caches)
        for _ in range(REST_TRIES):
            if await self._sample(rest=True):
                break
            await trio.sleep(REST_SECS / REST_TRIES)
        self._pause = False
        self._resumed.set()

    async def _fill_caches(self) -> None:
        for _ in range(FILL_PROMPTS // LANES):
            self._judge(await one_request(self._target, Habit.FILL, self._chance), self.now)

    # -- processes -------------------------------------------------------------------------------------

    async def _sample(self, *, rest: bool) -> bool:
        """Ask all processes; returns whether the chain is at rest, with no more than it had at first."""
        samples = [self._read(entry, rest) for entry in await self._server.statistics()]
        for sample in samples:
            self._pids[sample.name] = sample.pid
        settled = len(samples) == self._server.stages + 1 and all(
            sample.idle and not self.surplus(sample) for sample in samples
        )
        if rest:  # only the last look counts as the chain's state at rest
            samples = [attrs.evolve(sample, rest=settled) for sample in samples]
        self.samples += samples
        return settled

    def _read(self, entry: Mapping[str, Any], rest: bool) -> Sample:
        return Sample(
            at=self.now,
            name=entry["stage_id"] or "run",
            pid=entry["pid"],
            lanes=entry.get("lanes", {}),
            sequences=entry.get("sequences"),
            free_sequences=entry.get("free_sequences"),
            tasks=entry["tasks"],
            threads=entry["threads"],
            descriptors=entry["descriptors"],
            resident=entry["resident_bytes"],
            rest=rest,
        )

    def surplus(self, sample: Sample) -> dict[str, int]:
        """What a process at rest has more of than it had at an early rest."""
        first = self.baseline(sample.name)
        if first is None:
            return {}
        return {name: more for name in COUNTS if (more := getattr(sample, name) - getattr(first, name)) > 0}

    def baseline(self, name: str) -> Sample | None:
        """The first rest after the clients have come; None before it."""
        rests = [sample for sample in self.samples if sample.rest and sample.name == name]
        return rests[1] if len(rests) > 1 else None

    async def _kill(self) -> None:
        """Kill a stage now and then, as seldom as its start takes at least."""
        while True:
            await trio.sleep(self._chance.uniform(0.5, 1.5) * self._kill_every)
            if self._pause:
                continue
            stages = self._server.stages
            names = range(stages) if self.part < FRONT_PART else range(1, min(2, stages - 1))
            if not names:
                return
            name = f"stage-{self._chance.choice(names)}"
            if name == "stage-0":
                self._front_down = self.now
            self.kills.append((self.now, name))
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[name], signal.SIGKILL)

    # -- what came of it -------------------------------------------------------------------------------

    def leaks(self) -> Iterator[str]:
        """What is left at the end that must not be."""
        for name in sorted(self._pids):
            own = [sample for sample in self.samples if sample.name == name]
            last = own[-1]
            if not last.idle:
                free = f"{last.free_sequences} of {last.sequences} sequences free"
                yield f"{name}: lanes {dict(last.lanes)}, {free}"
            for what, more in self.surplus(last).items():
                yield f"{name}: {more} {what} more than at its first rest"
            growth = self.growth(name)
            if growth is not None and growth > GROWTH_TARGET:
                yield f"{name}: memory has grown by {100 * (growth - 1):.1f} % since the first third"

    def growth(self, name: str) -> float | None:
        """Memory at the end over memory after the first third; None for a process that is younger, and for a
        run below GROWTH_SECS."""
        own = [sample for sample in self.samples if sample.name == name]
        end = own[-1].at
        if end < GROWTH_SECS:
            return None
        width = end / 10
        third = [s.resident for s in own if end / 3 <= s.at < end / 3 + width and s.pid == own[-1].pid]
        if not third or any(s.pid != own[-1].pid for s in own if s.at >= end / 3):
            return None
        return percentile([s.resident for s in own if s.at > end - width], 50) / percentile(third, 50)


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
    names = ["run", *sorted(name for name in soak._pids if name != "run")]
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
    unjudged = "too short to judge" if soak.samples[-1].at < GROWTH_SECS else ""
    rows = []
    for name in names:
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
    wrong = [*soak.wrong, *soak.leaks()]
    out.add("\n".join(f"* {line}" for line in wrong) or "Nothing is left that was not there at first.")
    return wrong


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
