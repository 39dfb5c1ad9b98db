"""Diffusion models are cut like others, though nothing here serves them: they keep no cache of positions.

All rows of a text are computed at once, each looking at all others.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.engine import FloatArray, ModelLoadError, Segment
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.batch import NativeBatch
from skippy.engine.llama.boundary import tap_points
from skippy.engine.llama.native import api, ggml_functions, initialise
from skippy.engine.tap import create_tap
from skippy.models import FAMILIES, GGUFHeader, SliceInfo, write_slice
from skippy.models.tiny import write_tiny_model

ROWS = 40
VOCABULARY = 128
DIFFUSION = sorted(name for name, family in FAMILIES.items() if not family.generates)


@contextmanager
def opened(info: SliceInfo) -> Iterator[tuple[Any, Any]]:
    """A context, and the tap of its boundary."""
    initialise()
    model = api.llama_model_load_from_file(str(info.path).encode(), api.llama_model_default_params())
    assert model
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_threads = params.n_threads_batch = 1
    tap = None if info.is_last else create_tap(ggml_functions(), tap_points(info))
    if tap is not None:
        params.cb_eval = ctypes.cast(tap.callback, type(params.cb_eval))
        params.cb_eval_user_data = tap.user_data
    context = api.llama_init_from_model(model, params)
    assert context
    try:
        yield context, tap
    finally:
        api.llama_free(context)
        api.llama_model_free(model)


def run(info: SliceInfo, tokens: list[int], rows: FloatArray | None) -> FloatArray:
    """The boundary of a slice, or the logits of all rows."""
    width = 0 if info.is_first else info.input_width
    batch = NativeBatch(rows=ROWS, width=width, position_sections=1, all_outputs=info.is_last)
    with opened(info) as (context, tap):
        if rows is None:
            native = batch.of_tokens([Segment(0, 0, ROWS, tokens=tokens)], [np.array(tokens, np.int32)])
        else:
            native = batch.of_activations([Segment(0, 0, ROWS, activation=memoryview(rows).cast("B"))])
        found = np.empty((ROWS, info.output_width or VOCABULARY), np.float32)
        if tap is not None:
            tap.arm(0, found.ctypes.data, found.nbytes)
        assert api.llama_decode(context, native) == 0
        if tap is not None:
            tap.finish()
        else:
            ctypes.memmove(found.ctypes.data, api.llama_get_logits(context), found.nbytes)
    return found


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_chain_gives_the_bits_of_the_unsplit_model(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model.gguf", name)
    header = GGUFHeader.read(model)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, ROWS).tolist()
    expected = run(SliceInfo.from_header(header), tokens, None)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0.1
    pieces: dict[tuple[int, int], SliceInfo] = {}
    for cuts in [(cut,) for cut in range(1, 6)] + [(cut, cut + 1) for cut in range(1, 5)]:
        rows = None
        for part in itertools.pairwise((0, *cuts, 6)):
            if part not in pieces:
                path = tmp_path / "{}-{}.gguf".format(*part)
                pieces[part] = write_slice(header, path, *part, source_sha256="0" * 64)
            rows = run(pieces[part], tokens, rows)
        assert rows is not None
        assert rows.tobytes() == expected.tobytes(), cuts


def test_such_a_model_is_not_served(tmp_path: Path) -> None:
    assert DIFFUSION == ["dream", "llada", "llada-moe", "rnd1"]
    info = SliceInfo.from_file(write_tiny_model(tmp_path / "model.gguf", "dream"))
    with pytest.raises(ModelLoadError, match="does not generate text token by token"):
        LlamaEngine.load(info)
