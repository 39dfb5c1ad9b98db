"""The failure table on real processes: each fault at each frame of a request on each hop of a chain of three.

Each case runs one request that meets the fault, and others beside it on the other lanes. Green is: with
replay the request is answered right, without it may also end by an error of its own kind, within the
detection deadline and a second; the others get what they would get alone; /readyz tells the truth; every lane
comes back; the next request on each is answered right.

    python -m bench.faults             # a sample
    python -m bench.faults --whole     # every frame of a request on every hop and way
    python -m bench.faults --no-replay # requests that are lost stay lost
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from skippy.cli.demo import find_model
from skippy.protocol import Message, MessageKind, ReplyKind
from skippy.sim.faults import Direction
from skippy.sim.lies import LIES, Failure
from skippy.sim.watching import Place, Strike

from .common import RESULTS, Report, table
from .fault_chain import LANES, Ending, FaultyChain, open_faulty_chain

STAGES = 3
PEER_TIMEOUT_SECS = 2
SLACK_SECS = 1.0
"""Beyond the detection deadline."""
BACK_SECS = 90
"""Longest until a chain is whole again after a fault, a process that is started again included."""
TOKENS = 8
# Continuations that no change of a batch's shape turns into others.
PROMPT = "one two three four five six seven eight nine ten " * 3 + "one two three four five six"
OTHER = "a b c d e f g h i j k l m n o p"
LONGER_THAN_OTHER = 24
"""Tokens: PROMPT has more, OTHER fewer."""
SAMPLE = 40
OPTIONS = ["--peer-timeout-secs", str(PEER_TIMEOUT_SECS)]
NO_REPLAY = "--no-replay-on-stage-loss"


@attrs.frozen
class Case:
    """One cell. ``victim`` is the stage that is killed, with the fault ``kill``."""

    failure: Failure
    place: Place
    victim: int | None = None

    def __str__(self) -> str:
        what = self.failure.value if self.victim is None else f"{self.failure.value} stage {self.victim}"
        return f"{what} at {hop_name(self.place)}[{self.place.index}]"


def hop_name(place: Place) -> str:
    """Such as ``0>1``, or ``0<1`` for what comes back."""
    return f"{place.hop}{'>' if place.way is Direction.FORWARD else '<'}{(place.hop + 1) % STAGES}"


@attrs.frozen
class Result:
    """What came of a case; ``wrong`` is empty where it is green."""

    case: Case
    kind: str
    secs: float
    wrong: Sequence[str]


def is_followed(message: Message) -> bool:
    """A message of the request that meets the fault: it has the longest prompt."""
    return message.state.prompt_token_count > LONGER_THAN_OTHER


class Bench:
    """Runs cases on one chain, one after the other.

    Args:
        replay: whether the chain replays requests.
    """

    def __init__(self, chain: FaultyChain, *, replay: bool) -> None:
        self._chain = chain
        self._replay = replay
        self._right: dict[str, str] = {}
        self.trace: dict[tuple[int, Direction], list[MessageKind | ReplyKind]] = {}

    async def learn(self) -> None:
        """What the answers are without faults, and which frames a request has."""
        for prompt in (OTHER, PROMPT):
            self._chain.network.follow(is_followed)
            ending = await self._chain.ask(prompt, TOKENS)
            assert ending.kind == "normal", ending
            self._right[prompt] = ending.text
        await self._ask_on_all_lanes()  # the Stop of the request before has come everywhere now
        self.trace = {key: list(kinds) for key, kinds in self._chain.network.trace.items()}

    async def run(self, case: Case) -> Result:
        chain, network = self._chain, self._chain.network
        wrong: list[str] = []
        if case.place.index < 0:  # only a lane's first request opens a return stream
            network.reset_all()
            await chain.wait_whole()
        network.follow(is_followed, Strike(case.failure, case.place, self._then(case)))
        others: list[Ending] = []
        async with trio.open_nursery() as nursery:

            async def beside() -> None:
                others.append(await chain.ask(OTHER, TOKENS))

            for _ in range(LANES - 1):
                nursery.start_soon(beside)
            if case.victim is not None:
                nursery.start_soon(self._start_again, case.victim, wrong)
            ending = await chain.ask(PROMPT, TOKENS)
            ended = trio.current_time()
            with trio.move_on_after(PEER_TIMEOUT_SECS):  # a fault on its Stop comes after the answer
                await network.wait_until(lambda: network.struck)
            if not network.struck:
                nursery.cancel_scope.cancel()
        if not network.struck:
            return Result(case, ending.kind, 0.0, ["the frame never came"])
        secs = max(0.0, ended - network.struck_at)
        wrong += self._judge(case, ending, secs)
        wrong += self._judge_others(case, others)
        if case.victim is None and not await chain.ready():
            wrong.append("/readyz says no while other lanes are connected")
        wrong += await self._recover(case)
        return Result(case, ending.kind, secs, wrong)

    def _then(self, case: Case) -> Callable[[], None]:
        return (lambda: None) if case.victim is None else self._chain.stages[case.victim].kill

    async def _start_again(self, victim: int, wrong: list[str]) -> None:
        """Once the stage is gone, and that was told, start it."""
        network = self._chain.network
        await network.wait_until(lambda: network.struck and network.admitted(0) == 0)
        if await self._chain.ready():
            wrong.append("/readyz says yes without a stage")
        await trio.to_thread.run_sync(self._chain.stages[victim].restart)

    def _judge(self, case: Case, ending: Ending, secs: float) -> list[str]:
        right, wrong = self._right[PROMPT], []
        must_be_normal = self._replay or case.failure.harmless
        if ending.kind == "broken" or (must_be_normal and ending.kind != "normal"):
            wrong.append(f"it ended with {ending}")
        if ending.text != right if ending.kind == "normal" else not right.startswith(ending.text):
            wrong.append(f"its text is {ending.text!r}, not {right!r}")
        if ending.kind != "normal" and secs > PEER_TIMEOUT_SECS + SLACK_SECS:
            wrong.append(f"it ended after {secs:.1f} s")
        return wrong

    def _judge_others(self, case: Case, others: Sequence[Ending]) -> list[str]:
        """On the lanes beside; a stage that is gone takes those with it."""
        right = self._right[OTHER]
        may_fail = case.victim is not None and not self._replay
        return [
            f"beside it: {ending}"
            for ending in others
            if (ending.kind == "normal" and ending.text != right)
            or ending.kind == "broken"
            or (ending.kind != "normal" and not may_fail)
        ]

    async def _recover(self, case: Case) -> list[str]:
        """See whether all is as it was."""
        wrong: list[str] = []
        with trio.move_on_after(BACK_SECS) as scope:
            await self._chain.wait_whole()
            failed = await self._ask_on_all_lanes()
            if failed and case.failure in LIES and not self._replay and case.place.index >= 0:
                # A lie about the end of a request can only be seen by what comes next on that lane.
                await self._chain.wait_whole()
                failed = failed[1:] or await self._ask_on_all_lanes()
            wrong += [f"the next request ended with {ending}" for ending in failed]
            if not await self._chain.ready():
                wrong.append("/readyz says no when all is well again")
        if scope.cancelled_caught:
            wrong.append(f"the chain was not whole again after {BACK_SECS} s")
        return wrong

    async def _ask_on_all_lanes(self) -> list[Ending]:
        """Ask on all lanes at once; the endings that are not right."""
        failed: list[Ending] = []

        async def one() -> None:
            ending = await self._chain.ask(OTHER, TOKENS)
            if ending.kind != "normal" or ending.text != self._right[OTHER]:
                failed.append(ending)

        async with trio.open_nursery() as nursery:
            for _ in range(LANES):
                nursery.start_soon(one)
        return failed


def all_cases(trace: Mapping[tuple[int, Direction], Sequence[MessageKind | ReplyKind]]) -> list[Case]:
    """Every fault at every frame, and every stage but stage 0, which serves the clients, killed there."""
    places = [
        Place(hop, way, i) for (hop, way), kinds in sorted(trace.items(), key=str) for i in range(len(kinds))
    ]
    places.append(Place(STAGES - 1, Direction.FORWARD, -1))
    cases = []
    for kind, place in itertools.product(Failure, places):
        victims = range(1, STAGES) if kind is Failure.KILL else [None]
        cases += [Case(kind, place, victim) for victim in victims]
    return cases


def sample_of(cases: Sequence[Case], count: int, chance: random.Random) -> list[Case]:
    """``count`` of them, every kind as often as every other one, on all hops and ways in turn."""
    groups: dict[Failure, list[list[Case]]] = {}
    for kind, same in itertools.groupby(cases, key=lambda case: case.failure):
        places: dict[str, list[Case]] = {}
        for case in same:
            places.setdefault(hop_name(case.place), []).append(case)
        groups[kind] = list(places.values())
        chance.shuffle(groups[kind])
    taken: list[Case] = []
    for turn in itertools.count():
        for hops in groups.values():
            if len(taken) == min(count, len(cases)):
                return taken
            if hop := hops[turn % len(hops)]:
                taken.append(hop.pop(chance.randrange(len(hop))))
    raise AssertionError("unreachable")


async def run_cases(
    chain: FaultyChain, choose: Callable[[list[Case]], list[Case]], *, replay: bool
) -> list[Result]:
    """The results of the chosen ones among all cases."""
    bench = Bench(chain, replay=replay)
    await bench.learn()
    results = []
    for case in choose(all_cases(bench.trace)):
        result = await bench.run(case)
        print(
            f"{'RED  ' if result.wrong else 'green'} {case}: {result.kind}, {result.secs:.2f} s", flush=True
        )
        for reason in result.wrong:
            print(f"      {reason}", flush=True)
        results.append(result)
    return results


def show(results: Sequence[Result]) -> str:
    """A row per fault, a column per hop and way: how many cases were green of how many."""
    columns = sorted({hop_name(result.case.place) for result in results})
    rows = []
    for kind in Failure:
        row = [kind.value]
        for column in columns:
            cell = [r for r in results if r.case.failure is kind and hop_name(r.case.place) == column]
            green = sum(not result.wrong for result in cell)
            row.append("" if not cell else f"{green}/{len(cell)}" + ("" if green == len(cell) else " RED"))
        rows.append(row)
    return table(["fault", *columns], rows)


async def run_table(
    model: Path, choose: Callable[[list[Case]], list[Case]], seed: int, *, replay: bool
) -> list[Result]:
    """Start a chain, run the cases, stop it."""
    front = [] if replay else [NO_REPLAY]
    with tempfile.TemporaryDirectory() as folder:
        async with open_faulty_chain(
            model, Path(folder), stages=STAGES, seed=seed, options=OPTIONS, front_options=front
        ) as chain:
            return await run_cases(chain, choose, replay=replay)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file; default: the bundled model")
    parser.add_argument("--whole", action="store_true", help="all cases instead of a sample")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help=f"default: {SAMPLE}")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cases whose names match")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="chooses the sample and what lies say"
    )
    parser.add_argument("--no-replay", action="store_true", help="requests that are lost stay lost")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)

    def choose(cases: list[Case]) -> list[Case]:
        named = [case for case in cases if re.search(options.only, str(case))]
        if options.whole or options.sample >= len(named):
            return named
        return sample_of(named, options.sample, random.Random(options.seed))

    run = functools.partial(run_table, replay=not options.no_replay)
    results = trio.run(run, find_model(options.model), choose, options.seed)
    report = Report(options.out, "faults")
    report.add(show(results))
    red = [result for result in results if result.wrong]
    report.add(f"{len(results)} cases, {len(red)} red")
    report.finish(
        [{"case": str(r.case), "ending": r.kind, "secs": r.secs, "wrong": r.wrong} for r in results]
    )
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
