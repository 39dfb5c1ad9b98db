"""What a converted checkpoint computes is what its own conventions say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFHeader, ensure_slice
from tests.support.checkpoints import FAMILIES, write_checkpoint
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
    engine = LlamaEngine.load(ensure_slice(folder, 0, 3, cache_dir=cache), OPTIONS)
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
        width=64,
        kv_heads=2,
        feed_forward=96,
        dtype="F32",
        tied=family == "gemma",
        shards=2,
    )
    near = 2e-3 if family == "gemma" else 2e-4  # ggml looks GELU up in a table of F16
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
