"""Whole chains under simulation: a thousand seeds, the same trace each time, and what a failure says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from skippy.cli.main import cli
from skippy.protocol import MessageKind
from skippy.sim.batch import Settings, run_seed, run_seeds
from skippy.sim.cluster import SimCluster
from skippy.sim.faults import Direction, Fault, FaultKind
from skippy.sim.invariants import check_idle
from skippy.sim.peers import Peer
from skippy.sim.running import Simulation, simulate
from skippy.sim.scenario import Blow, Scenario, draw
from skippy.sim.sizes import LARGE, SIZES, SMALL
from skippy.stage.keeping import StageCache
from skippy.stage.scheduler import Scheduler

SEEDS = 1000


@pytest.mark.slow
@pytest.mark.all_cores
def test_a_thousand_seeds() -> None:
    settings = Settings()
    failed, completed, faulty = [], 0, 0
    for result in run_seeds(settings, range(SEEDS), os.cpu_count() or 1):
        completed += result.outcomes.get("completed", 0)
        faulty += result.faulty
        if result.violation is not None:
            failed.append(f"{settings.command(result.seed)}: {result.violation}")
    assert not failed, "\n".join(failed)
    assert completed > 3 * SEEDS
    assert SEEDS / 3 < faulty < SEEDS


@pytest.mark.parametrize("seed", [701, 760, 1592, 1850, 2896, 12195, 20735])
def test_seeds_that_have_found_faults(seed: int) -> None:
    """Requests that waited for each other; a draw between two tokens; a row overwritten; a peer that went on;
    a replay taken for a miss; one that was refused behind what was restored; a miss that left some of it."""
    assert run_seed(Settings(size="large"), seed).violation is None


def test_a_peer_may_get_what_changed_bytes_have_made_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation has no checksum: nobody can know. With no byte changed it is a fault."""
    report = simulate(draw(11119, size="large"))
    assert report.violation is None
    assert any("peer-0 ended: LinkClosed: peer-0 got" in line for line in report.trace.lines)
    monkeypatch.setattr(Simulation, "_may_differ", lambda self, began: False)
    assert str(simulate(draw(11119, size="large")).violation).startswith("peer-0 got")


def test_an_audit_may_find_what_changed_bytes_have_made_of_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do keys and values have one. With no byte changed, a prefix that differs is a fault."""
    report = simulate(draw(37781, size="small"))
    assert report.violation is None
    assert "log: a remembered prefix differs from what computing it again gives" in report.trace.text

    def strict(scenario: Scenario, cluster: SimCluster, *, altered: bool) -> None:
        assert altered
        check_idle(scenario, cluster)

    monkeypatch.setattr("skippy.sim.running.check_idle", strict)
    violation = str(simulate(draw(37781, size="small")).violation)
    assert violation == "stage-1 has remembered what it computes otherwise"


def test_what_changed_bytes_have_made_is_remembered() -> None:
    """So who comes later may get it from the cache of a stage; without one, only who was there."""
    drawn = draw(37781, size="small")
    for scenario, later in ((drawn, True), (attrs.evolve(drawn, prefixes=None), False)):
        simulation = Simulation(scenario)
        simulation._network.struck.append((100.0, FaultKind.LIE.value))
        assert simulation._may_differ(began=100.0)
        assert simulation._may_differ(began=500.0) is later


def test_no_request_waits_in_vain_for_the_sequence_of_a_peer_whose_link_is_slow() -> None:
    """There is one for both. A request that has waited for as long as it may would fail by nobody's fault."""
    drawn = draw(8833, size="small")
    assert drawn.drivers
    assert drawn.sequences == drawn.lanes
    assert any(blow.fault is not None and blow.fault.kind is FaultKind.STALL for blow in drawn.blows)
    report = simulate(drawn)
    assert report.violation is None
    assert "peer-0>stage-0#0 forward stall now" in report.trace.text
    assert "peer-0 ended: done" in report.trace.text


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("fault", [Fault(FaultKind.STALL), Fault(FaultKind.TRICKLE, secs=0.05)], ids=str)
def test_a_peer_whose_link_gets_slow_or_dead_ends(fault: Fault, direction: Direction) -> None:
    """A slow link is no fault of the chain, and that of a peer carries no signs of life."""
    drawn = draw(8, size="large")
    assert drawn.drivers
    blow = Blow(at=0.3, fault=fault, direction=direction, place=0.0)
    report = simulate(attrs.evolve(drawn, faults=(), blows=(blow,)))
    assert report.violation is None
    assert f"peer-0>stage-0#0 {direction.value} {fault.kind.value} now" in report.trace.text
    assert "peer-0 ended: done" in report.trace.text
    assert 30 < report.secs < 400


@pytest.mark.parametrize("seed", [10, 86, 473])
def test_a_seed_gives_the_same_trace_in_every_process(seed: int, tmp_path: Path) -> None:
    traces = []
    for hash_seed in ("1", "4242"):
        path = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-m", "skippy.cli", "sim", "--seed", str(seed), "--trace", path],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=False,
            capture_output=True,
            timeout=60,
        )
        traces.append(path.read_bytes())
    assert traces[0].count(b"\n") > 100
    assert traces[0] == traces[1]


def test_a_seed_gives_the_same_trace_again_in_one_process() -> None:
    assert len({run_seed(Settings(), 86).digest for _ in range(2)}) == 1
    assert run_seed(Settings(), 87).digest != run_seed(Settings(), 86).digest


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Scheduler, "release_sequence", lambda self, sequence: None)
    words = ["sim", "--seed", "3", "--size", "small", "--stages", "2", "--requests", "2", "--faults", "none"]
    done = CliRunner().invoke(cli, [*words, "--trace", str(tmp_path / "trace")], standalone_mode=False)
    lines = done.output.splitlines()
    assert done.return_value == 1
    assert "seed 3: " in done.output
    assert "no free sequence" in done.output
    assert f"run it again with: skippy {' '.join(words)} --trace FILE" in lines
    assert lines[-1] == "1 seeds failed"
    trace = (tmp_path / "trace").read_text("utf-8").splitlines()
    assert trace[-40:] == lines[:40]


def test_faults_may_be_chosen(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["sim", "--faults", "rain"])
    assert done.exit_code == 2
    assert "crash, vanish" in done.output
    done = CliRunner().invoke(cli, ["sim", "--count", "2", "--trace", str(tmp_path / "trace")])
    assert done.exit_code == 2
    assert "--trace" in done.output
    for seed in range(200):
        assert not draw(seed, faults=()).faulty
        assert not draw(seed, faults=["weather"]).faulty
        blows = draw(seed, faults=["reset", "vanish"]).blows
        assert not any(blow.kills and not blow.silent for blow in blows)


def test_stages_that_remember_are_found_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all seeds have caches, and their prompts make them hit in every way."""
    drawn = [scenario for seed in range(400) if (scenario := draw(seed, size="large")).prefixes]
    assert 160 < len(drawn) < 240
    seen: Counter[str] = Counter()
    count_hit = StageCache._count_hit

    def count(self: StageCache, length: int) -> None:
        count_hit(self, length)
        seen["tokens"] += length
        for way in ("takes", "copies", "imports"):
            seen[way] = max(seen[way], getattr(self.index.counters, way))

    monkeypatch.setattr(StageCache, "_count_hit", count)
    for scenario in drawn:
        assert scenario.native_sequences >= scenario.sequences
        if not scenario.faulty and not all(seen[way] for way in ("takes", "copies", "imports")):
            assert simulate(scenario).violation is None
    assert seen["tokens"] > 50
    assert all(seen[way] for way in ("takes", "copies", "imports"))


def test_peers_ask_for_prefixes_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """And get all, some or nothing of them; what they are told then is checked by the peer itself."""
    seen: set[tuple[MessageKind, bool, str]] = set()
    ask_for, restore_and_decode = Peer._ask_for, Peer._restore_and_decode

    async def asks(self: Peer, kind: MessageKind, prefix: list[int]) -> int:
        found = await ask_for(self, kind, prefix)
        seen.add((kind, self._settles, "all" if found == len(prefix) else "some" if found else "nothing"))
        return found

    async def restores(self: Peer) -> bool:
        hit = await restore_and_decode(self)
        seen.add((MessageKind.TRY_RESTORE_PREFILL_DECODE, self._settles, "all" if hit else "nothing"))
        return hit

    monkeypatch.setattr(Peer, "_ask_for", asks)
    monkeypatch.setattr(Peer, "_restore_and_decode", restores)
    wanted = {
        (MessageKind.TRY_RESTORE_PREFILL, False, "all"),
        (MessageKind.TRY_RESTORE_PREFILL, True, "some"),
        (MessageKind.PROBE_PREFILL, False, "nothing"),
        (MessageKind.RESTORE_PREFILL, True, "nothing"),
        (MessageKind.TRY_RESTORE_PREFILL_DECODE, True, "nothing"),
    }
    for scenario in (draw(seed, size="large") for seed in range(400)):
        if scenario.drivers and scenario.prefixes is not None and not wanted <= seen:
            assert simulate(scenario).violation is None
    assert wanted <= seen
    assert not any(some == "some" for _, settles, some in seen if not settles)


def test_a_seed_says_how_large_it_is() -> None:
    """Few are large, and what is asked for with a size is what it is where the seed chose that."""
    sizes = {seed: draw(seed).size for seed in range(1000)}
    assert 70 < sum(size is LARGE for size in sizes.values()) < 130
    for seed in range(50):
        assert draw(seed, size=sizes[seed].name).asked == draw(seed).asked
        small, large = draw(seed, size="small"), draw(seed, size="large")
        assert len(small.splits) in SMALL.stages
        assert len(large.splits) in LARGE.stages
        assert all(asked.request.max_tokens in SMALL.answer for asked in small.asked)
        assert all(asked.at <= 2 * SMALL.secs for asked in small.asked)
    tokens = {size: sum(_tokens(seed, size) for seed in range(100)) for size in SIZES}
    assert 3 * tokens["small"] < tokens["large"]


def _tokens(seed: int, size: str) -> int:
    asked = draw(seed, size=size).asked
    return sum(len(each.request.prompt) + each.request.max_tokens for each in asked)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_faults_every_request_that_stays_is_completed(stages: int) -> None:
    for seed in range(5):
        result = run_seed(Settings(stages=stages, requests=6, faults=()), seed)
        assert result.violation is None
        assert set(result.outcomes) <= {"completed", "left"}
        assert sum(result.outcomes.values()) >= 6
