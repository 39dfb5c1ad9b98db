"""Samplers: choice, determinism, penalties, bias, and settings refused by name."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import psutil
import pytest

from skippy.engine import EngineError, FloatArray, StageEngine
from skippy.engine.llama.native import api
from skippy.engine.llama.sampler import LlamaSampler
from skippy.engine.sampling import SAMPLER_NAMES, step_seed
from skippy.engine.toy import ToyEngine
from skippy.protocol.kinds import SamplingFlag
from skippy.protocol.messages import SamplingConfig

from .chains import Kind


def settings(**fields: Any) -> SamplingConfig:
    return attrs.evolve(SamplingConfig(flags=SamplingFlag.ENABLED), **fields)


@pytest.fixture(params=["toy", "llama"])
def last(request: pytest.FixtureRequest) -> Iterator[StageEngine]:
    kind: Kind = request.getfixturevalue({"toy": "toy_kind", "llama": "tiny_kind"}[request.param])
    stage = kind.load(5, 6)
    yield stage
    stage.close()


@pytest.fixture
def native(tiny_kind: Kind) -> Iterator[StageEngine]:
    stage = tiny_kind.load(5, 6)
    yield stage
    stage.close()


def some_logits(stage: StageEngine, seed: int = 1) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 2, stage.info.vocab_size).astype(np.float32)


def draws(stage: StageEngine, config: SamplingConfig, count: int = 200, *, logits: Any = None) -> list[int]:
    sampler = stage.new_sampler(config)
    values = some_logits(stage) if logits is None else logits
    try:
        return [sampler.sample(values, step) for step in range(count)]
    finally:
        sampler.close()


@pytest.mark.parametrize("config", [None, SamplingConfig(temperature=2.0), settings(temperature=0.0)])
def test_greedy_takes_the_lowest_of_equals(last: StageEngine, config: SamplingConfig | None) -> None:
    logits = np.zeros(last.info.vocab_size, dtype=np.float32)
    logits[[9, 17, 200]] = 5.0
    before = logits.tobytes()
    assert last.new_sampler(config).sample(logits, 0) == 9
    assert logits.tobytes() == before


@pytest.mark.parametrize("config", [None, settings(), settings(temperature=0.0)])
def test_nan_is_an_error(last: StageEngine, config: SamplingConfig | None) -> None:
    logits = some_logits(last)
    logits[7] = np.nan
    with pytest.raises(EngineError, match="NaN"):
        last.new_sampler(config).sample(logits, 0)


def test_same_seed_and_step_same_token(last: StageEngine) -> None:
    first = draws(last, settings(seed=5, temperature=1.0))
    assert draws(last, settings(seed=5, temperature=1.0)) == first
    assert draws(last, settings(seed=6, temperature=1.0)) != first
    assert len(set(first)) > 10
    sampler = last.new_sampler(settings(seed=5))
    logits = some_logits(last)
    assert [sampler.sample(logits, step) for step in reversed(range(200))] == first[::-1]


def test_draws_do_not_depend_on_whether_settings_were_sent(last: StageEngine) -> None:
    """6 over 1.2 is 5, and comes first then; over what a frame makes of 1.2, an f32, it may be less."""
    logits = np.full(last.info.vocab_size, -np.inf, dtype=np.float32)
    logits[[3, 40]] = 6.0, 5.0
    found = []
    for penalty in (1.2, float(np.float32(1.2))):
        sampler = last.new_sampler(settings(repeat_penalty=penalty, penalty_last_n=-1, seed=1))
        sampler.accept([3])
        found.append([sampler.sample(logits, step) for step in range(200)])
    assert found[0] == found[1]
    assert set(found[0]) == {3, 40}


def test_draws_follow_the_distribution(last: StageEngine) -> None:
    logits = np.full(last.info.vocab_size, -np.inf, dtype=np.float32)
    logits[[3, 40]] = np.log(np.array([0.2, 0.8], dtype=np.float32))
    found = draws(last, settings(seed=1), 2000, logits=logits)
    assert set(found) == {3, 40}
    assert abs(found.count(40) / 2000 - 0.8) < 0.03  # 3.4 standard deviations, and the seed is fixed


def test_top_k_and_top_p_and_min_p(last: StageEngine) -> None:
    logits = some_logits(last)
    order = np.argsort(-logits, kind="stable")
    assert set(draws(last, settings(top_k=3, temperature=5.0))) == set(order[:3].tolist())
    assert set(draws(last, settings(top_k=1))) == {int(order[0])}
    assert set(draws(last, settings(top_p=0.0))) == {int(order[0])}
    weights = np.exp(logits[order].astype(np.float64) - logits[order[0]])
    share = np.cumsum(weights) / weights.sum()
    kept = int(np.searchsorted(share, 0.5)) + 1
    assert set(draws(last, settings(top_p=0.5), 2000)) == set(order[:kept].tolist())
    allowed = set(order[weights >= 0.2].tolist())
    assert set(draws(last, settings(min_p=0.2), 2000)) == allowed


def test_low_temperature_is_nearly_greedy(last: StageEngine) -> None:
    for temperature in (1e-3, 1e-19, 1e-40, 0.0, -1.0):
        assert set(draws(last, settings(temperature=temperature))) == {int(np.argmax(some_logits(last)))}


def test_only_named_samplers_are_applied(last: StageEngine) -> None:
    logits = some_logits(last)
    assert len(set(draws(last, settings(top_k=1, samplers=())))) > 1
    assert set(draws(last, settings(top_k=1, samplers=("top_k",)))) == {int(np.argmax(logits))}


def test_order_of_samplers_matters(last: StageEngine) -> None:
    logits = np.zeros(last.info.vocab_size, dtype=np.float32)
    logits[:3] = [12.0, 11.0, 9.0]
    before = settings(temperature=8.0, top_p=0.7, samplers=("top_p", "temperature"))
    after = settings(temperature=8.0, top_p=0.7, samplers=("temperature", "top_p"))
    assert set(draws(last, before, logits=logits)) == {0}
    assert len(set(draws(last, after, logits=logits))) > 20


def test_logit_bias_adds_up(last: StageEngine) -> None:
    for temperature in (0.0, 0.01):
        config = settings(logit_bias=((65, 30.0), (65, 30.0), (66, 50.0)), temperature=temperature)
        assert set(draws(last, config, 5)) == {65}


def test_ignore_eos(last: StageEngine) -> None:
    assert last.vocabulary is not None
    ends = [t for t in range(last.info.vocab_size) if last.vocabulary.is_end_of_generation(t)]
    logits = some_logits(last)
    logits[ends] = 90.0
    for temperature in (0.0, 1.0):
        assert set(draws(last, settings(temperature=temperature), logits=logits)) <= set(ends)
        for config in (
            settings(temperature=temperature, ignore_eos=True),
            settings(temperature=temperature, flags=SamplingFlag.ENABLED | SamplingFlag.IGNORE_EOS),
        ):
            assert not set(draws(last, config, logits=logits)) & set(ends)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": 1.5}, {5: 8.5, 6: 9.0, 7: 9.5}),
        ({"frequency_penalty": 0.5}, {5: 9.0, 6: 10.0, 7: 9.5}),
        ({"repeat_penalty": 2.0}, {5: 5.0, 6: 5.25, 7: 9.5}),
    ],
)
def test_penalties_change_the_greedy_choice(
    last: StageEngine, fields: dict[str, float], expected: dict[int, float]
) -> None:
    logits = np.zeros(last.info.vocab_size, dtype=np.float32)
    logits[[5, 6, 7]] = [10.0, 10.5, 9.5]
    sampler = last.new_sampler(settings(temperature=0.0, **fields))
    assert sampler.sample(logits, 0) == 6
    sampler.accept([5, 5])
    sampler.accept([6])
    assert sampler.sample(logits, 1) == max(expected, key=lambda token: expected[token])
    sampler.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_in_front_equal_penalties_over_all_candidates(
    temperature: float, native: StageEngine
) -> None:
    config = settings(
        temperature=temperature, seed=3, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    )
    front, chained = native.new_sampler(config), native.new_sampler(config)
    assert isinstance(chained, LlamaSampler)
    penalties, chained._first_penalties = chained._first_penalties, None
    chained._chain.insert(0, lambda _step: chained._apply(penalties))
    logits = some_logits(native)
    found: list[list[int]] = [[], []]
    for sampler, tokens in zip((front, chained), found, strict=True):
        for step in range(100):
            tokens.append(sampler.sample(logits, step))
            sampler.accept(tokens[-1:])
        sampler.close()
    assert found[0] == found[1]
    assert len(set(found[0])) > 20


def test_penalty_window(last: StageEngine) -> None:
    logits = np.zeros(last.info.vocab_size, dtype=np.float32)
    logits[[5, 6]] = [10.0, 9.5]
    for window, choice in ((2, 5), (3, 6), (0, 5), (-1, 6)):
        sampler = last.new_sampler(settings(temperature=0.0, presence_penalty=2.0, penalty_last_n=window))
        sampler.accept([1, 5, 2, 3])
        assert sampler.sample(logits, 0) == choice, window
        sampler.close()


@pytest.mark.parametrize("fields", [{"penalty_last_n": 2**31 - 1}, {"dry_penalty_last_n": 2**31 - 1}])
def test_a_window_longer_than_the_context_costs_no_more(native: StageEngine, fields: dict[str, int]) -> None:
    """llama.cpp allocates its window at once: 8 GiB for this one, which would end the process."""
    config = settings(temperature=0.0, repeat_penalty=1.5, dry_multiplier=1.0, **fields)
    before = psutil.Process().memory_info().rss
    sampler = native.new_sampler(config)
    sampler.accept([9, 9])
    logits = np.zeros(native.info.vocab_size, dtype=np.float32)
    logits[[9, 17]] = 5.0, 4.0
    assert sampler.sample(logits, 0) == 17
    assert psutil.Process().memory_info().rss - before < 64 << 20
    sampler.close()


def test_accept_refuses_unknown_tokens(last: StageEngine) -> None:
    sampler = last.new_sampler(settings(presence_penalty=1.0))
    for token in (-1, last.info.vocab_size, 2**40):
        with pytest.raises(ValueError, match="token"):
            sampler.accept([1, token])
    sampler.accept([])
    sampler.close()
    sampler.close()


BAD: dict[str, list[Any]] = {
    "temperature": [math.nan, math.inf],
    "top_p": [-0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1],
    "typical_p": [-0.1, 1.1],
    "presence_penalty": [math.inf, math.nan],
    "frequency_penalty": [-math.inf],
    "repeat_penalty": [0.0, -1.0, math.nan, 1e39],
    "penalty_last_n": [-2],
    "logit_bias": [((-1, 1.0),), ((10**6, 1.0),), ((1, math.nan),), ((1, math.inf),)],
    "top_nsigma": [math.nan],
    "dynatemp_range": [-1.0, math.nan],
    "dynatemp_exponent": [math.nan],
    "dry_multiplier": [-1.0, math.nan],
    "dry_base": [-1.0, math.inf],
    "dry_allowed_length": [-1],
    "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": [("a\0b",), ("x" * 41,), ("\ud800",)],
    "xtc_probability": [-0.1, 1.1],
    "xtc_threshold": [math.nan],
    "mirostat_mode": [-1, 3],
    "mirostat_entropy": [-1.0, math.nan],
    "mirostat_learning_rate": [-0.1, math.inf],
    "samplers": [("top_k", "infill"), ("",), ("k",)],
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_settings_are_named(last: StageEngine, name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ValueError, match=name):
            last.new_sampler(settings(**{name: value}))
        last.new_sampler(
            attrs.evolve(SamplingConfig(), **{name: value})
        ).close()  # not enabled: not looked at


def test_chat_metadata_is_refused(last: StageEngine) -> None:
    last.new_sampler(None, "").close()
    with pytest.raises(ValueError, match="chat_metadata"):
        last.new_sampler(None, '{"grammar": "root ::= [a-z]"}')


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.5},
        {"xtc_probability": 0.5},
        {"dynatemp_range": 1.0},
        {"dry_multiplier": 1.0},
        {"mirostat_mode": 1},
    ],
)
def test_toy_refuses_what_it_lacks(toy_kind: Kind, fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        toy_kind.load(5, 6).new_sampler(settings(**fields))


@pytest.mark.parametrize("target", [1.0, 2.0, 2.5])
@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_is_llama_cpps(mode: int, target: float, native: StageEngine) -> None:
    """Its samplers keep a generator of their own over the draws, so only the first one can be compared."""
    assert native.vocabulary is not None
    size, found, expected = native.info.vocab_size, set(), set()
    logits = some_logits(native) * 2
    for seed in range(300):
        config = settings(mirostat_mode=mode, mirostat_entropy=target, seed=seed)
        found |= set(draws(native, config, 1, logits=logits))
        if mode == 1:
            sampler = api.llama_sampler_init_mirostat(size, seed, target, 0.1, 100)
        else:
            sampler = api.llama_sampler_init_mirostat_v2(seed, target, 0.1)
        expected.add(apply(sampler, logits))
    assert found == expected
    assert len(found) < size // 2
    narrow = settings(mirostat_mode=mode, mirostat_entropy=0.01, mirostat_learning_rate=0.0)
    assert set(draws(native, narrow)) == {int(np.argmax(logits))}
    assert len(set(draws(native, settings(mirostat_mode=mode, mirostat_entropy=60.0)))) > size // 5


def apply(sampler: Any, logits: FloatArray) -> int:
    """The token that a sampler of llama.cpp's takes."""
    data = np.zeros(len(logits), np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
    data["id"], data["logit"] = np.arange(len(logits)), logits
    array = api.llama_token_data_array(size=len(logits), selected=-1)
    array.data = ctypes.cast(data.ctypes.data, type(array.data))
    api.llama_sampler_apply(sampler, ctypes.byref(array))
    api.llama_sampler_free(sampler)
    return int(array.data[array.selected].id)


@pytest.mark.parametrize("target", [2.0, 4.0])
@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_keeps_the_surprise_near_its_target(last: StageEngine, mode: int, target: float) -> None:
    if mode == 1 and isinstance(last, ToyEngine):
        pytest.skip("the toy has mirostat 2 only")
    logits = some_logits(last)
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    config = settings(mirostat_mode=mode, mirostat_entropy=target, mirostat_learning_rate=0.1, seed=3)
    found = draws(last, config, 600)
    # The surprise is that among the tokens that are left, below that of the whole distribution.
    kept = shares[np.unique(found)].sum()
    surprise = -np.log2(shares[found[100:]] / kept).mean()
    assert surprise == pytest.approx(target, abs=0.6)


def test_mirostat_draws_do_not_depend_on_rewinds(last: StageEngine) -> None:
    config = settings(mirostat_mode=2, mirostat_entropy=3.0, seed=9)
    logits = some_logits(last)
    expected = draws(last, config, 30)
    sampler = last.new_sampler(config)
    found = [sampler.sample(logits, step) for step in range(20)]
    found[5:] = [sampler.sample(logits, step) for step in range(5, 30)]
    assert found == expected
    with pytest.raises(EngineError, match="mirostat knows nothing of the draws before number 40"):
        sampler.sample(logits, 40)


def test_penalties_and_temperature_go_with_mirostat(last: StageEngine) -> None:
    logits = np.zeros(last.info.vocab_size, dtype=np.float32)
    logits[[5, 6]] = [10.0, 9.5]
    config = settings(mirostat_mode=2, mirostat_entropy=0.01, presence_penalty=2.0, top_k=1)
    sampler = last.new_sampler(config)
    assert sampler.sample(logits, 0) == 5
    sampler.accept([5])
    assert sampler.sample(logits, 1) == 6
    assert set(draws(last, settings(mirostat_mode=2, temperature=0.0))) == {int(np.argmax(some_logits(last)))}
    # top_k = 1 would leave one token.
    wide = settings(mirostat_mode=2, mirostat_entropy=20.0, top_k=1, temperature=3.0)
    assert len(set(draws(last, wide))) > 20


def test_only_the_last_stage_samples(toy_kind: Kind, tiny_kind: Kind) -> None:
    for kind in (toy_kind, tiny_kind):
        stage = kind.load(0, 3)
        with pytest.raises(ValueError, match="last stage"):
            stage.new_sampler(None)
        stage.close()


@pytest.mark.parametrize("order", [tuple(sorted(SAMPLER_NAMES)), tuple(sorted(SAMPLER_NAMES, reverse=True))])
def test_native_samplers_all_at_once(native: StageEngine, order: tuple[str, ...]) -> None:
    config = settings(
        seed=3,
        samplers=order,
        temperature=0.9,
        dynatemp_range=0.5,
        top_k=40,
        top_p=0.95,
        min_p=0.02,
        typical_p=0.9,
        top_nsigma=2.0,
        xtc_probability=0.5,
        xtc_threshold=0.05,
        dry_multiplier=0.8,
        presence_penalty=0.1,
    )

    def run() -> list[int]:
        sampler = native.new_sampler(config)
        sampler.accept([1, 2, 3, 1, 2, 3])
        found = []
        for step in range(50):
            found.append(sampler.sample(some_logits(native, step), step))
            sampler.accept(found[-1:])
        sampler.close()
        return found

    first = run()
    assert run() == first
    assert len(set(first)) > 10


def test_native_dry_breaks_repetition(native: StageEngine) -> None:
    logits = np.zeros(native.info.vocab_size, dtype=np.float32)
    logits[[30, 31]] = [10.0, 9.0]
    config = settings(
        temperature=0.0, dry_multiplier=5.0, dry_penalty_last_n=-1, dry_sequence_breakers=("\n",)
    )
    sampler = native.new_sampler(config)
    sampler.accept([40, 41, 42, 30, 40, 41, 42])
    assert sampler.sample(logits, 0) == 31
    sampler.close()


def test_native_xtc_excludes_top_choices(native: StageEngine) -> None:
    logits = np.zeros(native.info.vocab_size, dtype=np.float32)
    logits[[30, 31, 32]] = [20.0, 20.0, 19.0]
    always = settings(xtc_probability=1.0, xtc_threshold=0.1)
    assert set(draws(native, always, logits=logits)) == {32}
    half = draws(native, settings(xtc_probability=0.5, xtc_threshold=0.1, seed=2), 400, logits=logits)
    assert set(half) == {30, 31, 32}


def test_native_top_n_sigma_and_typical(native: StageEngine) -> None:
    logits = np.zeros(native.info.vocab_size, dtype=np.float32)
    logits[[30, 31]] = [40.0, 39.0]
    assert set(draws(native, settings(top_nsigma=1.0, temperature=20.0), logits=logits)) == {30, 31}
    assert len(set(draws(native, settings(temperature=20.0), logits=logits))) > 2
    assert len(set(draws(native, settings(typical_p=0.1)))) < len(set(draws(native, settings())))


@pytest.mark.parametrize(
    "order", [("temperature",), ("temperature", "top_p", "min_p"), ("xtc", "temperature")]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "dynatemp_range": 100.0, "dynatemp_exponent": 100.0},
        {"temperature": 1e-19, "samplers": ("temperature", "temperature", "temperature")},
    ],
)
def test_native_temperatures_that_near_zero_take_the_best(
    native: StageEngine, fields: dict[str, Any], order: tuple[str, ...]
) -> None:
    logits = some_logits(native) + np.float32(30)  # all above 0, so all would overflow to the same infinity
    best = int(np.argmax(logits))
    config = settings(**{"samplers": order, "xtc_probability": 1.0, "xtc_threshold": 1.0, **fields})
    assert set(draws(native, config, 20, logits=logits)) == {best}


def test_step_seeds() -> None:
    seeds = [step_seed(seed, step, b"skippy-draw") for seed in range(4) for step in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 0xFFFFFFFF for seed in seeds)
    assert step_seed(1, 2, b"skippy-draw") != step_seed(2, 1, b"skippy-draw")
    assert step_seed(1, 2, b"skippy-draw") != step_seed(1, 2, b"skippy-xtc")
    assert step_seed(0, 0, b"skippy-draw") == step_seed(2**64, 0, b"skippy-draw")  # seeds are 64 bits


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repeat_penalty": 1.3},
        {"repeat_penalty": 1.5, "penalty_last_n": 3, "top_p": 0.8},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_base": 1.5},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02, "dynatemp_range": 0.3},
    ],
)
def test_a_sampler_goes_on_where_another_one_was(last: StageEngine, fields: dict[str, Any]) -> None:
    """As a replay has it: made anew, it takes what was drawn, in pieces of any size, without drawing."""
    config = settings(seed=7, temperature=1.2, top_k=30, **fields)
    logits = np.random.default_rng(3).normal(0, 2, (16, last.info.vocab_size)).astype(np.float32)
    logits[:, 8:] -= 20.0  # few are likely, so that they repeat
    try:
        first = last.new_sampler(config)
    except ValueError:
        pytest.skip("the toy engine has no such sampler")
    prompt, tokens = [3, 5, 3], list[int]()
    first.accept(prompt)
    for step, row in enumerate(logits):
        tokens.append(first.sample(row, step))
        first.accept(tokens[-1:])
    assert len(set(tokens)) < len(tokens)
    for taken in range(len(tokens)):
        again = last.new_sampler(config)
        again.accept(prompt)
        for start in range(0, taken, 4):
            again.accept(tokens[start : min(start + 4, taken)])
        drawn = list[int]()
        for step in range(taken, len(tokens)):
            drawn.append(again.sample(logits[step], step))
            again.accept(drawn[-1:])
        assert drawn == tokens[taken:]
        again.close()
    first.close()
