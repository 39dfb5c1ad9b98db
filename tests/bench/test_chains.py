"""Chains that the benchmarks start, and the links and engines they are made of."""

from __future__ import annotations

import numpy as np
import trio
import trio.testing

from bench.chains import ChainSpec, open_chain
from bench.common import Report, Spread
from bench.hop import Round, added, measure, report
from bench.slow_links import SlowTransport
from bench.wire_engine import CHOSEN, WireEngine
from skippy.config import Endpoint, WireConditions
from skippy.engine import Segment
from skippy.stage.links import Link, MemoryTransport


def test_the_wire_engine_passes_rows_on_and_predicts_one_token() -> None:
    middle, last = WireEngine(1, 2, 3, width=4), WireEngine(2, 3, 3, width=4)
    rows = np.arange(8, dtype=np.float32)
    out = np.empty(32, np.uint8)
    middle.decode([Segment(sequence=0, position=0, count=2, activation=rows.data)], out.data)
    assert out.view(np.float32).tolist() == rows.tolist()
    last.decode([Segment(sequence=0, position=0, count=2, activation=rows.data, logits=1)])
    assert last.logits(0).argmax() == CHOSEN
    assert last.length(0) == 2


async def test_a_chain_of_processes_answers_with_its_times() -> None:
    with trio.fail_after(60):
        async with open_chain(ChainSpec(stages=3, width=16, lanes=2, context=64)) as chain:
            one, two = await chain.generate_all([[1, 2, 3], [4]], 5)
            result = await measure(chain, 5, [1] * 40)
    assert one.tokens == two.tokens == [CHOSEN] * 5
    assert one.started < one.times[0]
    assert one.times == sorted(one.times)
    assert len(one.gaps) == 4
    assert 0 < result.median <= result.p95


async def arrival(link: Link) -> float:
    started = trio.current_time()
    await link.receive_into(memoryview(bytearray(1)))
    return trio.current_time() - started


async def test_slow_links_are_slow_both_ways(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        transport = SlowTransport(MemoryTransport(), WireConditions(delay_ms=50), nursery)
        listener = await transport.listen(Endpoint("127.0.0.1", 1))
        near = await transport.connect(listener.endpoint)
        far = await listener.accept()
        await near.send([b"x"])
        assert round(await arrival(far), 6) == 0.05
        await far.send([b"x"])
        assert round(await arrival(near), 6) == 0.05
        nursery.cancel_scope.cancel()


def test_a_stage_s_cost_is_what_it_adds_round_by_round() -> None:
    rounds = {
        2: [Round(1.0, 2.0, 1.0), Round(2.0, 2.0, 1.0)],
        4: [Round(2.0, 2.0, 1.0), Round(2.5, 2.0, 1.0)],
    }
    assert added(rounds, 4) == Spread(0.375, 0.25, 0.5)
    report(rounds, 16, Report(None, "hop"))
