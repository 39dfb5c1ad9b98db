"""This server against llama.cpp's, llama-cpp-python's and the bare engine: same model, prompts and threads.

    python -m bench.serving [--quick] [--arms skippy,llama.cpp] [--levels 1,8] [--rounds 5] [--threads 2]

Each arm meets a closed loop of 1, 2, 4, 8 and 16 clients that ask for greedy streams of a fixed number of
tokens; then one cold prompt of about 800 tokens. Arms take turns within each round, forwards and backwards;
ratios are taken round by round. Given are the median and the interval from the lowest to the highest round.
Greedy texts at concurrency 1 must be the same, or nothing is compared. Every prompt is new: no cache helps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from skippy.cli.demo import find_model

from .common import BenchError, Report, in_turn, machine, parser, require_same_outputs
from .engine_arm import EngineArm
from .load import Job, LoadProcess, Outcome
from .prompts import CERTAIN, cold_prompt
from .servers import (
    Elsewhere,
    Server,
    completion_body,
    llama_cpp_python_server,
    llamacpp_server,
    skippy_server,
)
from .serving_report import Levels, Sample, report

SHORT_WORDS = 24
CHECK_TOKENS = 24
ARMS = ("skippy", "skippy 3 stages", "llama.cpp", "llama-cpp-python", "engine")
QUICK_ARMS = ("skippy", "llama.cpp", "engine")
PEERS = {"llama.cpp": "xllamacpp", "llama-cpp-python": "llama_cpp.server.app"}


@attrs.frozen(kw_only=True)
class Settings:
    model: Path
    arms: Sequence[str]
    levels: Sequence[int]
    rounds: int
    threads: int
    tokens: int
    requests: int
    prompt: int
    context: int
    peer_python: str
    more: Sequence[str]

    @property
    def lanes(self) -> int:
        return max(self.levels)


@attrs.frozen
class Arm:
    """Something that answers one request per prompt, all at once, ``requests`` times in a row.

    Attributes:
        run: (prompts of each client, tokens of each answer) → outcomes.
        cpu: processor seconds used so far; None where it cannot be told from the load's.
        most: highest concurrency it is measured at.
    """

    name: str
    run: Callable[[Sequence[Sequence[str]], int], list[Outcome]]
    cpu: Callable[[], float] | None
    most: int


def server_arm(server: Server, load: LoadProcess) -> Arm:
    def run(prompts: Sequence[Sequence[str]], tokens: int) -> list[Outcome]:
        clients = [[completion_body(server, prompt, tokens) for prompt in row] for row in prompts]
        return load.run(Job(host=server.host, port=server.port, clients=clients))

    return Arm(server.name, run, server.cpu_seconds, 1 if server.sequential else 1_000)


def engine_arm(engine: EngineArm) -> Arm:
    def run(prompts: Sequence[Sequence[str]], tokens: int) -> list[Outcome]:
        turns = zip(*prompts, strict=True)
        return [outcome for turn in turns for outcome in engine.run(turn, tokens)]

    return Arm("engine", run, None, 1_000)


@contextlib.contextmanager
def open_arms(settings: Settings, load: LoadProcess) -> Iterator[list[Arm]]:
    """All arms, loaded; they wait for their turn without using the processor."""
    sizes: dict[str, Any] = {"threads": settings.threads, "context": settings.context}
    lanes, model, python = settings.lanes, settings.model, settings.peer_python
    arms: list[Arm] = []
    with contextlib.ExitStack() as stack:
        for name in settings.arms:
            if name == "engine":
                engine = stack.enter_context(contextlib.closing(EngineArm(model, lanes=lanes, **sizes)))
                arms.append(engine_arm(engine))
                continue
            if name == "skippy":
                opened = skippy_server(name, model, stages=1, lanes=lanes, more=settings.more, **sizes)
            elif name == "skippy 3 stages":
                split = sizes | {"threads": 1}
                opened = skippy_server(name, model, stages=3, lanes=lanes, more=settings.more, **split)
            elif name == "llama.cpp":
                opened = llamacpp_server(name, model, python=python, lanes=lanes, **sizes)
            else:
                opened = llama_cpp_python_server(name, model, python=python, **sizes)
            arms.append(server_arm(stack.enter_context(opened), load))
        yield arms


def measure(arm: Arm, level: int, settings: Settings, seed: int) -> Sample:
    """One round of ``level`` clients on one arm."""
    prompts = [
        [
            cold_prompt(SHORT_WORDS, seed * 1_000_003 + client * 1009 + turn)
            for turn in range(settings.requests)
        ]
        for client in range(level)
    ]
    elsewhere = Elsewhere()
    before = arm.cpu() if arm.cpu else 0.0
    outcomes = checked(arm, arm.run(prompts, settings.tokens))
    used = arm.cpu() - before if arm.cpu else None
    return Sample.of(outcomes, used, elsewhere.share())


def measure_cold(arm: Arm, settings: Settings, seed: int) -> float:
    """Seconds to the first token of one long prompt that was never sent before."""
    (outcome,) = checked(arm, arm.run([[cold_prompt(settings.prompt, seed)]], 1))
    return outcome.times[0] - outcome.started


def checked(arm: Arm, outcomes: list[Outcome]) -> list[Outcome]:
    """Raises BenchError where a request was not answered in full."""
    for outcome in outcomes:
        if outcome.status != 200 or outcome.error or not outcome.times:
            raise BenchError(f"{arm.name}: a request failed: {outcome.status} {outcome.error or 'no text'}")
    return outcomes


def check_same(arms: Sequence[Arm]) -> None:
    """Raises OutputsDiffer unless all arms continue the same prompts, as many tokens, with the same text."""
    for prompt in CERTAIN:
        outputs = {}
        for arm in arms:
            (outcome,) = checked(arm, arm.run([[prompt]], CHECK_TOKENS))
            count = "?" if outcome.prompt_tokens is None else outcome.prompt_tokens
            outputs[arm.name] = (outcome.text, count)
        require_same_outputs({name: text for name, (text, _) in outputs.items()})
        require_same_outputs({n: f"from {count} tokens" for n, (_, count) in outputs.items() if count != "?"})


def run(settings: Settings) -> Levels:
    """All rounds of all arms."""
    samples = Levels(settings.levels, settings.arms)
    with LoadProcess() as load, open_arms(settings, load) as arms:
        check_same(arms)
        for number in range(settings.rounds):
            for place, level in enumerate(settings.levels):
                for arm in in_turn([arm for arm in arms if level <= arm.most], number + place):
                    samples.add(arm.name, level, measure(arm, level, settings, number))
            for arm in in_turn(arms, number):
                samples.cold[arm.name].append(measure_cold(arm, settings, 77_777 + number))
            print(f"round {number + 1} of {settings.rounds}", file=sys.stderr)
    return samples


def read_arms(
    made: ArgumentParser, args: Namespace, known: Sequence[str], default: Sequence[str]
) -> list[str]:
    """The arms to run: those of ``--arms``, else of ``default``, as far as ``--peer-python`` can."""
    arms = args.arms.split(",") if args.arms else default
    if unknown := set(arms) - set(known):
        made.error(f"--arms: {', '.join(sorted(unknown))} is unknown; there are {', '.join(known)}")
    return available(arms, bool(args.arms), args.peer_python)


def available(arms: Sequence[str], asked: bool, python: str) -> list[str]:
    """The arms that can be run; what is missing is told, or, where it was asked for by name, an error."""
    found = []
    for arm in arms:
        module = PEERS.get(arm)
        if module is None or _has_module(python, module):
            found.append(arm)
            continue
        missing = f"{arm}: {python} has no {module.split('.')[0]} for it; pip install 'skippy[bench]'"
        if asked:
            raise BenchError(missing)
        print(f"left out: {missing}", file=sys.stderr)
    return found


def _has_module(python: str, module: str) -> bool:
    if python == sys.executable and importlib.util.find_spec(module.split(".")[0]) is None:
        return False
    return subprocess.run([python, "-P", "-c", f"import {module}"], capture_output=True).returncode == 0


def read_settings() -> tuple[Settings, Path]:
    made = parser(__doc__, rounds=5)
    made.add_argument("--arms", help=f"of {', '.join(ARMS)}; default: all that are installed")
    made.add_argument("--levels", default="1,2,4,8,16", help="concurrency; default: 1,2,4,8,16")
    made.add_argument("--threads", type=int, default=2, help="of an unsplit server; default: 2")
    made.add_argument("--tokens", type=int, default=64, help="per answer; default: 64")
    made.add_argument("--requests", type=int, default=2, help="per client and round; default: 2")
    made.add_argument("--prompt", type=int, default=800, help="tokens of the cold prompt; default: 800")
    made.add_argument("--context", type=int, default=1024, help="of each lane; default: 1024")
    made.add_argument("--peer-python", default=sys.executable, help="with the peers; default: this one")
    made.add_argument("--skippy-option", action="append", default=[], metavar="OPTION", help="of skippy run")
    made.add_argument(
        "--quick", action="store_true", help="two minutes: levels 1 and 8, three arms, 3 rounds"
    )
    args = made.parse_args()
    quick = args.quick
    settings = Settings(
        model=find_model(args.model).resolve(),
        arms=read_arms(made, args, ARMS, QUICK_ARMS if quick else ARMS),
        levels=[1, 8] if quick else [int(level) for level in args.levels.split(",")],
        rounds=min(args.rounds, 3) if quick else args.rounds,
        threads=args.threads,
        tokens=args.tokens,
        requests=1 if quick else args.requests,
        prompt=args.prompt,
        context=args.context,
        peer_python=args.peer_python,
        more=args.skippy_option,
    )
    return settings, args.out


def main() -> int:
    try:
        settings, out = read_settings()
        samples = run(settings)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    head = (
        f"{settings.model.name}, {settings.threads} threads ({machine()}), {settings.rounds} rounds, "
        f"{settings.requests} request(s) per client of about {SHORT_WORDS} + {settings.tokens} tokens"
    )
    report(samples, Report(out, "serving"), head, settings.prompt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
