"""The chain under simulation: stages as tasks that can be killed, cut off, and started again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import attrs
import trio

from skippy.config import PeerConfig, StageConfig, StagePlacement, StageTopology
from skippy.frontend.admission import AdmissionGate
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.lanes import LanePool
from skippy.stage import Stage, open_stage
from skippy.stage.memory import FrameBudget
from skippy.stage.scheduler import Scheduler

from .clock import SimClock
from .engine import SimEngine, VirtualRuntime, open_virtual_runtime
from .network import SimNetwork
from .scenario import Scenario
from .trace import Trace


def party(index: int) -> str:
    """What a stage is called on the network."""
    return f"stage-{index}"


@attrs.define(eq=False)
class FrontEnd:
    """What serves requests on a running stage 0."""

    pool: LanePool
    generator: ChainGenerator
    gate: AdmissionGate


@attrs.define(eq=False)
class Running:
    """A stage that is up, and those parts of it that are looked at all the time."""

    stage: Stage
    engine: SimEngine
    runtime: VirtualRuntime
    scheduler: Scheduler
    frame_budget: FrameBudget
    sequences: int


class SimCluster:
    """All stages of a scenario. :meth:`serve` is its task.

    Attributes:
        running: the stages that are up, by index; None for one that is not.
        front: stage 0's front end; None while that stage is down.
        clients: scopes of those who are connected to stage 0's process, and end with it.
    """

    def __init__(self, scenario: Scenario, network: SimNetwork, clock: SimClock, trace: Trace) -> None:
        count = len(scenario.splits)
        self.running: list[Running | None] = [None] * count
        self.front: FrontEnd | None = None
        self.clients: dict[trio.CancelScope, None] = {}
        self._scenario = scenario
        self._network = network
        self._clock = clock
        self._trace = trace
        self._ids = random.Random(f"ids/{scenario.seed}")
        self._scopes = [trio.CancelScope() for _ in range(count)]
        self._away = [0.0] * count
        self._changed = trio.lowlevel.ParkingLot()
        bounds = [sum(scenario.splits[:index]) for index in range(count + 1)]
        self._topology = StageTopology(
            topology_id="sim",
            model_id="toy",
            stages=tuple(
                StagePlacement(
                    stage_id=party(index),
                    stage_index=index,
                    endpoint=f"sim:{index + 1}",
                    layer_start=bounds[index],
                    layer_end=bounds[index + 1],
                    load_mode="runtime-slice",
                )
                for index in range(count)
            ),
        )

    async def serve(self) -> None:
        """Keep every stage up until cancelled; one that was killed comes back after its time."""
        async with trio.open_nursery() as nursery:
            for index in reversed(range(len(self.running))):
                nursery.start_soon(self._keep, index)

    def kill(self, index: int, secs: float, *, silent: bool) -> None:
        """End the process of a stage; it starts again after ``secs``. Never waits."""
        if self.running[index] is None:
            return
        if silent:
            self._network.vanish(party(index))
        else:
            self._network.crash(party(index))
        if index == 0:
            self.front = None
            for scope in self.clients:
                scope.cancel()
        self._away[index] = secs
        self._scopes[index].cancel()

    async def wait_up(self) -> None:
        """Wait until every stage is up."""
        while not all(self.running):
            await self._changed.park()

    async def wait_connected(self) -> None:
        """Wait until every lane of stage 0's pool is connected."""
        # What may change is all of stage 0, so there is no event to wait for; time is virtual.
        while (front := self.front) is None or front.pool.connected < front.pool.size:  # noqa: ASYNC110
            await trio.sleep(0.1)

    async def _keep(self, index: int) -> None:
        while True:
            with trio.CancelScope() as scope:
                self._scopes[index] = scope
                async with self._open(index) as running:
                    self.running[index] = running
                    self._changed.unpark_all()
                    self._trace(f"{party(index)} is up")
                    try:
                        await trio.sleep_forever()
                    finally:
                        self.running[index] = None
                        if index == 0:
                            self.front = None
            self._trace(f"{party(index)} is down")
            await trio.sleep(self._away[index])
            if party(index) in self._network.unreachable:
                self._network.return_of(party(index))

    @contextlib.asynccontextmanager
    async def _open(self, index: int) -> AsyncIterator[Running]:
        scenario, engines = self._scenario, list[SimEngine]()
        config = self._config(index)

        def make_engine() -> SimEngine:
            engine = SimEngine(
                config.layer_start,
                config.layer_end,
                scenario.model.layers,
                clock=self._clock,
                cost=scenario.cost,
                width=scenario.model.width,
                context_length=scenario.model.context_length,
                max_sequences=scenario.native_sequences,
                max_batch=64,
                end_at=scenario.model.end_at,
            )
            engines.append(engine)
            return engine

        runtimes: list[VirtualRuntime] = []

        @contextlib.asynccontextmanager
        async def open_runtime() -> AsyncIterator[VirtualRuntime]:
            async with open_virtual_runtime(self._clock, self._network) as runtime:
                runtimes.append(runtime)
                yield runtime

        async with contextlib.AsyncExitStack() as stack:
            stage = await stack.enter_async_context(
                open_stage(
                    config,
                    self._topology,
                    scenario.options,
                    make_engine,
                    transport=self._network.of(party(index)),
                    open_runtime=open_runtime,
                )
            )
            if index == 0:
                nursery = await stack.enter_async_context(trio.open_nursery())
                self.front = self._open_front(stage)
                nursery.start_soon(self.front.pool.serve)
            context, engine = stage.context, engines[0]
            yield Running(
                stage,
                engine,
                runtimes[0],
                context.scheduler,
                context.frame_budget,
                engine.info.max_sequences,
            )

    def _open_front(self, stage: Stage) -> FrontEnd:
        pool = LanePool(stage, self._scenario.lanes)
        generator = ChainGenerator(stage, pool, "toy", self._scenario.openai, new_id=self._new_id)
        return FrontEnd(pool, generator, generator.gate)

    def _new_id(self) -> int:
        return self._ids.getrandbits(64) or 1

    def _config(self, index: int) -> StageConfig:
        stages = self._topology.stages

        def peer(other: int) -> PeerConfig | None:
            if not 0 <= other < len(stages):
                return None
            placed = stages[other]
            return PeerConfig(stage_id=placed.stage_id, stage_index=other, endpoint=placed.endpoint)

        placed = stages[index]
        return StageConfig(
            run_id="sim",
            topology_id="sim",
            model_id="toy",
            stage_id=placed.stage_id,
            stage_index=index,
            layer_start=placed.layer_start,
            layer_end=placed.layer_end,
            load_mode="runtime-slice",
            model_path="none.gguf",
            bind_addr=placed.endpoint,
            ctx_size=self._scenario.model.context_length,
            lane_count=self._scenario.sequences,
            kv_cache=None if self._scenario.prefixes is None else self._scenario.prefixes.cache,
            batch_max_tokens=self._scenario.batch_max_tokens,
            upstream=peer(index - 1),
            downstream=peer(index + 1),
        )
