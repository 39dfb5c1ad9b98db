"""The failure table: every failure at every frame of a request, on every link of a chain, on virtual time.

A cell is green where all of this holds. With replay, the request that met the failure completes; without it,
it may also end by a typed error, within the detection deadline and a second. Requests on other lanes get what
they would get alone. Every lane comes back. The next requests on all lanes are served, and then nothing is
left of anything: no lane, sequence, task or link.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import trio

from skippy.config import OpenAIOptions, StageOptions
from skippy.frontend.generation import GenerationRequest
from skippy.protocol import Message, MessageKind, ReplyKind
from skippy.stage.context import HANDSHAKE_SECS

from .clients import Client
from .clock import SimClock
from .cluster import SimCluster
from .engine import StepCost
from .faults import PERFECT, Direction
from .invariants import check_end, check_idle, check_links
from .lies import LIES, Failure
from .oracle import ToyModel
from .processes import run_each
from .running import SETTLE_SECS, START_SECS
from .scenario import Asked, Scenario
from .tapping import TappedNetwork
from .trace import Trace
from .violation import Violation, require
from .virtual import run_virtually, within
from .watching import FrameWatch, Place, Strike

STAGES: Final = 3
PEER_TIMEOUT_SECS: Final = 2.0
SLACK_SECS: Final = 1.0
"""Beyond the detection deadline."""
AWAY_SECS: Final = 0.5
"""How long a stage that was killed is away."""
RECOVERY_SECS: Final = 30.0
FOLLOWED: Final = GenerationRequest(prompt=list(b"a prompt of four chunks"), max_tokens=5)
OTHER: Final = GenerationRequest(prompt=list(b"another"), max_tokens=4)

Frames = Mapping[tuple[int, Direction], Sequence[MessageKind | ReplyKind]]
"""The frames of a request, by hop and direction."""
FOUND_OUT: Final = "completed, and the next one found the lie out"
_AT_ONCE: Final = 8


@attrs.frozen(slots=True)
class Cell:
    """What happens to which frame.

    Attributes:
        replay: whether a request goes on on another lane.
        victim: the stage that is killed; None for other failures.
    """

    failure: Failure
    place: Place
    replay: bool
    victim: int | None = None

    @property
    def hop(self) -> str:
        """Such as ``0>1``, or ``0<1`` for what comes back; ``2>0`` is the return stream."""
        place = self.place
        sign = ">" if place.way is Direction.FORWARD else "<"
        return f"{place.hop}{sign}{(place.hop + 1) % STAGES}"

    @property
    def name(self) -> str:
        """Of the failure."""
        return self.failure.value if self.victim is None else f"{self.failure.value} stage {self.victim}"

    def __str__(self) -> str:
        return f"{self.name} at {self.hop}[{self.place.index}]{'' if self.replay else ' without replay'}"


@attrs.frozen(slots=True)
class Result:
    """What came of a cell.

    Attributes:
        outcome: of the request that met the failure.
        violation: what does not hold; None: it is green.
        lines: of the trace, where it is red.
    """

    cell: Cell
    outcome: str
    violation: str | None
    lines: Sequence[str] = ()


def is_followed(message: Message) -> bool:
    return message.state.prompt_token_count in (len(FOLLOWED.prompt), len(FOLLOWED.prompt) - 1)


def _scenario(seed: int, replay: bool) -> Scenario:
    splits = (1,) * STAGES
    return Scenario(
        seed=seed,
        splits=splits,
        lanes=2,
        drivers=0,
        sequences=2,
        model=ToyModel(layers=len(splits), context_length=64, end_at=None),
        conditions=PERFECT,
        cost=StepCost(0.002),
        options=StageOptions(peer_timeout_secs=PEER_TIMEOUT_SECS),
        openai=OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_size=6, replay_on_stage_loss=replay),
        batch_max_tokens=None,
        asked=(),
        faults=(),
        blows=(),
    )


class _Run:
    """One chain from its start to its end, and one failure in between."""

    def __init__(self, cell: Cell | None, seed: int) -> None:
        self._cell = cell
        self._scenario = _scenario(seed, cell is None or cell.replay)
        self.clock = SimClock()
        self.trace = Trace()
        self.watch = FrameWatch()
        self._network = TappedNetwork(
            self.watch, random.Random(f"lies/{seed}/{cell}"), clock=self.clock, tell=self.trace
        )
        self._cluster = SimCluster(self._scenario, self._network, self.clock, self.trace)
        self._struck = 0.0
        self.outcome = "not asked"
        self.frames: Frames = {}

    async def run(self) -> None:
        """Raises Violation."""
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with scope:
                    await self._cluster.serve()

            nursery.start_soon(serve)
            await self._wait_whole("at the start")
            await self._ask_all()
            await self._wait_whole("after the failure")
            await self._probe()
            scope.cancel()
        check_end(self._network)

    async def _wait_whole(self, when: str) -> None:
        """Wait until all lanes are connected through all stages."""
        with within(RECOVERY_SECS, f"not every lane is connected {when}"):
            await self._cluster.wait_up()
            await self._cluster.wait_connected()

    def _client(self, name: str, request: GenerationRequest) -> Client:
        asked = Asked(at=trio.current_time(), request=request)
        return Client(name, asked, self._scenario.model, self._cluster, self.trace, lambda _: False)

    async def _ask_all(self) -> None:
        """The request that meets the failure, and others on the other lanes."""
        cell = self._cell
        strike = None if cell is None else Strike(cell.failure, cell.place, self._strikes)
        self.watch.follow(is_followed, strike)
        it = self._client("it", FOLLOWED)
        others = [self._client(f"other {i}", OTHER) for i in range(self._scenario.lanes - 1)]
        with within(2 * START_SECS, "a request has not ended"):
            async with trio.open_nursery() as nursery:
                for client in (it, *others):
                    nursery.start_soon(client.run)
        await trio.sleep(PEER_TIMEOUT_SECS + SLACK_SECS)  # what happens to its Stop comes after its answer
        self.outcome = str(it.outcome)
        self.frames = {key: list(kinds) for key, kinds in self.watch.trace.items()}
        require(cell is None or self.watch.struck, "the frame never came")
        self._judge(it, it_met=True)
        for client in others:
            self._judge(client, it_met=False)

    def _strikes(self) -> None:
        cell = self._cell
        assert cell is not None
        self._struck = trio.current_time()
        self.trace(f"strike: {cell}")
        if cell.victim is not None:
            self._cluster.kill(cell.victim, AWAY_SECS, silent=False)

    def _judge(self, client: Client, *, it_met: bool) -> None:
        """How a request may end."""
        cell = self._cell
        harmed = cell is not None and not cell.failure.harmless and (it_met or cell.victim is not None)
        if client.outcome == "completed":
            return
        assert cell is not None
        if cell.victim == 0 and client.outcome == "server died":
            return
        require(client.outcome == "failed", f"{client.name} {client.outcome}")
        require(harmed, f"{client.name} failed without a reason: {client.error}")
        require(not cell.replay, f"{client.name} failed in spite of replay: {client.error}")
        assert client.error is not None
        kind = f"{type(client.error).__name__} {client.error.status}: {client.error}"
        require(client.error.status == 503, f"{client.name} failed by {kind}")
        late = client.ended - max(self._struck, client.began) - PEER_TIMEOUT_SECS
        require(late <= SLACK_SECS, f"{client.name} failed {late:.3f} s after the deadline: {client.error}")

    async def _probe(self) -> None:
        """Requests on all lanes at once are served, and then nothing is left of any."""
        failed = [probe for probe in await self._probe_all() if probe.outcome != "completed"]
        if failed and self._may_be_found_out_later:
            # A lie about the end of a request can only be seen by what comes next on that lane.
            self.outcome = FOUND_OUT
            require(len(failed) == 1, f"{failed[1:]} failed after a lie that one lane was told")
            self._judge(failed[0], it_met=True)
            await self._wait_whole("after a lie was found out")
            failed = [probe for probe in await self._probe_all() if probe.outcome != "completed"]
        for probe in failed:
            require(False, f"{probe.name} {probe.outcome}: {probe.error}")
        if self._cell is not None and self._cell.place.index < 0:
            await trio.sleep(HANDSHAKE_SECS)  # by then a return stream that says nothing is given up
        await trio.sleep(SETTLE_SECS)
        check_idle(self._scenario, self._cluster)
        check_links(self._scenario, self._network)

    @property
    def _may_be_found_out_later(self) -> bool:
        cell = self._cell
        return cell is not None and not cell.replay and cell.failure in LIES and self.outcome == "completed"

    async def _probe_all(self) -> list[Client]:
        probes = [self._client(f"probe {i}", OTHER) for i in range(self._scenario.lanes)]
        with within(START_SECS, "a later request has not ended"):
            async with trio.open_nursery() as nursery:
                for probe in probes:
                    nursery.start_soon(probe.run)
        return probes


def _run(cell: Cell | None, seed: int) -> tuple[_Run, str | None]:
    run = _Run(cell, seed)
    return run, run_virtually(run.run, seed, run.clock, run.trace)


def frames_of_a_request(seed: int = 0) -> Frames:
    """What passes without a failure. Raises Violation."""
    run, violation = _run(None, seed)
    if violation is not None:
        raise Violation(f"without any failure: {violation}")
    return run.frames


def all_cells(frames: Frames) -> list[Cell]:
    """Every failure at every frame, and every stage killed there, with replay and without."""
    streams = sorted(frames, key=str)
    places = [Place(*stream, index) for stream in streams for index in range(len(frames[stream]))]
    places.append(Place(STAGES - 1, Direction.FORWARD, -1))
    kinds: list[tuple[Failure, int | None]] = [(f, None) for f in Failure if f is not Failure.KILL]
    kinds += [(Failure.KILL, victim) for victim in range(STAGES)]
    return [
        Cell(failure, place, replay, victim)
        for replay, (failure, victim), place in itertools.product((True, False), kinds, places)
    ]


def run_cell(cell: Cell, seed: int = 0) -> Result:
    """Run one cell in this thread, which must not run Trio yet."""
    run, violation = _run(cell, seed)
    return Result(cell, run.outcome, violation, () if violation is None else tuple(run.trace.lines))


def run_cells(cells: Iterable[Cell], seed: int, jobs: int) -> Iterator[Result]:
    """Run cells in so many processes, in order; with one job in this process."""
    return run_each(functools.partial(run_cell, seed=seed), cells, jobs, at_once=_AT_ONCE)


def show(results: Iterable[Result]) -> Iterator[str]:
    """The lines of the table: a row for each failure, a column for each hop, a letter for each frame.

    ``c``: the request completed; ``f``: it failed as it should; ``n``: the next one on its lane did, which
    found a lie out; ``-``: its server died; ``R``: a red cell.
    """
    letters = {"completed": "c", "failed": "f", "server died": "-", FOUND_OUT: "n"}
    rows: dict[str, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    hops: dict[str, None] = {}
    for result in results:
        letter = letters[result.outcome] if result.violation is None else "R"
        rows[result.cell.name][result.cell.hop] += letter
        hops[result.cell.hop] = None
    widths = {hop: max(len(hop), *(len(row[hop]) for row in rows.values())) for hop in hops}
    first = max(map(len, rows), default=0)
    yield " ".join(["".ljust(first), *(hop.ljust(widths[hop]) for hop in hops)]).rstrip()
    for name, row in rows.items():
        yield " ".join([name.ljust(first), *(row[hop].ljust(widths[hop]) for hop in hops)]).rstrip()
