"""What is on disk: GGUF headers, slices, families' rules, the slice cache.

Never here: trio, llama.cpp, anything that computes.
"""

from skippy.models.boundary import BoundaryPart
from skippy.models.cache import default_cache_dir, ensure_slice, header_path, weights_sha256
from skippy.models.checkpoint import Quantiser, Recipe, is_checkpoint
from skippy.models.errors import (
    CheckpointError,
    CutError,
    GGUFError,
    LayerRangeError,
    ModelError,
    SliceWriteError,
    UnsupportedArchitectureError,
)
from skippy.models.families import FAMILIES, Family, family_of
from skippy.models.gguf import GGUFHeader, LazyArray, Metadata, TensorInfo, ValueType
from skippy.models.info import ModelSummary, SliceInfo, inspect_model
from skippy.models.parts import read_gguf
from skippy.models.plan import RULES_VERSION, SlicePlan, plan_slice, slice_bytes
from skippy.models.slicer import Progress, file_sha256, write_slice

__all__ = [
    "FAMILIES",
    "RULES_VERSION",
    "BoundaryPart",
    "CheckpointError",
    "CutError",
    "Family",
    "GGUFError",
    "GGUFHeader",
    "LayerRangeError",
    "LazyArray",
    "Metadata",
    "ModelError",
    "ModelSummary",
    "Progress",
    "Quantiser",
    "Recipe",
    "SliceInfo",
    "SlicePlan",
    "SliceWriteError",
    "TensorInfo",
    "UnsupportedArchitectureError",
    "ValueType",
    "default_cache_dir",
    "ensure_slice",
    "family_of",
    "file_sha256",
    "header_path",
    "inspect_model",
    "is_checkpoint",
    "plan_slice",
    "read_gguf",
    "slice_bytes",
    "weights_sha256",
    "write_slice",
]
