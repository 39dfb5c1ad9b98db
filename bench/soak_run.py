"""One run of the soak: clients, rests, kills, and what must not have come of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import trio

from skippy.config import KvCacheConfig

from .common import percentile
from .soak_clients import Habit, Outcome, Target, draw_habit, one_request
from .soak_server import LANES, Sample, Server

CLIENTS: Final = 10
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
COUNTS: Final = ("tasks", "threads", "descriptors")


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

    @property
    def names(self) -> list[str]:
        """Of all processes, that which started the others first."""
        return ["run", *sorted(name for name in self._pids if name != "run")]

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
