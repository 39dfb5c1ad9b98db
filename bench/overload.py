"""More clients than lanes for minutes, and a client that does not read: how requests end, and memory.

    python -m bench.overload [--seconds 180] [--clients 64] [--lanes 4] [--stages 3] [--rounds 3]

Every request must end in a whole answer or a 429; memory at the end may be at most 2 % above what it was
after the first third. The wait for the first token is held against what the queue explains: the wait if
tokens came when they did, but strictly in order. Then three clients, beside a fourth that reads its stream or
leaves it unread, in turn: the tokens per second of the three.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from skippy.cli.demo import find_model

from .common import BenchError, Report, Spread, in_turn, machine, parser, percentile, ratios, table
from .load import Job, LoadProcess, Outcome
from .prompts import cold_prompt
from .servers import Server, completion_body, skippy_server

GROWTH_TARGET = 1.02
STALL_TARGET = 0.95
BODIES = 8
OTHERS = 3


class Watch(threading.Thread):
    """Looks at a server's memory once a second until stopped.

    Attributes:
        resident: bytes of all its processes together, one value per second.
        handles: open descriptors of all its processes, as often.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._stopped = threading.Event()
        self.resident: list[int] = []
        self.handles: list[int] = []

    def run(self) -> None:
        while not self._stopped.wait(1):
            self.resident.append(self._server.memory_bytes())
            self.handles.append(sum(process.num_fds() for process in self._server.processes()))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def growth(resident: Sequence[int]) -> float:
    """Memory at the end over memory after the first third; medians of a tenth of the run each."""
    width = max(1, len(resident) // 10)
    third = len(resident) // 3
    return percentile(resident[-width:], 50) / percentile(resident[third : third + width], 50)


def verdict(outcome: Outcome) -> str:
    """How a request ended: ``answer``, ``429``, or what went wrong."""
    if outcome.status == 200:
        return "answer" if outcome.error is None and outcome.times else f"broken stream: {outcome.error}"
    return "429" if outcome.status == 429 else f"status {outcome.status}: {outcome.error}"


def explained_waits(answers: Sequence[Outcome]) -> list[float]:
    """What the queue explains of each request's wait for its first token, in seconds.

    That is the wait if first tokens came when they did, but strictly in the order of the requests.
    """
    first = sorted(answer.times[0] for answer in answers)
    asked = sorted(answer.started for answer in answers)
    return [b - a for a, b in zip(asked, first, strict=True)]


@attrs.frozen
class Settings:
    model: Path
    stages: int
    threads: int
    lanes: int
    clients: int
    seconds: float
    tokens: int
    rounds: int
    out: Path


def bodies(server: Server, client: int, tokens: int) -> list[dict[str, Any]]:
    return [
        completion_body(server, cold_prompt(16 + 8 * turn, client * 1009 + turn), tokens)
        for turn in range(BODIES)
    ]


def overload(server: Server, load: LoadProcess, settings: Settings, out: Report) -> dict[str, Any]:
    clients = [bodies(server, client, settings.tokens) for client in range(settings.clients)]
    watch = Watch(server)
    watch.start()
    outcomes = load.run(Job(host=server.host, port=server.port, clients=clients, seconds=settings.seconds))
    watch.stop()
    ends = collections.Counter(verdict(outcome) for outcome in outcomes)
    answers = [outcome for outcome in outcomes if verdict(outcome) == "answer"]
    if len(answers) < settings.clients or len(watch.resident) < 10:
        raise BenchError(f"too few answers to judge: {dict(ends)}")
    out.add(table(["how requests ended", "how many"], [[how, str(n)] for how, n in ends.most_common()]))
    waits = [a.times[0] - a.started for a in answers]
    explained = explained_waits(answers)
    refusals = [o.ended - o.started for o in outcomes if o.status == 429]
    rows = [[f"p{p}", f"{percentile(waits, p):.2f}", f"{percentile(explained, p):.2f}"] for p in (50, 95, 99)]
    out.add(table(["first token", "waited, s", "explained by the queue, s"], rows))
    seconds = max(a.ended for a in answers) - min(a.started for a in answers)
    grown, mib = growth(watch.resident), 2**20
    out.add(
        f"{sum(a.tokens for a in answers) / seconds:.1f} tokens/s in all; a 429 took "
        f"{1000 * percentile(refusals or [0.0], 99):.0f} ms at most (p99); memory "
        f"{watch.resident[len(watch.resident) // 3] / mib:.1f} MiB after a third, "
        f"{watch.resident[-1] / mib:.1f} MiB at the end: {grown:.3f}, allowed {GROWTH_TARGET}; "
        f"descriptors {watch.handles[len(watch.handles) // 3]} and {watch.handles[-1]}"
    )
    return {"ends": ends, "waits": waits, "explained": explained, "resident": watch.resident}


def stalled_reader(server: Server, loads: Sequence[LoadProcess], settings: Settings, out: Report) -> Any:
    """Rates of three clients beside a reader and beside a client that does not read."""
    seconds = max(5.0, settings.seconds / 12)
    rates: dict[str, list[float]] = {"unread": [], "read": []}
    long = completion_body(server, cold_prompt(16, 1), 800)
    for number in range(settings.rounds):
        for name in in_turn(list(rates), number):
            clients = [bodies(server, 100 * number + client, settings.tokens) for client in range(OTHERS)]
            job = Job(host=server.host, port=server.port, clients=clients, seconds=seconds)
            if name == "unread":
                outcomes = loads[0].run(attrs.evolve(job, stalled=[long]))
            else:
                loads[1].start(attrs.evolve(job, clients=[[long]], seconds=None))
                outcomes = loads[0].run(job)
                loads[1].finish()
            taken = max(o.ended for o in outcomes) - min(o.started for o in outcomes)
            rates[name].append(sum(o.tokens for o in outcomes) / taken)
    ratio = ratios(rates["unread"], rates["read"])
    out.add(
        f"{OTHERS} clients beside one that leaves its stream unread: {Spread.of(rates['unread']).show(1)} "
        f"tokens/s, beside one that reads it: {Spread.of(rates['read']).show(1)}; ratio {ratio.show()}, "
        f"at least {STALL_TARGET}"
    )
    return rates


def main() -> int:
    made = parser(__doc__, rounds=3)
    for name, default in (("stages", 3), ("threads", 1), ("lanes", 4), ("clients", 64), ("tokens", 32)):
        made.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    made.add_argument("--seconds", type=float, default=180, help="of overload; default: 180")
    values = vars(made.parse_args())
    settings = Settings(**values | {"model": find_model(values["model"]).resolve()})
    out = Report(settings.out, "overload")
    opened = skippy_server(
        "skippy",
        settings.model,
        stages=settings.stages,
        threads=settings.threads,
        lanes=settings.lanes,
        context=1024,
    )
    try:
        with LoadProcess() as one, LoadProcess() as two, opened as server:
            out.add(
                f"{settings.clients} clients for {settings.seconds:g} s against {settings.lanes} lanes, "
                f"{settings.stages} stages, {settings.threads} thread(s) each, {machine()}"
            )
            data = overload(server, one, settings, out)
            data["stalled"] = stalled_reader(server, [one, two], settings, out)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    out.finish(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
