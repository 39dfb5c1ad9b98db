"""Who can read whose state: a digest over everything that changes a stage's numbers.

State outlives the process on disk, and settings change between two starts. So every key of a stage's
configuration is either part of the identity or has nothing to do with it, and has to be in one of the two
lists below: a test fails for a new one. Names of runs, cuts and stages, and addresses, are never part of it:
they change with every start.

Whose tokens a state belongs to is not said here: that is the namespace, which separates entries of one
identity.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
import sys
from pathlib import Path
from typing import Any, Final

import attrs

import skippy
from skippy.config import StageConfig

VERSION: Final = 1
"""Of this module's rules."""
_VECTORS: Final = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")

CHANGES_NUMBERS: Final = frozenset(
    {
        "layer_start",
        "layer_end",
        "load_mode",
        "ctx_size",
        # How rows are computed: chunk sizes, devices and kernels all move the last bits.
        "n_batch",
        "n_ubatch",
        "selected_device",
        "n_gpu_layers",
        "repack",
        "no_host_buffer",
        "split_mode",
        "main_gpu",
        "op_offload",
        # What is stored, and how attention reads it.
        "cache_type_k",
        "cache_type_v",
        "flash_attn_type",
        "kv_offload",
        "kv_unified",
        "swa_full",
        "glm_dsa_policy",
        "native_mtp_enabled",
        # What the rows are made of, beside the weights.
        "checkpoint_quantization",
        "checkpoint_imatrix_sha256",
        "projector_path",
        "projector_use_gpu",
        "media_marker",
        "image_min_tokens",
        "image_max_tokens",
        "activation_codec",
        "activation_codec_policy",
        "resident_tensor_names",
    }
)
CHANGES_NOTHING: Final = frozenset(
    {
        # Names and places.
        "run_id",
        "topology_id",
        "model_id",
        "stage_id",
        "stage_index",
        "bind_addr",
        "upstream",
        "downstream",
        # Where the weights come from; their digest is part of the identity.
        "model_path",
        "package_ref",
        "manifest_sha256",
        "source_model_path",
        "source_model_sha256",
        "source_model_bytes",
        "materialized_path",
        "materialized_pinned",
        "filter_tensors_on_load",
        "checkpoint_imatrix",
        "lora_adapters",  # their digests and scales are mixed into the weights'
        # How the same bytes get into memory.
        "mmap",
        "mlock",
        "direct_io",
        "check_tensors",
        # Null leaves it to the machine; how many there are really is part of the identity.
        "n_threads",
        # How much runs at once: an entry knows for itself whether it was computed alone.
        "lane_count",
        "batch_max_tokens",
        "generation_signal_window",
        # What is kept, not what it is.
        "cache_idle_slots",
        "kv_cache",
    }
)


def stage_identity(config: StageConfig, *, weights: str, rules: str, backend: str, threads: int) -> bytes:
    """The identity of a loaded stage: equal only for stages that can read each other's state.

    Args:
        weights: SHA-256 of the whole model's file, so of its quantisation, too; 64 hex digits.
        rules: how a stage's part is made of it.
        backend: what computes, with its version.
        threads: how many the engine really runs.

    Returns:
        a SHA-256, 32 bytes.

    Raises:
        ValueError: ``weights`` is no digest.
    """
    if len(bytes.fromhex(weights)) != 32:
        raise ValueError(f"weights: {weights!r} is no SHA-256, which has 64 hex digits")
    parts: dict[str, Any] = {
        "version": VERSION,
        "program": f"skippy {skippy.__version__}",
        "weights": weights.lower(),
        "rules": rules,
        "backend": backend,
        "threads": threads,
        "machine": platform.machine(),
        "instruction_sets": instruction_sets(),
        "byte_order": sys.byteorder,
        "pointer_bits": 8 * struct.calcsize("P"),
        "config": attrs.asdict(config, filter=lambda field, _: field.name in CHANGES_NUMBERS, recurse=False),
    }
    parts["config"]["selected_device"] = config.selected_device and attrs.asdict(config.selected_device)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).digest()


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of this processor that kernels are chosen by, as Linux names them; none where nothing says so.

    A folder may be on several machines in turn, and one with wider vectors adds up in another order.
    """
    try:
        lines = cpuinfo.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted({word for word in words.split() if word.startswith(_VECTORS)})
    return []
