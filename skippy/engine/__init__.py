"""What computes: the engine interface and its implementations.

Here live :class:`StageEngine`, the llama.cpp engine (the only importer of ``llama_cpp``), the exact toy
engine for tests and simulation, and the boundary tap. Import the interface from here and engines by their
module. Never here: trio, sockets, anything about connections or HTTP.
"""

from .base import (
    ContextFullError,
    EngineError,
    EngineInfo,
    FloatArray,
    ModelLoadError,
    Pooling,
    Sampler,
    Segment,
    StageEngine,
    StateBytes,
    Vocabulary,
)
from .options import CACHE_TYPES, MAX_SEQUENCES, EngineOptions, usable_cores

__all__ = [
    "CACHE_TYPES",
    "MAX_SEQUENCES",
    "ContextFullError",
    "EngineError",
    "EngineInfo",
    "EngineOptions",
    "FloatArray",
    "ModelLoadError",
    "Pooling",
    "Sampler",
    "Segment",
    "StageEngine",
    "StateBytes",
    "Vocabulary",
    "usable_cores",
]
