"""Many clients on few lanes of a slow chain: answers or refusals, in order, and nothing left behind."""

from __future__ import annotations

import random
from collections import Counter

import attrs
import pytest
import trio
import trio.testing

from skippy.config import OpenAIOptions, StageOptions
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import GenerationRequest, TooManyRequests
from skippy.frontend.lanes import LanePool
from tests.stage.test_chain import unsplit_tokens
from tests.support.cluster import toy_cluster

CLIENTS, LANES, ROUNDS = 64, 4, 3


@attrs.define
class Clients:
    """Clients that ask until they have their answers, and leave now and then.

    Attributes:
        arrived, admitted: when each admitted request came and got its lane; numbers count arrivals.
        outcomes: how requests ended.
        most: the most requests that ran at once.
    """

    generator: ChainGenerator
    chance: random.Random = attrs.field(factory=lambda: random.Random(7))
    arrived: int = 0
    admitted: list[tuple[float, int]] = attrs.field(factory=list)
    outcomes: Counter[str] = attrs.field(factory=Counter)
    running: int = 0
    most: int = 0

    async def client(self, number: int) -> None:
        prompt = [256, *f"client {number}".encode()]
        for count in range(ROUNDS):
            tokens: list[int] | None = None
            while tokens is None:
                patience = self.chance.uniform(0.01, 0.5) if self.chance.random() < 0.2 else float("inf")
                with trio.move_on_after(patience) as scope:
                    tokens = await self._ask(GenerationRequest(prompt=prompt, max_tokens=4 + number % 5))
                if scope.cancelled_caught:
                    self.outcomes["left"] += 1
            assert tokens == unsplit_tokens(prompt, 4 + number % 5), f"answer {count} of client {number}"

    async def _ask(self, request: GenerationRequest) -> list[int] | None:
        self.arrived += 1
        number = self.arrived
        try:
            async with self.generator.generate(request) as stream:
                self.admitted.append((trio.current_time(), number))
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    tokens = [token async for token in stream]
                finally:
                    self.running -= 1
                self.outcomes["answered"] += 1
                return tokens
        except TooManyRequests as refusal:
            self.outcomes["refused"] += 1
            await trio.sleep(refusal.retry_after_secs or 0)
            return None


@pytest.mark.parametrize("adaptive", [False, True])
async def test_64_clients_on_4_lanes(autojump_clock: trio.testing.MockClock, adaptive: bool) -> None:
    stage_options = StageOptions(downstream_wire_delay_ms=10)
    options = OpenAIOptions(adaptive_generation_concurrency=adaptive)
    async with toy_cluster(2, lane_count=LANES, inline=True, options=stage_options) as cluster:
        pool = LanePool(cluster.first, LANES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.serve)
            await pool.wait_ready()
            clients = Clients(ChainGenerator(cluster.first, pool, "toy", options))
            async with trio.open_nursery() as asking:
                for number in range(CLIENTS):
                    asking.start_soon(clients.client, number)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(5)
            gate = clients.generator.gate
            assert (gate.queue_depth, gate.reserved_tokens) == (0, 0)
            lanes = [pool.take() for _ in range(LANES + 1)]
            assert [lane is None for lane in lanes] == [False] * LANES + [True]
            # No lane was ever replaced: the next number is the one after theirs.
            assert cluster.first.context.connection_numbers() == LANES + 1
            nursery.cancel_scope.cancel()
        assert clients.outcomes["answered"] == CLIENTS * ROUNDS
        # 4 run and 32 wait; the other 28 come back later, some of them more than once.
        assert clients.outcomes["refused"] >= 28
        assert clients.outcomes["left"] > 0
        assert 1 < clients.most <= LANES
        # In order of arrival; of those that were admitted in the same moment, any may be seen first.
        assert [number for _, number in sorted(clients.admitted)] == sorted(n for _, n in clients.admitted)
