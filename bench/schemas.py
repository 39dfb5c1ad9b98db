"""Answers held to random schemas, on the bundled model at temperature 1: are they valid, and do they end?

Each schema is asked twice, streamed and not. Right is: every answer that ends with ``stop`` is valid, and at
least 95 % of all end within the limit of tokens.

    python -m bench.schemas               # 200 schemas on one stage
    python -m bench.schemas --stages 3 --count 20
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import jsonschema

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment, StageEngine
from skippy.engine.grammar import Grammar, GrammarVocabulary
from skippy.engine.llama import LlamaEngine
from skippy.frontend.gbnf import gbnf_to_lark
from skippy.frontend.json_schema import schema_rule
from skippy.models import SliceInfo
from skippy.protocol import SamplingConfig

from .common import Report, parser, percentile, table
from .schema_cases import judge, random_schema
from .servers import skippy_server

MAX_TOKENS: Final = 512
LANES: Final = 4
LEAST_ENDED: Final = 0.95
REQUEST_SECS: Final = 120
TASK: Final = "Answer with JSON that says something about a thing of your choice."
COST_TOKENS: Final = 96
HELD_TO: Final = {
    "a JSON schema": schema_rule({"type": "array", "minItems": 50, "items": random_schema(4)}, "schema"),
    "long strings in JSON": schema_rule(
        {"type": "array", "minItems": 1, "items": {"minLength": 400, "type": "string"}}, "schema"
    ),
    "GBNF without recursion": gbnf_to_lark("root ::= ([a-zA-Z,.] | [ ]){900,}"),
    "GBNF with recursion": gbnf_to_lark(
        'root ::= "[" item ("," root)? "]"\nitem ::= "\\"" [a-z A-Z0-9]{400,} "\\""'
    ),
}
"""Forms that are not over after so many tokens."""


@attrs.frozen(slots=True)
class Answer:
    """One answer. ``wrong``: why it is not valid, though it has ended; empty where it is."""

    seed: int
    streamed: bool
    text: str
    finish_reason: str
    tokens: int
    milliseconds: float
    wrong: str

    @property
    def ended(self) -> bool:
        return self.finish_reason == "stop"


def body_of(seed: int, model: str, *, stream: bool) -> dict[str, Any]:
    """A request whose answer is held to a random schema."""
    wanted = {"name": f"case-{seed}", "schema": random_schema(seed), "strict": True}
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": TASK}],
        "response_format": {"type": "json_schema", "json_schema": wanted},
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "max_tokens": MAX_TOKENS,
        "seed": 2 * seed + stream,
        "stream": stream,
    }
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


def ask(http: httpx.Client, url: str, model: str, seed: int, *, stream: bool) -> Answer:
    """One answer, judged.

    Raises:
        httpx.HTTPError, RuntimeError: there is none.
    """
    body, began = body_of(seed, model, stream=stream), time.monotonic()
    if stream:
        with http.stream("POST", f"{url}/chat/completions", json=body) as response:
            response.raise_for_status()
            chunks = list(_events(response))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        reason, usage = next(c["finish_reason"] for c in choices if c["finish_reason"]), chunks[-1]["usage"]
    else:
        response = http.post(f"{url}/chat/completions", json=body)
        response.raise_for_status()
        whole = response.json()
        text, reason = whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]
        usage = whole["usage"]
    spent = 1000 * (time.monotonic() - began)
    wrong = ""
    if reason == "stop":
        try:
            judge(random_schema(seed), text)
        except (json.JSONDecodeError, jsonschema.ValidationError) as error:
            wrong = str(error).split("\n")[0]
    return Answer(seed, stream, text, reason, usage["completion_tokens"], spent, wrong)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event


def ask_all(url: str, model: str, seeds: range) -> list[Answer]:
    """Every schema twice, as many at once as there are lanes."""
    with httpx.Client(timeout=REQUEST_SECS) as http, ThreadPoolExecutor(LANES) as pool:
        return list(
            pool.map(
                lambda case: ask(http, url, model, case[0], stream=case[1]),
                [(seed, stream) for seed in seeds for stream in (False, True)],
            )
        )


def faults_of(answers: list[Answer]) -> list[str]:
    """What does not hold; empty where all is well."""
    found = [f"schema {a.seed}, streamed={a.streamed}: {a.wrong}: {a.text[:200]}" for a in answers if a.wrong]
    ended = sum(answer.ended for answer in answers) / len(answers)
    if ended < LEAST_ENDED:
        found.append(f"{ended:.1%} of the answers ended within {MAX_TOKENS} tokens; {LEAST_ENDED:.0%} must")
    return found


def costs_of(model: Path, rounds: int) -> dict[str, float]:
    """Processor time for a draw, in milliseconds, by what the text is held to."""
    engine = LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(context_length=512, max_sequences=1))
    vocabulary = engine.vocabulary
    assert vocabulary is not None
    prompt = vocabulary.tokenize(TASK, add_special=True, parse_special=False)
    grammars = GrammarVocabulary.of(vocabulary)
    spent: dict[str, list[float]] = {}
    for number in range(rounds):
        sampling = SamplingConfig(flags=3, seed=number, temperature=1, top_k=40, top_p=0.95, ignore_eos=True)
        spent.setdefault("nothing", []).append(_draw(engine, prompt, sampling, None))
        for name, grammar in HELD_TO.items():
            free = attrs.evolve(sampling, flags=1, ignore_eos=False)
            whole = f"start: {grammar}" if grammar.startswith("%json") else grammar
            place = grammars.compile(whole, len(prompt))
            spent.setdefault(name, []).append(_draw(engine, prompt, free, place))
    engine.close()
    return {name: statistics.median(times) for name, times in spent.items()}


def _draw(engine: StageEngine, prompt: list[int], sampling: SamplingConfig, place: Grammar | None) -> float:
    sampler, history, spent = engine.new_sampler(sampling), list(prompt), 0.0
    engine.drop(0)
    rows = history
    for step in range(COST_TOKENS):
        engine.decode([Segment(0, len(history) - len(rows), len(rows), tokens=rows, logits=1)])
        logits, began = engine.logits(0), time.thread_time()
        allowed = None if place is None else place.allowed(history)
        token = sampler.sample(logits, step, allowed)
        spent += time.thread_time() - began
        history.append(token)
        rows = [token]
    sampler.close()
    if place is not None:  # in a thread of its own
        spent += place.spent
    return 1000 * spent / COST_TOKENS


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--count", type=int, default=200, metavar="N", help="schemas; default: 200")
    arguments.add_argument(
        "--first", type=int, default=0, metavar="SEED", help="of the first one; default: 0"
    )
    arguments.add_argument("--stages", type=int, default=1, metavar="N", help="default: 1")
    args = arguments.parse_args()
    report = Report(args.out, f"schemas-{args.stages}-{args.first}")
    server = skippy_server(
        "skippy",
        find_model(args.model),
        stages=args.stages,
        threads=2 if args.stages == 1 else 1,
        lanes=LANES,
        context=2048,
    )
    with server as running:
        url = f"http://{running.host}:{running.port}/v1"
        answers = ask_all(url, running.model, range(args.first, args.first + args.count))
    costs = costs_of(find_model(args.model), args.rounds) if args.rounds else {}
    tokens = [answer.tokens for answer in answers]
    report.add(
        table(
            [
                "schemas",
                "stages",
                "answers",
                "ended",
                "not valid",
                "tokens, median",
                "95th percentile",
                "most",
            ],
            [
                [
                    str(args.count),
                    str(args.stages),
                    str(len(answers)),
                    f"{sum(a.ended for a in answers) / len(answers):.1%}",
                    str(sum(bool(a.wrong) for a in answers)),
                    f"{percentile(tokens, 50):.0f}",
                    f"{percentile(tokens, 95):.0f}",
                    str(max(tokens)),
                ]
            ],
        )
    )
    if costs:
        report.add(table(["held to", "ms of a draw"], [[name, f"{ms:.2f}"] for name, ms in costs.items()]))
    report.finish({"answers": [attrs.asdict(answer) for answer in answers], "costs": costs})
    if faults := faults_of(answers):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
