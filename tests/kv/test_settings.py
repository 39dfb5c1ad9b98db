"""The configuration of the cache, the environment, and what a loaded stage makes of them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from skippy.config import ConfigError, KvCacheConfig, from_json_value, with_environment
from skippy.kv.settings import KvSettings, Resolution, extra_sequences, resolve
from tests.test_config import STAGE, read

ON = KvCacheConfig(mode="lookup-record")


def test_defaults_are_the_references() -> None:
    config = from_json_value({}, KvCacheConfig)
    assert (config.mode, config.payload, config.on) == ("auto", "auto", False)
    assert (config.max_entries, config.max_bytes, config.min_tokens) == (64, 0, 64)
    assert (config.shared_prefix_stride_tokens, config.shared_prefix_record_limit) == (128, 2)
    assert (config.audit_rate, config.directory, config.extra_sequences) == (0.0, None, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mode": "lookup"}, 'kv_cache.mode: expected one of "disabled", "auto", "record", "lookup-record"'),
        ({"payload": "full"}, 'kv_cache.payload: expected one of "auto", "resident-kv"'),
        ({"max_entires": 1}, "kv_cache.max_entires: unknown key; did you mean max_entries?"),
        ({"max_bytes": -1}, "kv_cache.max_bytes: is -1, must be 0 to"),
        ({"min_tokens": "64"}, "kv_cache.min_tokens: expected an integer"),
        ({"shared_prefix_stride_tokens": 0}, "kv_cache.shared_prefix_stride_tokens: is 0, must be 1 to"),
        ({"audit_rate": 1.5}, "kv_cache.audit_rate: is 1.5, must be 0 to 1"),
        ({"directory": " "}, "kv_cache.directory: must not be empty"),
        ({"directory": "a\0b"}, "kv_cache.directory: must not contain a null character"),
        ({"directory": "\ud800"}, "kv_cache.directory: must not contain half of a surrogate pair"),
        ({"directory_max_bytes": 0}, "kv_cache.directory_max_bytes: is 0, must be 1 to"),
        ({"extra_sequences": 253}, "kv_cache.extra_sequences: and lane_count are 257 sequences, at most 256"),
    ],
)
def test_wrong_keys_and_values(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(STAGE | {"kv_cache": change})
    assert str(caught.value).startswith(text)


def test_more_cells_than_fit() -> None:
    with pytest.raises(ConfigError, match="kv_cache.extra_sequences: ctx_size times 140 sequences"):
        read(STAGE | {"ctx_size": 2**24, "lane_count": 100, "kv_cache": {"extra_sequences": 40}})


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (("", "auto", " AUTO "), "auto"),
        (("1", "on", "True", "exact", "lookup-record", "lookup_record"), "lookup-record"),
        (("record",), "record"),
    ],
)
def test_words_for_modes(words: tuple[str, ...], mode: str) -> None:
    for word in words:
        config = with_environment(None, {"SKIPPY_KV_CACHE": word})
        assert config is not None
        assert config.mode == mode
        assert with_environment(None, {"SKIPPY_PREFIX_CACHE": word}) == config


@pytest.mark.parametrize("word", ["0", "off", "false", "disable", "disabled", " OFF "])
@pytest.mark.parametrize("variable", ["SKIPPY_KV_CACHE", "SKIPPY_PREFIX_CACHE"])
def test_either_variable_is_a_kill_switch(variable: str, word: str) -> None:
    other = {"SKIPPY_KV_CACHE": "on", "SKIPPY_PREFIX_CACHE": "on", variable: word}
    for environment in ({variable: word}, other):
        assert with_environment(None, environment, auto="lookup-record") is None
        config = with_environment(ON, environment)
        assert config is not None
        assert not config.on


def test_the_environment_counts_where_there_is_no_configuration() -> None:
    environment = {
        "SKIPPY_KV_CACHE": "record",
        "SKIPPY_PREFIX_CACHE": "lookup-record",
        "SKIPPY_KV_CACHE_PAYLOAD": "Full_State",
        "SKIPPY_KV_CACHE_MAX_ENTRIES": "7",
        "SKIPPY_KV_CACHE_MAX_BYTES": "8000000000000000000",
        "SKIPPY_KV_CACHE_MIN_TOKENS": "9",
        "SKIPPY_KV_CACHE_SHARED_STRIDE_TOKENS": "10",
        "SKIPPY_KV_CACHE_SHARED_RECORD_LIMIT": "11",
        "SKIPPY_KV_DIR": "/somewhere",
    }
    expected = KvCacheConfig(
        mode="record",
        payload="full-state",
        max_entries=7,
        max_bytes=8 * 10**18,
        min_tokens=9,
        shared_prefix_stride_tokens=10,
        shared_prefix_record_limit=11,
        directory="/somewhere",
    )
    assert with_environment(None, environment) == expected
    assert with_environment(ON, environment) == attrs.evolve(ON, directory="/somewhere")
    own = attrs.evolve(ON, directory="/own")
    assert with_environment(own, environment) == own
    no_mode = {name: word for name, word in environment.items() if not name.endswith("_CACHE")}
    assert with_environment(None, no_mode) is None
    assert with_environment(None, no_mode, auto="lookup-record") == attrs.evolve(
        expected, mode="lookup-record"
    )
    assert with_environment(None, {}) is None


@pytest.mark.parametrize("word", ["resident", "kv", "resident-kv", "RESIDENT_KV"])
def test_words_for_the_resident_payload(word: str) -> None:
    config = with_environment(None, {"SKIPPY_KV_CACHE": "1", "SKIPPY_KV_CACHE_PAYLOAD": word})
    assert config is not None
    assert config.payload == "resident-kv"


def test_a_host_chooses_for_auto() -> None:
    assert with_environment(KvCacheConfig(), {}, auto="lookup-record") == ON
    assert with_environment(None, {"SKIPPY_KV_CACHE": "auto"}, auto="lookup-record") == ON
    assert with_environment(None, {}, auto="lookup-record") == ON
    assert with_environment(KvCacheConfig(mode="record"), {}, auto="lookup-record") == KvCacheConfig(
        mode="record"
    )
    assert with_environment(KvCacheConfig(mode="disabled"), {}, auto="lookup-record") == KvCacheConfig(
        mode="disabled"
    )


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"SKIPPY_KV_CACHE": "on", "SKIPPY_KV_DIR": " "}, "SKIPPY_KV_DIR: directory: must not be empty"),
        ({"SKIPPY_KV_CACHE": "maybe"}, "SKIPPY_KV_CACHE: is 'maybe', must be one of auto, record, 0, off"),
        ({"SKIPPY_KV_CACHE": "on", "SKIPPY_PREFIX_CACHE": "2"}, "SKIPPY_PREFIX_CACHE: is '2'"),
        (
            {"SKIPPY_KV_CACHE": "on", "SKIPPY_KV_CACHE_PAYLOAD": "pages"},
            "SKIPPY_KV_CACHE_PAYLOAD: is 'pages', must be one of auto, kv-recurrent, resident",
        ),
        (
            {"SKIPPY_KV_CACHE": "on", "SKIPPY_KV_CACHE_MAX_BYTES": "1G"},
            "SKIPPY_KV_CACHE_MAX_BYTES: is '1G', must be an integer, at least 0",
        ),
        (
            {"SKIPPY_KV_CACHE": "on", "SKIPPY_KV_CACHE_SHARED_STRIDE_TOKENS": "0"},
            "SKIPPY_KV_CACHE_SHARED_STRIDE_TOKENS: shared_prefix_stride_tokens: is 0, must be 1 to",
        ),
    ],
)
def test_wrong_words(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_environment(None, environment)
    assert str(caught.value).startswith(text)


def resolved(config: KvCacheConfig | None = ON, **changes: Any) -> Resolution:
    situation: dict[str, Any] = {
        "sliceable": True,
        "copyable": True,
        "exportable": True,
        "lane_count": 4,
        "kv_unified": False,
        "cells": 4 * 4096,
    }
    return resolve(config, **(situation | changes))


@pytest.mark.parametrize(
    "config", [None, KvCacheConfig(), KvCacheConfig(mode="auto"), KvCacheConfig(mode="disabled")]
)
def test_off(config: KvCacheConfig | None) -> None:
    assert resolved(config) == Resolution(None)
    assert extra_sequences(config, lane_count=4, kv_unified=True) == 0


def test_the_defaults_of_an_attention_model() -> None:
    assert resolved() == Resolution(
        KvSettings(
            payload="resident-kv",
            lookup=True,
            max_entries=64,
            max_bytes=0,
            min_tokens=64,
            stride_tokens=128,
            record_limit=2,
            extra_sequences=0,
            shared_cells=False,
            max_resident_tokens=0,
            activation_max_bytes=128 * 1024 * 1024,
            directory=None,
            directory_max_bytes=8 * 1024**3,
            audit_rate=0.0,
        )
    )
    record = resolved(KvCacheConfig(mode="record")).settings
    assert record is not None
    assert not record.lookup


def test_recurrent_state() -> None:
    settings = resolved(sliceable=False).settings
    assert settings is not None
    assert (settings.payload, settings.max_entries) == ("kv-recurrent", 16)
    asked = resolved(attrs.evolve(ON, max_entries=17), sliceable=False)
    assert asked.settings == settings
    assert asked.warnings == ("kv_cache.max_entries is taken as 16, because the model has recurrent state",)


@pytest.mark.parametrize(
    ("payload", "situation", "why"),
    [
        ("resident-kv", {"sliceable": False}, "payload resident-kv is for attention models"),
        ("resident-kv", {"copyable": False}, "payload resident-kv needs sequences that can be copied"),
        (
            "auto",
            {"sliceable": False, "exportable": False},
            "payload kv-recurrent needs states that can be exp",
        ),
        ("full-state", {"exportable": False}, "payload full-state needs states that can be exported"),
    ],
)
def test_a_payload_that_the_model_cannot_have_is_a_warning_and_no_cache(
    payload: Any, situation: dict[str, bool], why: str
) -> None:
    resolution = resolved(attrs.evolve(ON, payload=payload), **situation)
    assert resolution.settings is None
    (warning,) = resolution.warnings
    assert warning.startswith(f"the prefix cache is off: {why}")


def test_an_audit_rate_for_what_cannot_be_compared_in_part() -> None:
    asked = attrs.evolve(ON, audit_rate=0.5)
    resolution = resolved(asked, sliceable=False)
    assert resolution.settings is not None
    assert resolution.settings.audit_rate == 0.0
    assert resolution.warnings == (
        "kv_cache.audit_rate has no effect: this model's state cannot be compared in part",
    )
    kept = resolved(asked)
    assert kept.settings is not None
    assert (kept.settings.audit_rate, kept.warnings) == (0.5, ())


def test_limits() -> None:
    for asked, taken in ((0, 1), (1, 1), (512, 512), (513, 512)):
        resolution = resolved(attrs.evolve(ON, max_entries=asked))
        assert resolution.settings is not None
        assert resolution.settings.max_entries == taken
        said = f"kv_cache.max_entries is {asked}, which is taken as {taken}"
        assert resolution.warnings == ((said,) if asked != taken else ())


def test_sequences() -> None:
    assert extra_sequences(ON, lane_count=4, kv_unified=False) == 0
    assert extra_sequences(ON, lane_count=4, kv_unified=True) == 64
    assert extra_sequences(ON, lane_count=250, kv_unified=True) == 6
    assert extra_sequences(attrs.evolve(ON, extra_sequences=3), lane_count=4, kv_unified=False) == 3
    assert extra_sequences(attrs.evolve(ON, extra_sequences=255), lane_count=4, kv_unified=False) == 252


def test_cells_that_are_shared() -> None:
    for cells, limit in ((8191, 0), (8192, 4096), (16384, 8192)):
        settings = resolved(kv_unified=True, cells=cells).settings
        assert settings is not None
        assert (settings.shared_cells, settings.max_resident_tokens) == (True, limit)


def test_a_folder_without_anything_to_put_there() -> None:
    resolution = resolved(attrs.evolve(ON, directory="/somewhere"), exportable=False)
    assert resolution.settings is not None
    assert resolution.settings.directory is None
    assert resolution.warnings == (
        "kv_cache.directory has no effect: the state of this model cannot be exported",
    )
