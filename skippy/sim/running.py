"""One seed from its first event to its last: the same seed gives the same trace, byte for byte."""

from __future__ import annotations

import math
import random
from typing import Final

import attrs
import trio

from skippy.frontend.generation import GenerationRequest
from skippy.stage.context import HANDSHAKE_SECS

from .clients import Client
from .clock import SimClock
from .cluster import SimCluster, party
from .faults import Fault, FaultKind
from .invariants import check_always, check_end, check_idle, check_links
from .network import SimNetwork
from .peers import Peer
from .prefixes import Loss
from .scenario import Asked, Blow, Scenario
from .trace import Trace
from .violation import Violation, require
from .virtual import run_virtually, within

START_SECS: Final = 30.0
"""A chain without faults is ready within this time."""
REQUEST_SECS: Final = 180.0
"""Every request has ended by then."""
PEER_SECS: Final = 270.0
"""And every peer, whatever it has asked within ASKING_SECS, and however slow its link has become."""
PEER_STALL_SECS: Final = 30.0
"""A peer waits for a reply for as long as its link is there, and a link that is dead is the system's to find:
so its link stalls for no longer."""
HOLDING_STALL_SECS: Final = 10.0
"""Where a request may have to wait for the sequence that a peer holds: it fails when it has waited for
:data:`~skippy.stage.scheduler.SEQUENCE_WAIT_SECS`, which would be no fault of the chain."""
HOLDING_BYTE_SECS: Final = 0.001
"""And what a byte may take then on a link that trickles."""
DETECTION_SECS: Final = 1.0
"""So long after a neighbour's timeout, a lane that a fault has hit is known to be lost."""
RECOVERY_SECS: Final = 30.0
"""After the last fault: every lane is connected again."""
PROBE_SECS: Final = 60.0
"""A request in a chain without faults has ended by then."""
SETTLE_SECS: Final = 5.0
"""After the last request: nothing is held for it any more."""
END_SECS: Final = 10.0
"""A chain that is told to end has done so by then."""
MOST_REPLAYS: Final = 3
"""Faults that a request survives, whichever they are."""
LIES: Final = frozenset({FaultKind.CORRUPT.value, FaultKind.LIE.value})
"""Faults after which a request may get anything: nothing but their meaning shows that bytes are not right."""
MAX_PASSES: Final = 500_000
"""Of the scheduler: more than any scenario takes."""


@attrs.frozen(slots=True)
class Report:
    """What came of a scenario.

    Attributes:
        violation: what does not hold; None where all does.
        trace: everything that happened.
        secs: of virtual time.
        outcomes: how requests have ended, and how often.
    """

    scenario: Scenario
    violation: str | None
    trace: Trace
    secs: float
    outcomes: dict[str, int]


class _Watch(trio.abc.Instrument):
    """Looks at what must always hold after every pass of the scheduler, and ends what never ends."""

    def __init__(self, cluster: SimCluster, scope: trio.CancelScope) -> None:
        self.violation: str | None = None
        self._cluster = cluster
        self._scope = scope
        self._passes = 0

    def before_io_wait(self, timeout: float) -> None:
        if self.violation is not None:
            return
        self._passes += 1
        try:
            check_always(self._cluster)
            if self._passes >= MAX_PASSES:
                raise Violation("the chain does not come to rest")
        except Violation as violation:
            self.violation = str(violation)
            self._scope.cancel()


class Simulation:
    """Runs one scenario: call :meth:`run` once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.trace = Trace()
        self._clock = SimClock()
        self._network = SimNetwork(
            scenario.seed, scenario.conditions, scenario.faults, clock=self._clock, tell=self.trace
        )
        self._cluster = SimCluster(scenario, self._network, self._clock, self.trace)
        self._clients: list[Client] = []
        self._peers: list[Peer] = []
        self._detection_secs = scenario.options.peer_timeout_secs + DETECTION_SECS
        self.secs = 0.0

    async def run(self) -> None:
        """All of it, on virtual time. Raises Violation."""
        with trio.CancelScope() as scope:
            watch = _Watch(self._cluster, scope)
            trio.lowlevel.add_instrument(watch)
            try:
                await self._run()
            finally:
                trio.lowlevel.remove_instrument(watch)
                self.secs = trio.current_time()
        require(watch.violation is None, watch.violation or "")

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            cluster_scope, ended = trio.CancelScope(), trio.Event()

            async def serve() -> None:
                with cluster_scope:
                    await self._cluster.serve()
                ended.set()

            nursery.start_soon(serve)
            with within(START_SECS, "the stages have not started"):
                await self._cluster.wait_up()
            await self._stormy()
            await self._calm_down()
            await self._probe()
            cluster_scope.cancel()
            with within(END_SECS, "the chain did not end when it was told to"):
                await ended.wait()
        check_end(self._network)

    # -- phases ----------------------------------------------------------------------------------------

    async def _stormy(self) -> None:
        """Requests come, and things go wrong."""
        scenario = self._scenario
        async with trio.open_nursery() as nursery:
            if not scenario.faulty:
                with within(START_SECS, "the lanes are not connected"):
                    await self._cluster.wait_connected()
            for number, asked in enumerate(scenario.asked):
                self._start_client(nursery, f"request {number}", asked)
            for number in range(scenario.drivers):
                nursery.start_soon(self._run_peer, number)
            for blow in scenario.blows:
                nursery.start_soon(self._strike, blow)
            for loss in () if scenario.prefixes is None else scenario.prefixes.losses:
                nursery.start_soon(self._lose, loss)

    def _start_client(self, nursery: trio.Nursery, name: str, asked: Asked) -> Client:
        client = Client(name, asked, self._scenario.model, self._cluster, self.trace, self._may_differ)
        self._clients.append(client)

        async def run() -> None:
            with within(asked.at - trio.current_time() + REQUEST_SECS, f"{name} has not ended"):
                await client.run()
            self._check_end_of(client)

        nursery.start_soon(run)
        return client

    async def _run_peer(self, number: int) -> None:
        running = self._cluster.running[0]
        assert running is not None
        name = f"peer-{number}"
        chance = random.Random(f"peer/{self._scenario.seed}/{number}")
        sessions, frames = chance.randint(1, 2), chance.randint(*self._scenario.size.frames)
        prefixes, texts = self._scenario.prefixes, tuple[tuple[int, ...], ...]()
        if prefixes is not None:
            texts = (*prefixes.texts, *(tuple(asked.request.prompt) for asked in self._scenario.asked))
            sessions += 1
            # Half of them come when requests have left something, and stages may have lost it again.
            await trio.sleep(chance.choice([0.0, chance.uniform(0, 2 * self._scenario.size.secs)]))
        places = random.Random(f"places/{self._scenario.seed}/{number}")
        peer = Peer(
            name, chance, places, self._scenario.model, self.trace, sessions, frames, self._may_differ, texts
        )
        self._peers.append(peer)
        with within(PEER_SECS, f"{name} has not ended"):
            await peer.run(running.stage, self._network.of(name))
        require(peer.ended == "done" or self._scenario.faulty, f"{name} ended without a fault: {peer.ended}")

    async def _strike(self, blow: Blow) -> None:
        await trio.sleep_until(blow.at)
        if blow.fault is not None:
            wires = list(self._network.wires.values())
            if wires:
                wire, fault = wires[int(blow.place * len(wires))], blow.fault
                if wire.name.dialer not in map(party, range(len(self._scenario.splits))):
                    fault = attrs.evolve(fault, secs=min(fault.secs, self._most_secs_of_a_peer(fault)))
                wire.strike(blow.direction, fault)
        elif blow.kills:
            self._cluster.kill(blow.stage, blow.secs, silent=blow.silent)
        else:
            name = party(blow.stage)
            if name not in self._network.unreachable:
                self._network.vanish(name)
                await trio.sleep(blow.secs)
                self._network.return_of(name)

    def _most_secs_of_a_peer(self, fault: Fault) -> float:
        scenario = self._scenario
        if scenario.sequences >= scenario.lanes + scenario.drivers:
            return PEER_STALL_SECS
        return HOLDING_BYTE_SECS if fault.kind is FaultKind.TRICKLE else HOLDING_STALL_SECS

    async def _lose(self, loss: Loss) -> None:
        await trio.sleep_until(loss.at)
        running = self._cluster.running[int(loss.place * len(self._cluster.running))]
        cache = None if running is None else running.stage.context.cache
        if cache is None:
            return
        if loss.everything:
            cache.forget_all("all")
        elif entries := cache.index.entries():
            cache.forget(entries[0])

    async def _calm_down(self) -> None:
        """Nothing goes wrong any more: the chain recovers by itself."""
        self.trace("nothing goes wrong from here on")
        self._network.heal()
        with within(START_SECS, "a stage that was killed is not back"):
            await self._cluster.wait_up()
        await trio.sleep(self._detection_secs)
        with within(RECOVERY_SECS, "the chain does not recover: lanes are not connected"):
            await self._cluster.wait_connected()

    async def _probe(self) -> None:
        """Requests on all lanes at once are served, and nothing is left of any request then."""
        scenario = self._scenario
        request = GenerationRequest(prompt=[72, 101, 108, 108, 111], max_tokens=6)
        probes = []
        with within(PROBE_SECS, "a request after all faults has not ended"):
            async with trio.open_nursery() as nursery:
                for number in range(scenario.lanes):
                    asked = Asked(at=trio.current_time(), request=request)
                    probes.append(self._start_client(nursery, f"probe {number}", asked))
        for probe in probes:
            require(
                probe.outcome == "completed", f"{probe.name} {probe.outcome} after all faults: {probe.error}"
            )
        await trio.sleep(SETTLE_SECS)
        check_idle(scenario, self._cluster, altered=self._may_differ(trio.current_time()))
        await self._links_settle()

    async def _links_settle(self) -> None:
        """A link that was lost in its handshake is given up when the time for that is over."""
        latest = trio.current_time() + HANDSHAKE_SECS
        while True:
            try:
                check_links(self._scenario, self._network)
            except Violation:
                if trio.current_time() > latest:
                    raise
                await trio.sleep(1)
            else:
                return

    # -- judging ---------------------------------------------------------------------------------------

    def _struck_since(self, began: float) -> list[str]:
        """The faults that a request may have met which began then and ends now."""
        return [kind for at, kind in self._network.struck if at >= began - self._detection_secs]

    def _may_differ(self, began: float) -> bool:
        """Whether a client that began then may have got what a changed byte has made of it.

        Stages that remember prefixes may give what it has made to anyone who comes later, too.
        """
        since = began if self._scenario.prefixes is None else -math.inf
        return not LIES.isdisjoint(self._struck_since(since))

    def _check_end_of(self, client: Client) -> None:
        """A request may only fail by an error of its own kind, and only where something went wrong."""
        error = client.error
        if error is None:
            require(
                client.outcome != "no server"
                or any(blow.kills and not blow.stage for blow in self._scenario.blows),
                f"{client.name} found no server",
            )
            return
        require(self._scenario.faulty, f"{client.name} failed without a fault: {error}")
        struck = self._struck_since(client.began)
        text = f"{client.name} failed after {', '.join(struck) or 'nothing'}: {error}"
        if LIES.isdisjoint(struck):
            require(error.status in (503, 504), text)
            refused = not client.got and str(error).startswith("the chain is not ready")
            require(refused or len(struck) > MOST_REPLAYS, text)


def simulate(scenario: Scenario) -> Report:
    """Run a scenario in this thread, which must not run Trio yet."""
    simulation = Simulation(scenario)
    violation = run_virtually(simulation.run, scenario.seed, simulation._clock, simulation.trace)
    outcomes: dict[str, int] = {}
    for client in simulation._clients:
        outcomes[client.outcome or "running"] = outcomes.get(client.outcome or "running", 0) + 1
    return Report(scenario, violation, simulation.trace, simulation.secs, outcomes)
