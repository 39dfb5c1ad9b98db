"""LoRA adapters as llama.cpp's converter writes them, of random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from skippy.models import GGUFHeader


def write_adapter(
    path: Path,
    model: Path,
    names: Iterable[str],
    *,
    rank: int = 4,
    kind: Any = np.float16,
    **metadata: object,
) -> Path:
    """A random adapter for matrices of a model; ``metadata`` replaces what is said about it."""
    header = GGUFHeader.read(model)
    facts = {"general_type": "adapter", "adapter_type": "lora", "arch": header.text("general.architecture")}
    facts |= metadata  # type: ignore[arg-type]
    out = GGUFWriter(path, facts["arch"])
    out.add_string("general.type", facts["general_type"])
    out.add_string("adapter.type", facts["adapter_type"])
    out.add_float32("adapter.lora.alpha", 8.0)
    generator = np.random.default_rng(5)
    for name in names:
        width, height = header.tensors[name].dims
        out.add_tensor(f"{name}.lora_a", generator.normal(0, 0.1, (rank, width)).astype(np.float32))
        out.add_tensor(f"{name}.lora_b", generator.normal(0, 0.1, (height, rank)).astype(kind))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
