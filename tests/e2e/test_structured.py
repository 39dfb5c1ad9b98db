"""Answers of a real model that are held to a form, in a chain of three processes."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from bench.schemas import ask_all, faults_of

from .support import Served, client_of


def test_answers_held_to_random_schemas_are_valid_and_end(chain: Served) -> None:
    """`python -m bench.schemas` is the long run."""
    answers = ask_all(chain.url, chain.model, range(20))
    assert len(answers) == 40
    assert faults_of(answers) == []


def ask(chain: Served, **fields: Any) -> httpx.Response:
    body = {"model": chain.model, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 40}
    return httpx.post(f"{chain.url}/chat/completions", json=body | fields, timeout=60)


def test_gbnf_with_log_probabilities_stops_and_limits(chain: Served) -> None:
    grammar = 'root ::= ("yes" | "no") ", " [a-z]{3,30} "."'
    whole = ask(chain, grammar=grammar, logprobs=True, seed=3).json()["choices"][0]
    text = whole["message"]["content"]
    assert re.fullmatch(r"(yes|no), [a-z]{3,30}\.", text)
    assert whole["finish_reason"] == "stop"
    assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == text
    short = ask(chain, grammar=grammar, max_tokens=1, seed=3).json()["choices"][0]
    assert text.startswith(short["message"]["content"])
    assert short["finish_reason"] == "length"
    stopped = ask(chain, grammar=grammar, stop=[", "], seed=3).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (text.partition(", ")[0], "stop")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"json_schema": {"not": {}}}, "json_schema.not", "'not' is not supported"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, "json_schema", "look-around"),
        ({"json_schema": {"type": "string", "pattern": "(" * 500}}, "json_schema", "cannot be used"),
        ({"grammar": 'root ::= "a" root'}, "grammar", "never comes to an end"),
        ({"grammar": 'root ::= "a", "b"'}, "grammar", "line 1, column 13"),
        ({"grammar": "root ::= <|nothing|>"}, "grammar", "unknown special token"),
    ],
)
def test_what_cannot_be_held_is_refused(chain: Served, fields: Any, param: str, reason: str) -> None:
    response = ask(chain, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert reason in error["message"]


def test_the_official_client_parses_what_it_asked_for(chain: Served) -> None:
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=150)
        friends: list[str] = Field(max_length=0)

    client = client_of(chain.url)
    parsed = client.chat.completions.parse(
        model=chain.model,
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format=Person,
        max_tokens=120,
    )
    person = parsed.choices[0].message.parsed
    assert person is not None
    assert 0 <= person.age <= 150
    assert person.friends == []
