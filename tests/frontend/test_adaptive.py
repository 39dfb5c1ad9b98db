"""Adaptive concurrency on simulated machines: it finds the number of lanes at which they serve most."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from skippy.frontend.adaptive import COOLDOWN_SECS, Adaptation, ConcurrencyController, Phase

Machine = Callable[[int], float]
"""Tokens per second in all, by the number of generations at once."""


def knee(at: int, rate: float = 100.0, fall: float = 0.0) -> Machine:
    """Grows in proportion up to ``at``, then loses ``fall`` of the best with every one more."""
    return lambda running: rate * (min(running, at) - fall * max(0, running - at))


class Simulation:
    """Generations on a machine that they share evenly, with ``clients`` that always want another."""

    def __init__(self, controller: ConcurrencyController, clients: int = 64, seed: int = 1) -> None:
        self.controller = controller
        self.clients = clients
        self.now = 0.0
        self.tokens = 0.0
        self.adaptations: list[Adaptation] = []
        self.limits = {controller.limit}
        self._chance = random.Random(seed)
        self._running: list[list[float]] = []  # [tokens left, tokens, began]

    def run(self, machine: Machine, secs: float) -> None:
        end = self.now + secs
        while self.now < end:
            while len(self._running) < min(self.controller.limit, self.clients):
                size = self._chance.uniform(150, 250)
                self._running.append([size, size, self.now])
            each = machine(len(self._running)) / len(self._running)
            step = min(left for left, _, _ in self._running) / each
            self.now += step
            self.tokens += step * each * len(self._running)
            for generation in self._running:
                generation[0] -= step * each
            for generation in [one for one in self._running if one[0] < 1e-6]:
                self._running.remove(generation)
                self._finished(generation[1], self.now - generation[2])

    def _finished(self, size: float, secs: float) -> None:
        queued = self.clients > len(self._running) + 1
        adaptation = self.controller.finished(self.now, int(self.tokens), 1000 * secs / size, queued=queued)
        if adaptation is not None:
            self.adaptations.append(adaptation)
        self.limits.add(self.controller.limit)

    def settled(self, machine: Machine, secs: float = 600) -> int:
        """The limit that is in use for most of ``secs``."""
        times: dict[int, float] = {}
        end = self.now + secs
        while self.now < end:
            began, limit = self.now, self.controller.limit
            self.run(machine, 1)
            times[limit] = times.get(limit, 0.0) + self.now - began
        return max(times, key=times.__getitem__)


@pytest.mark.parametrize("at", [1, 2, 5, 8])
@pytest.mark.parametrize("fall", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_it_converges_to_the_knee(at: int, fall: float, seed: int) -> None:
    simulation = Simulation(ConcurrencyController(1, 8), seed=seed)
    machine = knee(at, fall=fall)
    simulation.run(machine, 600)
    assert simulation.settled(machine) == at
    assert simulation.limits <= set(range(1, 9))
    # Beyond the knee it looks again, and rests after every look.
    backed_off = [adaptation for adaptation in simulation.adaptations if adaptation.action == "back_off"]
    assert len(backed_off) <= simulation.now / COOLDOWN_SECS
    if at < 8:
        assert {(adaptation.previous, adaptation.current) for adaptation in backed_off} == {(at + 1, at)}
        assert {adaptation.reason for adaptation in backed_off} == {"throughput"}


def test_a_load_that_changes() -> None:
    simulation = Simulation(ConcurrencyController(1, 8))
    wide, narrow = knee(6), knee(2, fall=0.2)
    simulation.run(wide, 300)
    assert simulation.settled(wide) == 6
    simulation.run(narrow, 300)
    assert simulation.settled(narrow) == 2
    simulation.run(wide, 300)
    assert simulation.settled(wide) == 6


def test_a_machine_that_is_only_slower_keeps_its_lanes() -> None:
    simulation = Simulation(ConcurrencyController(1, 8))
    simulation.run(knee(4), 300)
    slower = knee(4, rate=30)
    simulation.run(slower, 300)
    assert simulation.settled(slower) == 4


def test_nothing_moves_without_a_queue() -> None:
    simulation = Simulation(ConcurrencyController(2, 8), clients=2)
    simulation.run(knee(8), 600)
    assert (simulation.adaptations, simulation.controller.limit) == ([], 2)


@pytest.mark.parametrize(("minimum", "ceiling"), [(1, 1), (3, 4)])
def test_it_stays_within_its_bounds(minimum: int, ceiling: int) -> None:
    simulation = Simulation(ConcurrencyController(minimum, ceiling))
    for machine in (knee(8), knee(1, fall=0.1), knee(8), knee(2)):
        simulation.run(machine, 200)
    assert simulation.limits == set(range(minimum, ceiling + 1))


@pytest.mark.parametrize(("minimum", "ceiling"), [(0, 4), (5, 4)])
def test_bounds_that_make_no_sense(minimum: int, ceiling: int) -> None:
    with pytest.raises(ValueError, match=f"least concurrency is {minimum}; it must be 1 to 4"):
        ConcurrencyController(minimum, ceiling)


def probing() -> Simulation:
    """A simulation that has just begun to try a second lane."""
    simulation = Simulation(ConcurrencyController(1, 4))
    while not simulation.adaptations:
        simulation.run(knee(4), 1)
    [probe] = simulation.adaptations
    assert (probe.action, probe.reason, probe.previous, probe.current) == ("probe", "queueing", 1, 2)
    assert probe.baseline.throughput == pytest.approx(100, rel=0.01)
    assert probe.baseline.p95_ms == pytest.approx(10, rel=0.01)
    return simulation


@pytest.mark.parametrize("trying", [False, True])
def test_a_failure_takes_a_probe_back_at_once(trying: bool) -> None:
    simulation = probing()
    controller = simulation.controller
    while trying and controller.phase is not Phase.TRYING:
        simulation.run(knee(4), 1)
    back = controller.failed(simulation.now)
    assert back is not None
    assert (back.action, back.reason, back.previous, back.current) == ("back_off", "failure", 2, 1)
    assert controller.limit == 1
    assert controller.failed(simulation.now) is None
    # It rests, and then tries again.
    began = simulation.now
    while controller.limit == 1:
        simulation.run(knee(4), 1)
    assert simulation.now - began >= COOLDOWN_SECS


def test_a_lane_more_that_makes_requests_wait_for_each_other() -> None:
    """More throughput, bought with a tail that sharing the machine does not explain."""
    simulation = probing()
    controller = simulation.controller
    tokens, now = simulation.tokens, simulation.now
    back = None
    for index in range(40):
        now, tokens = now + 1, tokens + 150
        slow = index % 3 == 0
        back = controller.finished(now, int(tokens), 40.0 if slow else 10.0, queued=True)
        if back is not None:
            break
    assert back is not None
    assert (back.action, back.reason, controller.limit) == ("back_off", "latency", 1)
    shown = back.attributes()
    assert shown["throughput_ratio"] == pytest.approx(1.5, rel=0.02)
    assert shown["p95_ratio"] == pytest.approx(4, rel=0.02)
    assert (shown["previous"], shown["current"]) == (2, 1)


def test_ends_that_take_no_time_divide_by_nothing() -> None:
    """A clock that stands still, as in a simulation, measures nothing; one that jumps measures no latency."""
    controller = ConcurrencyController(1, 2)
    for _ in range(100):
        assert controller.finished(0.0, 0, 0.0, queued=True) is None
    probe = None
    for second in range(20):
        probe = probe or controller.finished(float(second), 0, 0.0, queued=True)
    assert probe is not None
    assert probe.attributes()["baseline_throughput"] == 0
