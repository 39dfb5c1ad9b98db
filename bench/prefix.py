"""The prefix cache: time to first token of prompts that share a long prefix, against llama.cpp's server's.

    python -m bench.prefix [--quick] [--arms "skippy 3 stages,llama.cpp"] [--rounds 5] [--prefix 2000]

In each round every server gets the same prompts, which nobody has seen before, one at a time:

    cold         a prefix of 2,000 tokens and a tail
    other tail   the same prefix and another tail, some times
    same prompt  each of these once more, at once
    first turn   a chat whose first message is as long, and which nobody has seen before, either
    next turn    the chat with its answer and a short second message

Servers take turns within each case, forwards and backwards. Ratios are taken pair by pair: of a hit to the
cold prompt of the same round and server, and of a server to the last one in the same case. Given are the
median and the interval from the lowest to the highest. `cached` is what the server says it did not compute.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from skippy.cli.demo import find_model

from .common import BenchError, Report, Spread, in_turn, machine, parser, ratios, table
from .load import Job, LoadProcess, Outcome
from .prompts import cold_prompt
from .servers import Server, chat_body, completion_body, llamacpp_server, skippy_server
from .serving import read_arms

ARMS: Final = ("skippy 3 stages", "skippy", "llama.cpp")
DEFAULT_ARMS: Final = ("skippy 3 stages", "llama.cpp")
COLD, OTHER, SAME, FIRST, NEXT = "cold", "other tail", "same prompt", "first turn", "next turn"
CASES: Final = (COLD, OTHER, SAME, FIRST, NEXT)
COLD_OF: Final = {OTHER: COLD, SAME: COLD, NEXT: FIRST}
"""The case without a cache that a hit is compared with."""
ANSWER_TOKENS: Final = 4
TURN_TOKENS: Final = 32
SECOND_MESSAGE: Final = "And why is that so?"
HIT_TO_COLD: Final = 0.1
HIT_TO_PEER: Final = 1.0


@attrs.frozen(kw_only=True)
class Settings:
    model: Path
    arms: Sequence[str]
    rounds: int
    prefix: int
    tail: int
    tails: int
    threads: int
    stage_threads: int
    lanes: int
    context: int
    peer_python: str
    more: Sequence[str]


@attrs.frozen
class Sample:
    """One request: seconds to its first token, and what the server says of its prompt."""

    seconds: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, name: str, outcome: Outcome) -> Sample:
        """Raises BenchError where it was not answered."""
        if outcome.status != 200 or outcome.error or not outcome.times:
            raise BenchError(f"{name}: a request failed: {outcome.status} {outcome.error or 'no text'}")
        return cls(outcome.times[0] - outcome.started, outcome.prompt_tokens, outcome.cached_tokens)


Samples = dict[str, dict[str, list[Sample]]]
"""By case and arm, in the order of the pairs: the same number for each arm."""


class Client:
    """Asks one server, one request at a time."""

    def __init__(self, server: Server, load: LoadProcess) -> None:
        self.name = server.name
        self._server = server
        self._load = load
        self._chat: list[dict[str, str]] = []

    def complete(self, prompt: str) -> Sample:
        body = completion_body(self._server, prompt, ANSWER_TOKENS)
        return Sample.of(self.name, self._ask("/v1/completions", body))

    def say(self, message: str, *, anew: bool) -> Sample:
        """Go on with the conversation, or begin one; its answer becomes part of it."""
        self._chat = [*([] if anew else self._chat), {"role": "user", "content": message}]
        body = chat_body(self._server, self._chat, TURN_TOKENS)
        outcome = self._ask("/v1/chat/completions", body)
        sample = Sample.of(self.name, outcome)
        self._chat.append({"role": "assistant", "content": outcome.text})
        return sample

    def _ask(self, path: str, body: dict[str, Any]) -> Outcome:
        job = Job(host=self._server.host, port=self._server.port, path=path, clients=[[body]])
        (outcome,) = self._load.run(job)
        return outcome


def measure_round(clients: Sequence[Client], settings: Settings, number: int, samples: Samples) -> None:
    """All cases once, with prompts of this round alone."""
    seed = 1_000_003 * (number + 1)
    prefix = cold_prompt(settings.prefix, seed)
    prompts = [f"{prefix} {cold_prompt(settings.tail, seed + 1 + i)}" for i in range(settings.tails + 1)]
    for client in in_turn(clients, number):
        samples[COLD][client.name].append(client.complete(prompts[0]))
    for turn, prompt in enumerate(prompts[1:]):
        for case in (OTHER, SAME):
            for client in in_turn(clients, number + turn):
                samples[case][client.name].append(client.complete(prompt))
    message = cold_prompt(settings.prefix, seed + 500_000)
    for client in in_turn(clients, number):
        samples[FIRST][client.name].append(client.say(message, anew=True))
    for client in in_turn(clients, number + 1):
        samples[NEXT][client.name].append(client.say(SECOND_MESSAGE, anew=False))


def against_cold(samples: Samples, arm: str, case: str) -> Spread:
    """Each hit over the cold prompt of its round."""
    hits, cold = samples[case][arm], samples[COLD_OF[case]][arm]
    per_round = len(hits) // len(cold)
    paired = [sample.seconds for sample in cold for _ in range(per_round)]
    return ratios([sample.seconds for sample in hits], paired)


def against_arm(samples: Samples, arm: str, other: str, case: str) -> Spread:
    """One arm over another, pair by pair."""
    over, under = samples[case][arm], samples[case][other]
    return ratios([sample.seconds for sample in over], [sample.seconds for sample in under])


def last_of(samples: Samples) -> str:
    """One line about the last sample of each case: seconds, in the order of the arms."""
    return ", ".join(
        f"{case} {' / '.join(f'{found[-1].seconds:.3f}' for found in arms.values())}"
        for case, arms in samples.items()
    )


def rows_of(samples: Samples, arms: Sequence[str]) -> list[list[str]]:
    """A row for each case and arm."""
    rows = []
    for case in CASES:
        for arm in arms:
            found = samples[case][arm]
            ms = Spread.of([sample.seconds * 1e3 for sample in found])
            rows.append(
                [
                    case,
                    arm,
                    ms.show(1),
                    f"{_median(sample.cached_tokens for sample in found)} of "
                    f"{_median(sample.prompt_tokens for sample in found)}",
                    against_cold(samples, arm, case).show(3) if case in COLD_OF else "",
                    "" if arm == arms[-1] else against_arm(samples, arm, arms[-1], case).show(),
                ]
            )
    return rows


def _median(values: Iterator[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f}" if known else "?"


def goals(samples: Samples, arms: Sequence[str]) -> list[str]:
    """What must hold of the first arm, and whether it does."""
    first, last = arms[0], arms[-1]
    lines = []
    for case in COLD_OF:
        checks = [("cold", HIT_TO_COLD, against_cold(samples, first, case))]
        if first != last:
            checks.append((last, HIT_TO_PEER, against_arm(samples, first, last, case)))
        for name, bound, spread in checks:
            if spread.median <= bound:
                word = "holds"
            else:
                word = "holds within the pairs" if spread.low <= bound else "DOES NOT HOLD"
            lines.append(f"{first}, {case} / {name}: {spread.show(3)}, to be at most {bound:g}: {word}")
    return lines


@contextlib.contextmanager
def open_clients(settings: Settings, load: LoadProcess) -> Iterator[list[Client]]:
    """Clients of all servers, which are loaded and wait for their turn."""
    sizes: dict[str, Any] = {"lanes": settings.lanes, "context": settings.context}
    with contextlib.ExitStack() as stack:
        clients = []
        for name in settings.arms:
            if name == "llama.cpp":
                opened = llamacpp_server(
                    name,
                    settings.model,
                    python=settings.peer_python,
                    threads=settings.threads,
                    cached=True,
                    **sizes,
                )
            else:
                stages = 1 if name == "skippy" else 3
                threads = settings.threads if stages == 1 else settings.stage_threads
                more = ["--kv-cache", "lookup-record", *settings.more]
                opened = skippy_server(
                    name,
                    settings.model,
                    stages=stages,
                    threads=threads,
                    more=more,
                    cached=True,
                    **sizes,
                )
            clients.append(Client(stack.enter_context(opened), load))
        yield clients


def run(settings: Settings) -> Samples:
    """All rounds; the first, which is not counted, warms up."""
    samples: Samples = {}
    with LoadProcess() as load, open_clients(settings, load) as clients:
        for number in range(settings.rounds + 1):
            if number < 2:
                samples = {case: {client.name: [] for client in clients} for case in CASES}
            measure_round(clients, settings, number, samples)
            print(f"round {number} of {settings.rounds}: {last_of(samples)}", file=sys.stderr)
    return samples


def read_settings() -> tuple[Settings, Path]:
    made = parser(__doc__, rounds=5)
    made.add_argument("--arms", help=f"of {', '.join(ARMS)}; default: {', '.join(DEFAULT_ARMS)}")
    made.add_argument("--prefix", type=int, default=2000, help="tokens that are shared; default: 2000")
    made.add_argument("--tail", type=int, default=32, help="tokens that are not; default: 32")
    made.add_argument("--tails", type=int, default=4, help="other tails per round; default: 4")
    made.add_argument("--threads", type=int, default=2, help="of an unsplit server; default: 2")
    made.add_argument("--stage-threads", type=int, default=2, help="of each of three stages; default: 2")
    made.add_argument("--lanes", type=int, default=4, help="default: 4")
    made.add_argument("--peer-python", default=sys.executable, help="with the peer; default: this one")
    made.add_argument("--skippy-option", action="append", default=[], metavar="OPTION", help="of skippy run")
    made.add_argument("--quick", action="store_true", help="a minute: 2 rounds, a prefix of at most 1000")
    args = made.parse_args()
    prefix = min(args.prefix, 1000) if args.quick else args.prefix
    settings = Settings(
        model=find_model(args.model).resolve(),
        arms=read_arms(made, args, ARMS, DEFAULT_ARMS),
        rounds=min(args.rounds, 2) if args.quick else args.rounds,
        prefix=prefix,
        tail=args.tail,
        tails=args.tails,
        threads=args.threads,
        stage_threads=args.stage_threads,
        lanes=args.lanes,
        context=-(-(prefix + args.tail + 2 * TURN_TOKENS + 200) // 256) * 256,
        peer_python=args.peer_python,
        more=args.skippy_option,
    )
    return settings, args.out


def show(samples: Samples, settings: Settings, out: Report) -> None:
    arms = settings.arms
    out.add(
        f"{settings.model.name}, a prefix of {settings.prefix} tokens and tails of {settings.tail}, "
        f"{settings.threads} threads, {settings.stage_threads} in each of three stages ({machine()}), "
        f"{settings.rounds} rounds. Milliseconds to the first token:"
    )
    headers = ["case", "server", "ms", "cached", "hit / cold", f"/ {arms[-1]}"]
    out.add(table(headers, rows_of(samples, arms)))
    out.add("\n".join(goals(samples, arms)))
    out.finish(data_of(samples))


def data_of(samples: Samples) -> Mapping[str, Any]:
    return {
        case: {arm: [attrs.asdict(sample) for sample in found] for arm, found in arms.items()}
        for case, arms in samples.items()
    }


def main() -> int:
    try:
        settings, out = read_settings()
        samples = run(settings)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(samples, settings, Report(out, "prefix"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
