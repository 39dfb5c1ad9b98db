"""A LoRA adapter on a loaded model: added to what its matrices give, at every decode."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from skippy.engine.base import ModelLoadError

from .native import api, reported_errors, silenced


def load_adapter(model: int, path: Path) -> Any:
    """Read an adapter. Returns llama.cpp's pointer, good for as long as the model.

    Raises:
        ModelLoadError: with llama.cpp's own words.
    """
    with silenced(), reported_errors() as errors:  # it warns of every matrix that is kept out of repacking
        adapter = api.llama_adapter_lora_init(model, os.fsencode(path))
    if not adapter:
        raise ModelLoadError(f"{path} could not be loaded: {'; '.join(errors) or 'no reason given'}")
    return adapter


def set_adapter(context: int, adapter: Any, scale: float) -> None:
    """Let a context compute with an adapter. Raises ModelLoadError where it cannot."""
    adapters = (api.llama_adapter_lora_p_ctypes * 1)(adapter)
    if api.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(scale)):
        raise ModelLoadError("llama.cpp cannot compute with this adapter")
