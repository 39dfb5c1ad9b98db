"""The cost of a hop without compute: stages in processes over loopback, with an engine that does nothing.

    python -m bench.hop [--stages 2,3,4] [--rounds 7] [--tokens 400] [--width 4096]

A token of a chain of N stages makes N hops: N - 1 forward, with a row of the width, and one back. Chains take
turns within each round. Given is the time per token (median and 95th percentile of a round, then over the
rounds), that divided by the hops, and what each stage beyond two adds to the median, which is the same chain
with and without a middle stage. Then prefill frames: bytes of activation per second through each link.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

import attrs
import numpy as np
import trio

from skippy.engine import Segment

from .chains import ChainSpec, RunningChain, open_chain
from .common import Report, Spread, in_turn, machine, parser, percentile, table
from .plots import line_chart
from .wire_engine import WireEngine

HOP_TARGET_MS = 0.3
PREFILL_TARGET = 1.0


@attrs.frozen
class Round:
    """One chain in one round: median and 95th percentile of the time per token in ms, prefill in GB/s."""

    median: float
    p95: float
    prefill: float


async def measure(chain: RunningChain, tokens: int, prompt: Sequence[int]) -> Round:
    gaps = [1000 * gap for gap in (await chain.generate(prompt[:1], tokens + 1)).gaps]
    filled = await chain.generate(prompt, 2)
    # The first token's time holds one decode step, which is taken out again.
    seconds = filled.times[0] - filled.started - percentile(gaps, 50) / 1000
    size = (len(prompt) - 1) * chain.spec.width * 4
    return Round(percentile(gaps, 50), percentile(gaps, 95), size / seconds / 1e9)


def added(rounds: dict[int, list[Round]], stages: int) -> Spread:
    """What each stage beyond two adds to the time per token, in ms, round by round."""
    pairs = zip(rounds[stages], rounds[2], strict=True)
    return Spread.of([(more.median - two.median) / (stages - 2) for more, two in pairs])


def engine_ms(width: int, calls: int = 2000) -> float:
    """What is not the hop's: milliseconds of one call of a middle stage's engine."""
    engine = WireEngine(1, 2, 3, width=width, context_length=calls)
    row, out = np.zeros(width, np.float32), np.empty(width * 4, np.uint8)
    started = time.perf_counter()
    for position in range(calls):
        engine.decode([Segment(sequence=0, position=position, count=1, activation=row.data)], out.data)
    return (time.perf_counter() - started) * 1000 / calls


async def run(
    stages: Sequence[int], rounds: int, tokens: int, width: int, prefill: int
) -> dict[int, list[Round]]:
    context = prefill + tokens + 8
    prompt = [65] * prefill
    results: dict[int, list[Round]] = {count: [] for count in stages}
    async with contextlib.AsyncExitStack() as stack:
        chains = [
            await stack.enter_async_context(
                open_chain(ChainSpec(stages=count, width=width, context=context, chunk=256))
            )
            for count in stages
        ]
        for number in range(rounds + 1):
            for chain in in_turn(chains, number):
                result = await measure(chain, tokens, prompt)
                if number:  # the first one warms up
                    results[chain.spec.stages].append(result)
            print(f"round {number} of {rounds}", file=sys.stderr)
    return results


def report(results: dict[int, list[Round]], width: int, out: Report) -> None:
    rounds = len(next(iter(results.values())))
    out.add(
        f"rows of {width} f32 ({width * 4 / 1024:g} KiB), {rounds} rounds, {machine()}; a call of the empty "
        f"engine takes {engine_ms(width):.3f} ms"
    )
    rows = []
    for count, row in results.items():
        rows.append(
            [
                str(count),
                Spread.of([r.median for r in row]).show(3),
                Spread.of([r.p95 for r in row]).show(3),
                f"{Spread.of([r.median for r in row]).median / count:.3f}",
                added(results, count).show(3) if count > 2 and 2 in results else "-",
                Spread.of([r.prefill for r in row]).show(2),
            ]
        )
    headers = ["stages", "token, ms: median", "95th percentile", "per hop, ms", "added by a stage, ms"]
    out.add(table([*headers, "prefill, GB/s"], rows))
    out.add(
        f"Targets: a hop at most {HOP_TARGET_MS} ms, prefill frames at least {PREFILL_TARGET:g} GB/s "
        "through the one link of two stages; longer chains share the cores, and each link gets less."
    )
    series = {
        "median": [Spread.of([r.median for r in row]) for row in results.values()],
        "95th percentile": [Spread.of([r.p95 for r in row]) for row in results.values()],
    }
    ticks = [str(count) for count in results]
    out.plot("token", line_chart("Time per token without compute", "stages", "ms", ticks, series))
    out.finish({count: [attrs.asdict(r) for r in row] for count, row in results.items()})


def main() -> int:
    made = parser(__doc__, rounds=7)
    made.add_argument("--stages", default="2,3,4", help="chain lengths; default: 2,3,4")
    made.add_argument("--tokens", type=int, default=400, help="per chain and round; default: 400")
    made.add_argument("--width", type=int, default=4096, help="f32 values of a row; default: 4096")
    made.add_argument("--prefill", type=int, default=8193, help="prompt tokens; default: 8193")
    args = made.parse_args()
    stages = [int(count) for count in args.stages.split(",")]
    results = trio.run(run, stages, args.rounds, args.tokens, args.width, args.prefill)
    report(results, args.width, Report(args.out, "hop"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
