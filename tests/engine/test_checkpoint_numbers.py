"""What a converted checkpoint computes is what its own conventions say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFHeader, ensure_slice, header_path
from tests.support.checkpoints import FAMILIES, GEMMAS, write_checkpoint
from tests.support.forward import logits

OPTIONS = EngineOptions(
    context_length=64,
    max_sequences=1,
    n_threads=1,
    n_threads_batch=1,
    cache_type_k="f32",
    cache_type_v="f32",
    flash_attn="disabled",
)
TOKENS = [3, 141, 59, 26, 200, 7, 7, 91, 12, 250, 64, 33]


def computed(folder: Path, cache: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    engine = LlamaEngine.load(ensure_slice(folder, 0, layers, cache_dir=cache), OPTIONS)
    try:
        engine.decode([Segment(0, 0, len(TOKENS), tokens=TOKENS, logits=1)])
        return engine.logits(0).copy()
    finally:
        engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m",
        family,
        layers=7 if family == "gemma3" else 3,  # of its first six, five look at a window
        width=64,
        kv_heads=2,
        feed_forward=96,
        dtype="F32",
        tied=family in ("gemma", "gemma2"),
        shards=2,
    )
    near = 2e-3 if family in GEMMAS else 2e-4  # ggml looks GELU up in a table of F16
    np.testing.assert_allclose(computed(folder, tmp_path / "c"), logits(folder, TOKENS), rtol=0, atol=near)


def test_biases_are_reordered_like_their_rows(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", width=64, feed_forward=96, dtype="F32", biases=True, scale=0.3)
    np.testing.assert_allclose(computed(folder, tmp_path / "c"), logits(folder, TOKENS), rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rotary_scaling(kind: str, tmp_path: Path) -> None:
    scaling = {
        "rope_type": kind,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = write_checkpoint(tmp_path / "p", width=64, feed_forward=64, dtype="F32")
    folder = write_checkpoint(
        tmp_path / "m", width=64, feed_forward=64, dtype="F32", config={"rope_scaling": scaling}
    )
    expected = logits(folder, TOKENS)
    assert np.abs(expected - logits(plain, TOKENS)).max() > 1e-2  # the scaling matters here
    np.testing.assert_allclose(computed(folder, tmp_path / "c"), expected, rtol=0, atol=2e-4)
    part = ensure_slice(folder, 1, 2, cache_dir=tmp_path / "c")
    assert ("rope_freqs.weight" in GGUFHeader.read(part.path).tensors) == (kind == "llama3")


WINDOW, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA_SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gemma2 caps": ("gemma2", 3, {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 scaling": ("gemma2", 3, {"rope_scaling": LINEAR}),
    "gemma2 kinds": ("gemma2", 4, {"layer_types": [FULL, WINDOW, WINDOW, FULL]}),
    "gemma2 windows only": ("gemma2", 4, {"layer_types": [WINDOW] * 4}),
    "gemma2 27B": ("gemma2", 46, {"head_dim": 32, "query_pre_attn_scalar": 16}),
    "gemma3 cap": ("gemma3", 7, {"final_logit_softcapping": 3.0}),
    "gemma3 base": ("gemma3", 7, {"rope_local_base_freq": 100.0}),
    "gemma3 scaling": ("gemma3", 7, {"rope_scaling": LINEAR}),
    "gemma3 of transformers 5": (
        "gemma3",
        7,
        {"rope_parameters": {FULL: {**LINEAR, "rope_theta": 5e3}, WINDOW: {"rope_theta": 100.0}}},
    ),
    "gemma3 pattern": ("gemma3", 7, {"sliding_window_pattern": 3}),
    "gemma3 no windows": ("gemma3", 7, {"sliding_window_pattern": 1, "rope_scaling": LINEAR}),
    "gemma3 kinds": ("gemma3", 4, {"layer_types": [FULL, WINDOW, WINDOW, FULL]}),
    "gemma3 27B": ("gemma3", 62, {"head_dim": 32, "query_pre_attn_scalar": 16}),
}


@pytest.mark.parametrize("name", GEMMA_SETTINGS)
def test_what_gemma_configurations_ask_for(name: str, tmp_path: Path) -> None:
    family, layers, config = GEMMA_SETTINGS[name]
    plain, folder = (
        write_checkpoint(
            tmp_path / place,
            family,
            layers=layers,
            width=64,
            kv_heads=2,
            head_dim=settings.get("head_dim"),
            feed_forward=96,
            dtype="F32",
            scale=0.2,
            config=settings,
        )
        for place, settings in (("p", {}), ("m", config))
    )
    expected = logits(folder, TOKENS)
    assert np.abs(expected - logits(plain, TOKENS)).max() > 0.1  # the setting matters here
    np.testing.assert_allclose(computed(folder, tmp_path / "c"), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_what_a_gemma_configuration_leaves_out(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m",
        family,
        layers=7,
        width=128,
        head_dim=256,
        heads=8,
        kv_heads=4,
        feed_forward=64,
        dtype="F32",
    )
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "attention.head_count": ("num_attention_heads", 8),
        "attention.head_count_kv": ("num_key_value_heads", 4),
        "attention.key_length": ("head_dim", 256),
        "attention.sliding_window": ("sliding_window", 4096),
        "context_length": ("max_position_embeddings", 8192 if family == "gemma2" else 131072),
    }
    before = logits(folder, TOKENS)
    left_out = {
        "rms_norm_eps",
        "rope_theta",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        *(key for key, _ in expected.values()),
    }
    smaller = {key: value for key, value in config.items() if key not in left_out}
    (folder / "config.json").write_text(json.dumps(smaller))
    header = GGUFHeader.read(header_path(folder, cache_dir=tmp_path / "c"))
    for name, (_, value) in expected.items():
        assert header.value(f"{family}.{name}") == value
    (tmp_path / "full").mkdir()
    for file in folder.iterdir():
        (tmp_path / "full" / file.name).write_bytes(file.read_bytes())
    wide = config | {"sliding_window": 4096, "rms_norm_eps": 1e-6}
    (tmp_path / "full" / "config.json").write_text(json.dumps(wide))
    expected_logits = logits(tmp_path / "full", TOKENS)
    assert np.abs(expected_logits - before).max() > 1e-2  # the window matters here
    np.testing.assert_allclose(computed(folder, tmp_path / "c"), expected_logits, rtol=0, atol=2e-2)
