"""Whose state is whose: every key of the configuration is in the identity, or has nothing to do with it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest

import skippy
from skippy.config import KvCacheConfig, LoraAdapter, PeerConfig, SelectedDevice, StageConfig
from skippy.kv import identity
from skippy.kv.identity import CHANGES_NOTHING, CHANGES_NUMBERS, instruction_sets, stage_identity
from tests.test_config import STAGE, read

CONFIG = read(STAGE)
MODEL: dict[str, Any] = {"weights": "ab" * 32, "rules": "rules:1", "backend": "engine 1", "threads": 2}

OTHER: dict[str, Any] = {
    "run_id": "other",
    "topology_id": "other",
    "model_id": "other",
    "stage_id": "other",
    "stage_index": 2,
    "layer_start": 11,
    "layer_end": 21,
    "load_mode": None,
    "bind_addr": "127.0.0.1:1",
    "model_path": "elsewhere.gguf",
    "upstream": PeerConfig(stage_id="x", stage_index=0, endpoint="127.0.0.1:1"),
    "downstream": None,
    "ctx_size": 1024,
    "lane_count": 5,
    "n_threads": 3,
    "n_batch": 100,
    "n_ubatch": 100,
    "batch_max_tokens": 100,
    "selected_device": SelectedDevice(backend_device="CPU"),
    "n_gpu_layers": -1,
    "cache_type_k": "q8_0",
    "cache_type_v": "q8_0",
    "flash_attn_type": "enabled",
    "mmap": True,
    "mlock": True,
    "direct_io": True,
    "repack": False,
    "check_tensors": True,
    "no_host_buffer": True,
    "split_mode": "none",
    "main_gpu": 1,
    "op_offload": True,
    "kv_offload": True,
    "kv_unified": True,
    "swa_full": True,
    "kv_cache": KvCacheConfig(),
    "lora_adapters": (LoraAdapter(path="x"),),
    "native_mtp_enabled": True,
}


def test_every_key_of_a_stage_is_classified_once() -> None:
    """A new key fails here: does a stage with another value of it compute other numbers?"""
    assert {field.name for field in attrs.fields(StageConfig)} == CHANGES_NUMBERS | CHANGES_NOTHING
    assert not CHANGES_NUMBERS & CHANGES_NOTHING


def evolved(**changes: Any) -> StageConfig:
    """Past the checks: some of these keys have one value only, so far."""
    config = object.__new__(StageConfig)
    for field in attrs.fields(StageConfig):
        object.__setattr__(config, field.name, changes.get(field.name, getattr(CONFIG, field.name)))
    return config


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(StageConfig)])
def test_another_value_is_another_identity_where_it_changes_numbers(name: str) -> None:
    kind = str(get_type_hints(StageConfig)[name])
    other: Any = OTHER.get(
        name, ("x",) if "tuple" in kind else 1 if "int" in kind or "bool" in kind else "other"
    )
    assert other != getattr(CONFIG, name)
    changed = stage_identity(evolved(**{name: other}), **MODEL) != stage_identity(CONFIG, **MODEL)
    assert changed is (name in CHANGES_NUMBERS)


def test_null_is_not_what_it_stands_for() -> None:
    """Which cannot be told here: what the engine makes of null may change."""
    assert stage_identity(evolved(n_ubatch=512), **MODEL) != stage_identity(CONFIG, **MODEL)


@pytest.mark.parametrize(
    "change", [{"weights": "ac" * 32}, {"rules": "rules:2"}, {"backend": "engine 2"}, {"threads": 3}]
)
def test_weights_rules_engine_and_threads(change: dict[str, Any]) -> None:
    assert stage_identity(CONFIG, **(MODEL | change)) != stage_identity(CONFIG, **MODEL)


def test_machine_and_program(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage_identity(CONFIG, **MODEL)
    assert len(first) == 32
    monkeypatch.setattr(platform, "machine", lambda: "another")
    second = stage_identity(CONFIG, **MODEL)
    monkeypatch.setattr(skippy, "__version__", "another")
    third = stage_identity(CONFIG, **MODEL)
    monkeypatch.setattr(identity, "instruction_sets", lambda: ["avx9"])
    assert len({first, second, third, stage_identity(CONFIG, **MODEL)}) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx2 sse4_2 avx avx2 pti\nflags : avx512f\n",
            ["avx", "avx2", "sse4_2"],
        ),
        ("processor : 0\nFeatures : fp asimd sve i8mm\n", ["asimd", "i8mm", "sve"]),
        ("nothing that is known\n", []),
        (None, []),
    ],
)
def test_instruction_sets(tmp_path: Path, text: str | None, expected: list[str]) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert instruction_sets(path) == expected


def test_a_start_with_other_names_and_places_finds_what_it_left() -> None:
    again = evolved(
        run_id="next",
        topology_id="next",
        stage_id="next",
        bind_addr="127.0.0.1:2",
        upstream=None,
        lane_count=9,
    )
    assert stage_identity(again, **MODEL) == stage_identity(CONFIG, **MODEL)
    assert stage_identity(again, **(MODEL | {"weights": "AB" * 32})) == stage_identity(CONFIG, **MODEL)


@pytest.mark.parametrize("weights", ["", "ab" * 31, "xy" * 32])
def test_weights_without_a_digest(weights: str) -> None:
    with pytest.raises(ValueError, match="SHA-256|hexadecimal"):
        stage_identity(CONFIG, **(MODEL | {"weights": weights}))
