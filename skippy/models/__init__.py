"""What is on disk: GGUF headers, slices, families' rules, the slice cache.

Never here: trio, llama.cpp, anything that computes.
"""

from skippy.models.adapters import AdapterPart, cut_adapter, mix_adapters
from skippy.models.boundary import BoundaryPart
from skippy.models.cache import default_cache_dir, ensure_slice, header_path, weights_sha256, write_slice_of
from skippy.models.checkpoint import Quantiser, Recipe, is_checkpoint
from skippy.models.errors import (
    CheckpointError,
    CutError,
    GGUFError,
    HubError,
    LayerRangeError,
    ModelError,
    PackageError,
    SliceWriteError,
    UnsupportedArchitectureError,
    printable,
)
from skippy.models.families import FAMILIES, Family, family_of
from skippy.models.gguf import GGUFHeader, LazyArray, Metadata, TensorInfo, ValueType
from skippy.models.hub import HubReference, fetch, is_reference
from skippy.models.info import SliceInfo
from skippy.models.loading import (
    ARTIFACT_SLICE,
    LAYER_PACKAGE,
    RUNTIME_SLICE,
    check_source,
    find_part,
    load_mode_of,
    local_path,
)
from skippy.models.manifest import Manifest, is_package, wrong_model_id
from skippy.models.package import Package, read_model
from skippy.models.packing import write_package
from skippy.models.parts import read_gguf
from skippy.models.plan import RULES_VERSION, SlicePlan, plan_slice, possible_cuts, slice_bytes
from skippy.models.slicer import file_sha256, write_slice
from skippy.models.store import Progress
from skippy.models.summary import ModelSummary, inspect_model

__all__ = [
    "ARTIFACT_SLICE",
    "FAMILIES",
    "LAYER_PACKAGE",
    "RULES_VERSION",
    "RUNTIME_SLICE",
    "AdapterPart",
    "BoundaryPart",
    "CheckpointError",
    "CutError",
    "Family",
    "GGUFError",
    "GGUFHeader",
    "HubError",
    "HubReference",
    "LayerRangeError",
    "LazyArray",
    "Manifest",
    "Metadata",
    "ModelError",
    "ModelSummary",
    "Package",
    "PackageError",
    "Progress",
    "Quantiser",
    "Recipe",
    "SliceInfo",
    "SlicePlan",
    "SliceWriteError",
    "TensorInfo",
    "UnsupportedArchitectureError",
    "ValueType",
    "check_source",
    "cut_adapter",
    "default_cache_dir",
    "ensure_slice",
    "family_of",
    "fetch",
    "file_sha256",
    "find_part",
    "header_path",
    "inspect_model",
    "is_checkpoint",
    "is_package",
    "is_reference",
    "load_mode_of",
    "local_path",
    "mix_adapters",
    "plan_slice",
    "possible_cuts",
    "printable",
    "read_gguf",
    "read_model",
    "slice_bytes",
    "weights_sha256",
    "write_package",
    "write_slice",
    "write_slice_of",
    "wrong_model_id",
]
