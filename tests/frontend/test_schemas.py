"""Request parsing: what is honoured, accepted, and refused by name."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from skippy.frontend.errors import ApiError
from skippy.frontend.sampling import BANNED, DEFAULT_SAMPLING, fold_seed, model_defaults
from skippy.frontend.schemas import ChatMessage, parse_chat, parse_completion
from skippy.frontend.strict_json import parse_object
from skippy.protocol import SamplingConfig


def chat(**more: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    return parse_chat(json.dumps(body).encode())


def completion(**more: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **more}).encode())


def test_defaults() -> None:
    request = chat()
    assert request.messages == (ChatMessage("user", "hi"),)
    assert (request.stream, request.include_usage, request.stop, request.max_tokens) == (
        False,
        False,
        (),
        None,
    )
    expected = SamplingConfig(flags=1, temperature=1, top_p=1, top_k=40, min_p=0.05)
    assert attrs.evolve(request.sampling, seed=0) == expected
    assert chat().sampling.seed != chat().sampling.seed or chat().sampling.seed != request.sampling.seed


def test_all_sampling_fields() -> None:
    request = chat(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=11, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, repeat_last_n=32, logit_bias={"5": -100, "6": 1.5}, typical_p=0.9,
        top_nsigma=2, dynatemp_range=0.5, dynatemp_exponent=2, mirostat_mode=0,
        xtc={"probability": 0.3, "threshold": 0.2}, ignore_eos=True,
        dry={"multiplier": 1, "base": 2, "allowed_length": 3, "penalty_last_n": -1,
             "sequence_breakers": ["x"]},
        sampler_sequence="kt",
    )  # fmt: skip
    assert request.sampling == SamplingConfig(
        flags=3, seed=11, temperature=0, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repeat_penalty=1.5, penalty_last_n=32, logit_bias=((5, -100), (6, 1.5)),
        typical_p=0.9, top_nsigma=2, dynatemp_range=0.5, dynatemp_exponent=2, dry_multiplier=1, dry_base=2,
        dry_allowed_length=3, dry_penalty_last_n=-1, dry_sequence_breakers=("x",), xtc_probability=0.3,
        xtc_threshold=0.2,
        samplers=("top_k", "temperature"), ignore_eos=True,
    )  # fmt: skip
    assert chat(samplers=["min_p"]).sampling.samplers == ("min_p",)


def test_llama_cpps_names() -> None:
    """Its server has some fields under other names, and those of DRY and XTC flat."""
    request = chat(
        top_k=-1, top_n_sigma=0, repeat_penalty=1.5, mirostat=2, mirostat_tau=4, mirostat_eta=0.2,
        dry_multiplier=1, dry_base=2, dry_allowed_length=3, dry_penalty_last_n=-1,
        dry_sequence_breakers=["x"], xtc_threshold=0.2, samplers="edt", n_predict=7,
        logit_bias=[[5, -100], [6, False], [5, 1.5]], cache_prompt=True, id_slot=-1, min_keep=0,
        top_p=1, xtc_probability=0,
    )  # fmt: skip
    expected = SamplingConfig(
        flags=1, seed=request.sampling.seed, temperature=1, top_p=1, top_k=-1, min_p=0.05, top_nsigma=0,
        repeat_penalty=1.5, mirostat_mode=2, mirostat_entropy=4, mirostat_learning_rate=0.2, dry_multiplier=1,
        dry_base=2, dry_allowed_length=3, dry_penalty_last_n=-1, dry_sequence_breakers=("x",),
        xtc_threshold=0.2, samplers=("penalties", "dry", "temperature"),
        logit_bias=((5, -100), (6, BANNED), (5, 1.5)),
    )  # fmt: skip
    assert request.sampling == expected
    assert request.max_tokens == 7
    assert chat(n_predict=-1).max_tokens is None
    assert chat(max_tokens=-1).max_tokens is None is completion(max_tokens=-1).max_tokens
    assert chat(samplers=["typ_p", "top-k", "temp"]).sampling.samplers == (
        "typical_p",
        "top_k",
        "temperature",
    )


def test_a_model_files_recommendations() -> None:
    said = {
        "temp": "0.6", "top_k": "20", "top_p": "0.9", "min_p": "0.000000", "penalty_repeat": "1.05",
        "penalty_last_n": "64", "xtc_probability": "0.1", "xtc_threshold": "0.2", "mirostat": "0",
        "mirostat_tau": "4", "mirostat_eta": "0.3", "sequence": "penalties;top_k;typ_p;temperature",
    }  # fmt: skip
    expected = SamplingConfig(
        flags=1, temperature=0.6, top_k=20, top_p=0.9, min_p=0, repeat_penalty=1.05, penalty_last_n=64,
        xtc_probability=0.1, xtc_threshold=0.2, mirostat_entropy=4, mirostat_learning_rate=0.3,
        samplers=("penalties", "top_k", "typical_p", "temperature"),
    )  # fmt: skip
    assert model_defaults(said, 100) == expected
    assert model_defaults({}, 100) == DEFAULT_SAMPLING


def test_bad_recommendations_are_left_out() -> None:
    bad = {"temp": "hot", "top_p": "2", "sequence": "top_k;infill", "adaptive": "1", "top_k": "20"}
    assert model_defaults(bad, 100) == attrs.evolve(DEFAULT_SAMPLING, top_k=20)


def test_messages() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "unheard_of": None},
            {"role": "user", "content": "c", "name": "bob"},
        ]
    )
    assert request.messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "c", "bob"),
    )


def test_refusals_are_what_the_assistant_has_said() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "user", "content": "a", "refusal": None},
            {"role": "assistant", "content": parts},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "Well.", "refusal": "No.", "parsed": {"any": ["thing"]}},
        ]
    )
    assert [message.content for message in request.messages] == ["No.", "a", "Well.\nNo.", "b", "Well.\nNo."]
    for message, param in (
        ({"content": parts}, "messages[0].content[1].type"),
        ({"content": "a", "refusal": "No."}, "messages[0].refusal"),
        ({"content": "a", "parsed": {}}, "messages[0].parsed"),
    ):
        with pytest.raises(ApiError) as caught:
            chat(messages=[{"role": "user", **message}])
        assert caught.value.param == param


def test_limits_and_stops() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert chat(stop="x").stop == ("x",)
    assert chat(stop=["x", "y"]).stop == ("x", "y")
    assert chat(stop=None).stop == ()
    request = chat(stream=True, stream_options={"include_usage": True})
    assert request.stream
    assert request.include_usage


def test_prompts() -> None:
    assert completion(prompt="x").prompts == ("x",)
    assert completion(prompt=["x"]).prompts == ("x",)
    assert completion(prompt=["x", "", "y"]).prompts == ("x", "", "y")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2]]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
    assert completion(prompt="").prompts == ("",)


def test_choices() -> None:
    assert (chat().n, chat(n=128).n, completion(n=2, best_of=2).n) == (1, 128, 2)
    assert completion(echo=True).echo
    assert completion(prompt=["x"] * 64, n=2).n == 2


def test_logprobs() -> None:
    found = [chat(**more).top_logprobs for more in ({}, {"logprobs": False}, {"logprobs": True})]
    assert found == [None, None, 0]
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    found = [completion(logprobs=value).top_logprobs for value in (None, False, 0, 20)]
    assert found == [None, None, 0, 20]


@pytest.mark.parametrize(
    "more",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "none", "functions": None},
        {"response_format": {"type": "text"}, "modalities": ["text"], "n": 1, "logprobs": False},
        {"safety_identifier": "s", "verbosity": "medium", "seed": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"unheard_of": None},
    ],
)
def test_accepted_without_effect(more: dict[str, Any]) -> None:
    request = attrs.asdict(chat(**more))
    plain = attrs.asdict(chat())
    for fields in (request, plain):
        del fields["sampling"], fields["stream"]
    assert request == plain


def _message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


_REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"user": 1}, "user"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**32}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x", ""]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {}}, "stop"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**39}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_n_sigma": 1, "top_nsigma": 1}, "top_n_sigma"),
    ({"dry_base": 1, "dry": {"base": 1}}, "dry.base"),
    ({"dry_sequence_breakers": [], "dry": {"sequence_breakers": []}}, "dry.sequence_breakers"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
    ({"xtc_probability": 2}, "xtc_probability"),
    ({"n_predict": 0}, "n_predict"),
    ({"n_predict": -2}, "n_predict"),
    ({"cache_prompt": False}, "cache_prompt"),
    ({"id_slot": 1}, "id_slot"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repeat_penalty": 1, "repetition_penalty": 1}, "repetition_penalty"),
    ({"repeat_last_n": -2}, "repeat_last_n"),
    ({"logit_bias": [1]}, "logit_bias[0]"),
    ({"logit_bias": [[1]]}, "logit_bias[0]"),
    ({"logit_bias": [[1, True]]}, "logit_bias[0].bias"),
    ({"logit_bias": [[1, None]]}, "logit_bias[0]"),
    ({"logit_bias": [[1, 1], ["Hello", 1]]}, "logit_bias[1].token"),
    ({"logit_bias": [[1, 1]] * 257}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 0 for i in range(257)}}, "logit_bias"),
    ({"dry": {"multiply": 1}}, "dry.multiply"),
    ({"dry": {"sequence_breakers": ["x" * 41]}}, "dry.sequence_breakers[0]"),
    ({"dry": {"sequence_breakers": ["x"] * 9}}, "dry.sequence_breakers"),
    ({"xtc": 1}, "xtc"),
    ({"mirostat_mode": 3}, "mirostat_mode"),
    ({"mirostat": 1, "mirostat_mode": 1}, "mirostat_mode"),
    ({"mirostat_entropy": -5}, "mirostat_entropy"),
    ({"mirostat_eta": 2}, "mirostat_eta"),
    ({"mirostat": 1, "top_k": 5}, "top_k"),
    ({"mirostat": 1, "top_p": 0.5}, "top_p"),
    ({"mirostat": 2, "xtc": {"probability": 0.5}}, "xtc"),
    ({"mirostat": 2, "top_n_sigma": 2}, "top_n_sigma"),
    ({"mirostat": 2, "samplers": ["top_k"]}, "samplers"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repeat_penalty": 1e-40}, "repeat_penalty"),
    ({"samplers": ["top_q"]}, "samplers[0]"),
    ({"sampler_sequence": "z"}, "sampler_sequence"),
    ({"samplers": [], "sampler_sequence": "k"}, "sampler_sequence"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"prompt": "x"}, "prompt"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (_message(role="tool"), "messages[0].tool_call_id"),
    (_message(role="robot"), "messages[0].role"),
    (_message(content=5), "messages[0].content"),
    (_message(content=["x"]), "messages[0].content[0]"),
    (_message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (_message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (_message(content=[{"type": "text", "text": "x", "style": 1}]), "messages[0].content[0].style"),
    (_message(tool_calls=[{}]), "messages[0].tool_calls"),
    (_message(audio={"id": "x"}), "messages[0].audio"),
    (_message(contents="x"), "messages[0].contents"),
    (_message(name=1), "messages[0].name"),
]


@pytest.mark.parametrize(("more", "param"), _REFUSED_CHAT)
def test_refused_chat(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**more)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[-1].split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 2]}, "prompt[1]"),
        ({"prompt": ["a", ["b"]]}, "prompt[1]"),
        ({"prompt": [[1], 2]}, "prompt[1]"),
        ({"prompt": [[1], ["2"]]}, "prompt[1][0]"),
        ({"prompt": [1, [2]]}, "prompt[1]"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"n": 129}, "n"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_refused_completion(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**more)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_unknown_fields_suggest_the_nearest() -> None:
    with pytest.raises(ApiError, match="did you mean 'temperature'") as caught:
        chat(temprature=1)
    assert caught.value.code == "unknown_parameter"


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_small_seeds_stay(seed: int) -> None:
    assert fold_seed(seed) == seed


@settings(deadline=None)
@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_fits_the_wire(seed: int) -> None:
    assert 0 <= fold_seed(seed) < 2**32
    assert chat(seed=seed).sampling.seed == fold_seed(seed)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_FIELD = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "stop",
        "n",
        "seed",
        "logit_bias",
        "dry",
        "stream_options",
        "samplers",
        "tools",
    ]
)


@settings(deadline=None)
@given(st.dictionaries(_FIELD, _JSON, max_size=6))
def test_any_object_parses_or_is_an_api_error(value: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        try:
            parse(json.dumps({"model": "m", **value}).encode())
        except ApiError as error:
            assert error.status == 400  # noqa: PT017


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_parse_or_are_an_api_error(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017


def test_strict_json_accepts_what_json_is() -> None:
    deep: Any = {"deep": "x"}
    for _ in range(61):
        deep = [deep]
    body = {"a": deep, "ü": "🙂\x00", "big": 10**39, "float": 1e300}
    assert parse_object(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\t"}', "Invalid control character at line 1 column 8"),
        (b'{"a": 1,}', "at line 1 column 9"),
    ],
)
def test_malformed_json_is_described(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        parse_object(body)
