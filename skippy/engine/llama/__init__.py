"""Stages on stock llama.cpp, through llama-cpp-python's low-level API. The only importer of ``llama_cpp``."""

from .engine import LlamaEngine

__all__ = ["LlamaEngine"]
