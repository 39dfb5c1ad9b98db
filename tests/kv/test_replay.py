"""Answers that are known before they are computed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from skippy.kv.replay import (
    MAX_REPLAY_TOKENS,
    ReplayCache,
    ReplayCounters,
    sampling_fingerprint,
    sampling_replay_safe,
)
from skippy.kv.settings import KvSettings
from skippy.protocol.kinds import SamplingFlag
from skippy.protocol.messages import SamplingConfig

GREEDY = SamplingConfig(flags=int(SamplingFlag.ENABLED), temperature=0.0)
PROMPT = list(range(100))

OTHER_VALUES: dict[str, Any] = {
    "flags": int(SamplingFlag.ENABLED | SamplingFlag.IGNORE_EOS),
    "seed": 1,
    "temperature": -0.0,
    "top_p": 0.5,
    "top_k": 1,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repeat_penalty": 1.5,
    "penalty_last_n": 5,
    "logit_bias": ((1, 0.5),),
    "typical_p": 0.5,
    "top_nsigma": 0.5,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 0.5,
    "dry_multiplier": 0.5,
    "dry_base": 0.5,
    "dry_allowed_length": 5,
    "dry_penalty_last_n": 5,
    "dry_sequence_breakers": ("x",),
    "xtc_probability": 0.5,
    "xtc_threshold": 0.5,
    "mirostat_mode": 1,
    "mirostat_entropy": 1.0,
    "mirostat_learning_rate": 0.5,
    "samplers": ("temperature",),
    "ignore_eos": True,
}
"""One for each field. A field that is missing here has to be thought about, here and in UNSAFE."""
UNSAFE = {"mirostat_mode", "xtc_probability", "dynatemp_range", "samplers"}
"""With another value of these, sampling draws, or may draw, even at temperature 0."""


def test_every_field_was_thought_about() -> None:
    assert set(OTHER_VALUES) == {field.name for field in attrs.fields(SamplingConfig)}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_the_fingerprint_covers_every_field(name: str) -> None:
    other = attrs.evolve(GREEDY, **{name: OTHER_VALUES[name]})
    assert sampling_fingerprint(other) != sampling_fingerprint(GREEDY)
    assert sampling_fingerprint(attrs.evolve(other)) == sampling_fingerprint(other)


def test_the_fingerprint_tells_lists_and_metadata_apart() -> None:
    def of(metadata: str | None = None, **changes: Any) -> bytes:
        return sampling_fingerprint(attrs.evolve(GREEDY, **changes), metadata)

    one, two = ((1, 0.5), (2, 1.0)), ((2, 1.0), (1, 0.5))
    assert of(logit_bias=one) != of(logit_bias=two)
    assert of(dry_sequence_breakers=("ab",)) != of(dry_sequence_breakers=("a", "b"))
    assert len({of(), of(""), of("x")}) == 3
    assert sampling_fingerprint(None) == sampling_fingerprint(SamplingConfig()) != of()


def test_no_encoding_is_guessed() -> None:
    with pytest.raises(TypeError, match="no encoding for a list"):
        sampling_fingerprint(attrs.evolve(GREEDY, samplers=["temperature"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_is_safe_at_temperature_0(name: str) -> None:
    assert sampling_replay_safe(attrs.evolve(GREEDY, **{name: OTHER_VALUES[name]})) is (name not in UNSAFE)


@pytest.mark.parametrize(
    ("sampling", "safe"),
    [
        (None, True),
        (SamplingConfig(), True),
        (SamplingConfig(temperature=1.0, mirostat_mode=2), True),
        (GREEDY, True),
        (attrs.evolve(GREEDY, temperature=-1.0), True),
        (attrs.evolve(GREEDY, temperature=1e-30), False),
        (attrs.evolve(GREEDY, temperature=0.8), False),
        (attrs.evolve(GREEDY, temperature=float("nan")), False),
        (attrs.evolve(GREEDY, samplers=tuple(reversed(GREEDY.samplers))), False),
        (attrs.evolve(GREEDY, samplers=()), False),
    ],
)
def test_what_is_safe(sampling: SamplingConfig | None, safe: bool) -> None:
    assert sampling_replay_safe(sampling) is safe


def test_the_first_tokens_of_an_equal_request() -> None:
    cache = ReplayCache(KvSettings())
    assert cache.find("", PROMPT, GREEDY) == ()
    cache.record("", PROMPT, GREEDY, [5])
    assert cache.find("", PROMPT, GREEDY) == (5,)
    cache.record("", PROMPT, GREEDY, range(5, 30))
    assert cache.find("", PROMPT, GREEDY) == tuple(range(5, 5 + MAX_REPLAY_TOKENS))
    assert cache.find("", tuple(PROMPT), attrs.evolve(GREEDY, seed=7)) == tuple(range(5, 13)), (
        "no draw, no seed"
    )
    assert cache.counters == ReplayCounters(hits=3, misses=1, records=2)


def test_what_differs_has_nothing_to_do_with_it() -> None:
    cache = ReplayCache(KvSettings())
    cache.record("", PROMPT, GREEDY, [5])
    assert cache.find("other", PROMPT, GREEDY) == ()
    assert cache.find("", [*PROMPT, 1], GREEDY) == ()
    assert cache.find("", PROMPT[:-1], GREEDY) == ()
    assert cache.find("", PROMPT, attrs.evolve(GREEDY, logit_bias=((5, -1.0),))) == ()
    assert cache.find("", PROMPT, None) == ()
    assert cache.find("", PROMPT, GREEDY, metadata="{}") == ()


def test_what_draws_is_neither_recorded_nor_found() -> None:
    cache = ReplayCache(KvSettings())
    drawn = attrs.evolve(GREEDY, temperature=0.8)
    cache.record("", PROMPT, drawn, [5])
    assert len(cache) == 0
    assert cache.find("", PROMPT, drawn) == ()
    assert cache.counters == ReplayCounters()


def test_what_is_known_stays() -> None:
    cache = ReplayCache(KvSettings())
    cache.record("", PROMPT, GREEDY, [1, 2, 3])
    cache.record("", PROMPT, GREEDY, [1, 2])
    cache.record("", PROMPT, GREEDY, [])
    assert cache.find("", PROMPT, GREEDY) == (1, 2, 3)
    cache.record("", PROMPT, GREEDY, [1, 2, 4, 5])
    cache.record("", PROMPT, GREEDY, [2])
    assert cache.find("", PROMPT, GREEDY) == (1, 2, 3)
    assert (cache.counters.records, cache.counters.conflicts) == (1, 2)
    cache.record("", PROMPT, GREEDY, [1, 2], audited=True)
    assert cache.find("", PROMPT, GREEDY) == (1, 2, 3)
    cache.record("", PROMPT, GREEDY, [1, 5], audited=True)
    assert cache.find("", PROMPT, GREEDY) == (1, 5)
    cache.clear()
    assert cache.find("", PROMPT, GREEDY) == ()


def test_it_is_bounded_and_forgets_the_least_recently_used() -> None:
    cache = ReplayCache(KvSettings(max_entries=3))
    prompts = [[number, *PROMPT] for number in range(5)]
    for number in range(3):
        cache.record("", prompts[number], None, [number])
    assert cache.find("", prompts[0], None) == (0,)
    cache.record("", prompts[3], None, [3])
    assert [cache.find("", prompt, None) for prompt in prompts] == [(0,), (), (2,), (3,), ()]
    cache.record("", prompts[0], None, [0])
    cache.record("", prompts[4], None, [4])
    assert [cache.find("", prompt, None) for prompt in prompts] == [(0,), (), (), (3,), (4,)]
    assert len(cache) == 3


def test_short_prompts_and_a_cache_that_only_records() -> None:
    cache = ReplayCache(KvSettings(min_tokens=101))
    cache.record("", PROMPT, GREEDY, [1])
    assert len(cache) == 0
    records = ReplayCache(KvSettings(lookup=False))
    records.record("", PROMPT, GREEDY, [1])
    assert len(records) == 1
    assert records.find("", PROMPT, GREEDY) == ()
