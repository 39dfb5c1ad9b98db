"""A prompt of 4,000 tokens beside live streams: how long do these wait for their next token?

    python -m bench.fairness [--prompt 4000] [--streams 3] [--rounds 3] [--stages 1] [--threads 2]

The gaps between the streams' tokens, while the prompt is taken, are held against what the smallest
interruption costs: one chunk of 16 tokens at that depth and one decode step of all streams, both measured on
the bare engine between the rounds of the same run. The 99th percentile may be 1.5 times that.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import SliceInfo

from .common import BenchError, Report, Spread, machine, parser, percentile, table
from .load import Job, LoadProcess, Outcome
from .prompts import cold_prompt
from .servers import Server, completion_body, skippy_server

CONTEXT = 8192
MIN_CHUNK = 16
TARGET = 1.5
DEPTH = 100
"""About how many tokens a stream holds, for the engine's own decode step."""


@attrs.frozen
class Settings:
    model: Path
    stages: int
    threads: int
    streams: int
    prompt: int
    rounds: int
    out: Path


@attrs.frozen
class Round:
    """Milliseconds.

    Attributes:
        during, before: gaps of the streams while the prompt was taken, and before.
        first: the prompt's time to its first token.
        chunk, step: the engine's chunk of 16 tokens at that depth, and decode step of all streams.
    """

    during: list[float]
    before: list[float]
    first: float
    chunk: float
    step: float

    @property
    def bound(self) -> float:
        return self.chunk + self.step

    @property
    def ratio(self) -> float:
        return percentile(self.during, 99) / self.bound


class Engine:
    """The bare engine, with one deep sequence and a shallow one per stream."""

    def __init__(self, settings: Settings) -> None:
        options = EngineOptions(
            context_length=CONTEXT,
            max_sequences=settings.streams + 1,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
        )
        self._engine = LlamaEngine.load(SliceInfo.from_file(settings.model), options)
        self._streams = settings.streams
        for sequence in range(settings.streams):
            self._feed(sequence, DEPTH)
        self._deep = settings.streams
        self._feed(self._deep, settings.prompt)

    def _feed(self, sequence: int, count: int) -> None:
        for start in range(0, count, 512):
            size = min(512, count - start)
            self._engine.decode(
                [Segment(sequence=sequence, position=start, count=size, tokens=[1000] * size)]
            )

    def chunk_ms(self, times: int = 7) -> float:
        """Median of a chunk of 16 tokens behind the deep sequence, which is cut back again."""
        taken = []
        for _ in range(times):
            length = self._engine.length(self._deep)
            started = time.perf_counter()
            self._engine.decode(
                [Segment(sequence=self._deep, position=length, count=MIN_CHUNK, tokens=[1000] * MIN_CHUNK)]
            )
            taken.append((time.perf_counter() - started) * 1000)
            self._engine.trim(self._deep, length)
        return percentile(taken, 50)

    def step_ms(self, times: int = 15) -> float:
        """Median of one token of every stream, in one batch."""
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            self._engine.decode(
                [
                    Segment(sequence=i, position=self._engine.length(i), count=1, tokens=[1000], logits=1)
                    for i in range(self._streams)
                ]
            )
            taken.append((time.perf_counter() - started) * 1000)
        for sequence in range(self._streams):
            self._engine.trim(sequence, DEPTH)
        return percentile(taken, 50)

    def close(self) -> None:
        self._engine.close()


def gaps_within(streams: Sequence[Outcome], start: float, end: float) -> list[float]:
    """Milliseconds between tokens of a stream, of the gaps that touch the time from ``start`` to ``end``."""
    return [
        1000 * (b - a)
        for stream in streams
        for a, b in zip(stream.times, stream.times[1:], strict=False)
        if b > start and a < end
    ]


def run_round(
    server: Server, loads: Sequence[LoadProcess], engine: Engine, settings: Settings, number: int
) -> Round:
    chunk, step = engine.chunk_ms(), engine.step_ms()
    streams = [
        [completion_body(server, cold_prompt(16, 1000 * number + i), CONTEXT // 4)]
        for i in range(settings.streams)
    ]
    loads[0].start(Job(host=server.host, port=server.port, clients=streams, until_told=True))
    time.sleep(2)  # they are to be under way; what they do meanwhile is the comparison
    prompt = [[completion_body(server, cold_prompt(settings.prompt, 5_000 + number), 1)]]
    (deep,) = loads[1].run(Job(host=server.host, port=server.port, clients=prompt))
    loads[0].stop()
    live = loads[0].finish()
    for outcome in (deep, *live):
        if outcome.status != 200 or outcome.error or not outcome.times:
            raise BenchError(f"a request failed: {outcome.status} {outcome.error}")
    during = gaps_within(live, deep.started, deep.times[0])
    before = gaps_within(live, 0, deep.started)
    if len(during) < 20:
        raise BenchError(f"only {len(during)} tokens came while the prompt was taken: nothing to judge")
    return Round(during, before, 1000 * (deep.times[0] - deep.started), chunk, step)


def report(rounds: Sequence[Round], settings: Settings) -> None:
    out = Report(settings.out, "fairness")
    out.add(
        f"a prompt of about {settings.prompt} tokens beside {settings.streams} streams, {settings.stages} "
        f"stage(s), {settings.threads} thread(s), {len(rounds)} rounds, {machine()}"
    )

    def over(values: Sequence[float]) -> str:
        return Spread.of(values).show(1)

    rows = [
        [
            f"gap p{p}",
            over([percentile(r.before, p) for r in rounds]),
            over([percentile(r.during, p) for r in rounds]),
        ]
        for p in (50, 95, 99)
    ]
    out.add(table(["ms", "before the prompt", "while it is taken"], rows))
    ratio = Spread.of([r.ratio for r in rounds])
    out.add(
        f"chunk of {MIN_CHUNK} at that depth {over([r.chunk for r in rounds])} ms + decode step "
        f"{over([r.step for r in rounds])} ms; p99 / that: {ratio.show()}, at most {TARGET}. "
        f"First token of the prompt after {over([r.first / 1000 for r in rounds])} s."
    )
    out.finish([attrs.asdict(r) for r in rounds])


def run(settings: Settings) -> list[Round]:
    rounds = []
    opened: Any = skippy_server(
        "skippy",
        settings.model,
        stages=settings.stages,
        threads=settings.threads,
        lanes=settings.streams + 1,
        context=CONTEXT,
    )
    with (
        contextlib.closing(Engine(settings)) as engine,
        LoadProcess() as one,
        LoadProcess() as two,
        opened as server,
    ):
        for number in range(settings.rounds):
            rounds.append(run_round(server, [one, two], engine, settings, number))
            print(f"round {number + 1} of {settings.rounds}", file=sys.stderr)
    return rounds


def main() -> int:
    made = parser(__doc__, rounds=3)
    for name, default in (("stages", 1), ("threads", 2), ("streams", 3), ("prompt", 4000)):
        made.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    values = vars(made.parse_args())
    settings = Settings(**values | {"model": find_model(values["model"]).resolve()})
    try:
        rounds = run(settings)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(rounds, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
