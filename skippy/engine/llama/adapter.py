"""LoRA adapters on a loaded model: added to what its matrices give, at every decode."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
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


def set_adapters(context: int, adapters: Sequence[Any], scales: Sequence[float]) -> None:
    """Let a context compute with these adapters and no others. Raises ModelLoadError where it cannot.

    Two that change the same matrix are added in the reverse of this order; of three or more llama.cpp's order
    depends on where they are in memory.
    """
    count = len(adapters)
    pointers = (api.llama_adapter_lora_p_ctypes * count)(*adapters)
    if api.llama_set_adapters_lora(context, pointers, count, (ctypes.c_float * count)(*scales)):
        raise ModelLoadError("llama.cpp cannot compute with these adapters")
