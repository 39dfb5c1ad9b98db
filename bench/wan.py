"""A chain of three stages over slow links, against what the links and the compute alone would take.

    python -m bench.wan [--rtt 1,10,40] [--mbps 20,100,1000] [--rounds 3] [--tokens 32] [--quick]

Every link is slow in both directions, acknowledgements and returned tokens included. Time per token is held
against the bound: the step of the same engines in one process + the delays of one ring (a hop to each next
stage and one back), as measured by echoes through such links in the same run + the frames' bytes over the
bandwidth. A processor that has just rested is slower, and behind a slow link every stage rests while a frame
is under way, so the engines rest for as long before each call (the table also says what they take without).
Allowed are 5 % or 0.3 ms per hop beyond the bound, whichever is more. Then eight clients: total tokens per
second with 5 ms one way, against the same chain over plain loopback, in turn within each round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from skippy.cli.demo import find_model
from skippy.config import Endpoint, WireConditions
from skippy.models import SliceInfo, ensure_slice
from skippy.protocol import Message, MessageKind, Reply, default_state, encode_reply
from skippy.protocol.codec_messages import estimated_wire_bytes
from skippy.stage.links import Link, TcpTransport
from skippy.topology import plan_even

from .chain import InProcess
from .chains import ChainSpec, RunningChain, open_chain
from .common import Report, Spread, in_turn, machine, parser, percentile, ratios, table
from .plots import line_chart
from .slow_links import SlowTransport

STAGES = 3
ECHOES = 30
HOP_MS = 0.3
SHARE = 0.05
CLIENTS = 8
CROWD_DELAY_MS = 5.0
CROWD_TARGET = 0.7
PROMPT = list(range(1000, 1016))


@attrs.frozen
class Settings:
    model: Path
    conditions: Sequence[WireConditions]
    rounds: int
    tokens: int
    out: Path


@attrs.frozen(kw_only=True)
class Bound:
    """What one token must take, in ms: compute, the delays of a ring, and its bytes over the bandwidth.

    ``unrested``: compute without rests between the stages.
    """

    compute: float
    unrested: float
    ring: float
    wire: float

    @property
    def total(self) -> float:
        return self.compute + self.ring + self.wire

    @property
    def allowed(self) -> float:
        """The bound and what a chain may take beyond it."""
        return self.total + max(SHARE * self.total, HOP_MS * STAGES)


@attrs.frozen
class Row:
    """One condition: its bound, and the time per token of each round, in ms."""

    conditions: WireConditions
    bound: Bound
    measured: list[float]

    @property
    def holds(self) -> bool:
        return Spread.of(self.measured).median <= self.bound.allowed


def ring_bytes(width: int, stages: int) -> int:
    """Bytes of one decode step on all links of the ring: a row to each next stage, a token back."""
    kind = MessageKind.DECODE_EMBD
    frame = Message(kind, default_state(kind), token_count=1, tokens=(1,), activation=bytes(width * 4))
    return (stages - 1) * estimated_wire_bytes(frame) + len(encode_reply(Reply.predicted_token(1)))


def wire_ms(size: int, mbps: float | None) -> float:
    """Milliseconds that ``size`` bytes take at ``mbps`` million bits per second."""
    return 0.0 if mbps is None else size / (mbps * 125)


async def one_way_ms(conditions: WireConditions) -> float:
    """Half of the median time of an echo through such a link, in ms, the sleeping and waking included."""
    async with trio.open_nursery() as nursery:
        transport = SlowTransport(TcpTransport(), conditions, nursery)
        listener = await transport.listen(Endpoint("127.0.0.1", 0))
        near = await transport.connect(listener.endpoint)
        nursery.start_soon(_echo, await listener.accept())
        times = []
        for _ in range(ECHOES):
            started = time.perf_counter()
            await near.send([b"x"])
            await near.receive_into(memoryview(bytearray(1)))
            times.append((time.perf_counter() - started) * 500)
        near.close()
        listener.close()
        nursery.cancel_scope.cancel()
    return percentile(times, 50)


async def _echo(link: Link) -> None:
    buffer = bytearray(1)
    while await link.receive_into(memoryview(buffer)):
        await link.send([bytes(buffer)])


async def step_ms(chain: RunningChain, tokens: int) -> float:
    """Median time per token of one generation, in ms."""
    return 1000 * percentile((await chain.generate(PROMPT, tokens + 1)).gaps, 50)


async def measure_condition(
    conditions: WireConditions, engines: InProcess, plain: RunningChain, settings: Settings, width: int
) -> tuple[Row, list[float]]:
    """The row, and the time per token of the same chain without slow links in the same rounds."""
    compute: list[float] = []
    unrested: list[float] = []
    measured: list[float] = []
    loopback: list[float] = []
    one_way = await one_way_ms(conditions)
    async with open_chain(attrs.evolve(plain.spec, wire=conditions, lanes=1)) as chain:
        await step_ms(chain, 4)
        for number in range(settings.rounds):
            for rest, steps in ((0.0, unrested), (one_way / 1000, compute)):
                steps.append(1000 * percentile(engines.step_times(PROMPT, settings.tokens, rest), 50))
            for which, times in in_turn([(chain, measured), (plain, loopback)], number):
                times.append(await step_ms(which, settings.tokens))
    bound = Bound(
        compute=percentile(compute, 50),
        unrested=percentile(unrested, 50),
        ring=STAGES * one_way,
        wire=wire_ms(ring_bytes(width, STAGES), conditions.mbps),
    )
    return Row(conditions, bound, measured), loopback


async def crowd_rate(chain: RunningChain, tokens: int, number: int) -> float:
    """Total tokens per second of eight clients at once."""
    prompts = [[1000 + 17 * number + client, *PROMPT] for client in range(CLIENTS)]
    results = await chain.generate_all(prompts, tokens)
    seconds = max(r.times[-1] for r in results) - min(r.started for r in results)
    return sum(len(r.tokens) for r in results) / seconds


async def measure_crowd(plain: RunningChain, settings: Settings) -> dict[str, list[float]]:
    """Rates of eight clients, over slow links and over plain ones, in the same rounds."""
    rates: dict[str, list[float]] = {"slow": [], "loopback": []}
    wire = WireConditions(delay_ms=CROWD_DELAY_MS)
    async with open_chain(attrs.evolve(plain.spec, wire=wire)) as slow:
        for number in range(settings.rounds + 1):
            for name, chain in in_turn([("slow", slow), ("loopback", plain)], number):
                rate = await crowd_rate(chain, settings.tokens, number)
                if number:  # the first one warms up
                    rates[name].append(rate)
    return rates


async def run(settings: Settings) -> None:
    source = SliceInfo.from_file(settings.model)
    parts = [ensure_slice(settings.model, r.start, r.end) for r in plan_even(source.layer_count, STAGES)]
    engines = InProcess(parts, 1)
    spec = ChainSpec(stages=STAGES, model=settings.model, lanes=CLIENTS, context=512)
    rows: list[Row] = []
    loopback: list[float] = []
    async with open_chain(spec) as plain:
        await step_ms(plain, 4)
        for conditions in settings.conditions:
            row, times = await measure_condition(conditions, engines, plain, settings, source.hidden_size)
            rows.append(row)
            loopback += times
            print(f"{name_of(conditions)}: done", file=sys.stderr)
        rates = await measure_crowd(plain, settings)
    report(rows, loopback, rates, settings)


def name_of(conditions: WireConditions) -> str:
    return f"{2 * conditions.delay_ms:g} ms, {conditions.mbps:g} Mbit/s"


def report(
    rows: Sequence[Row], loopback: list[float], rates: dict[str, list[float]], settings: Settings
) -> None:
    out = Report(settings.out, "wan")
    out.add(
        f"{settings.model.name}, {STAGES} stages, 1 thread each, {settings.rounds} rounds of "
        f"{settings.tokens} tokens, {machine()}; over plain loopback a token takes "
        f"{Spread.of(loopback).show(1)} ms"
    )
    cells = []
    for row in rows:
        bound, measured = row.bound, Spread.of(row.measured)
        cells.append(
            [
                name_of(row.conditions),
                measured.show(1),
                f"{bound.unrested:.1f}",
                f"{bound.compute:.1f} + {bound.ring:.1f} + {bound.wire:.1f} = {bound.total:.1f}",
                f"{bound.allowed:.1f}",
                f"{measured.median / bound.total:.2f}",
                "yes" if row.holds else "no",
            ]
        )
    headers = [
        "round trip, bandwidth",
        "token, ms",
        "compute without rests, ms",
        "compute + ring + bytes, ms",
        "allowed, ms",
        "ratio",
        "holds",
    ]
    out.add(table(headers, cells))
    ratio = ratios(rates["slow"], rates["loopback"])
    out.add(
        f"{CLIENTS} clients: {Spread.of(rates['slow']).show(1)} tokens/s with {CROWD_DELAY_MS:g} ms one way, "
        f"{Spread.of(rates['loopback']).show(1)} over loopback; ratio {ratio.show()}, target {CROWD_TARGET}"
    )
    series: dict[str, list[Spread | None]] = {
        "measured": [Spread.of(row.measured) for row in rows],
        "bound": [Spread.of([row.bound.total]) for row in rows],
    }
    ticks = [f"{2 * row.conditions.delay_ms:g}/{row.conditions.mbps:g}" for row in rows]
    out.plot("token", line_chart("Time per token", "round trip in ms / Mbit/s", "ms", ticks, series))
    data = [attrs.asdict(row) | {"allowed": row.bound.allowed, "holds": row.holds} for row in rows]
    out.finish({"rows": data, "loopback": loopback, "rates": rates})


def main() -> int:
    made = parser(__doc__, rounds=3)
    made.add_argument("--rtt", default="1,10,40", help="round trips in ms; default: 1,10,40")
    made.add_argument("--mbps", default="20,100,1000", help="bandwidths; default: 20,100,1000")
    made.add_argument("--tokens", type=int, default=32, help="per generation; default: 32")
    made.add_argument("--quick", action="store_true", help="two conditions, two rounds")
    args = made.parse_args()
    round_trips, bandwidths = args.rtt.split(","), args.mbps.split(",")
    conditions = [
        WireConditions(delay_ms=float(rtt) / 2, mbps=float(mbps))
        for rtt in round_trips
        for mbps in bandwidths
    ]
    if args.quick:
        conditions = [WireConditions(delay_ms=0.5, mbps=1000), WireConditions(delay_ms=20, mbps=20)]
    rounds = 2 if args.quick else args.rounds
    trio.run(run, Settings(find_model(args.model), conditions, rounds, args.tokens, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
