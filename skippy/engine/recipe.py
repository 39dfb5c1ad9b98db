"""From the keys of a configuration to what a checkpoint becomes, with llama.cpp's quantiser."""

from __future__ import annotations

from pathlib import Path

from skippy.config.quantization import PRESERVE, parse_quantization
from skippy.models import Recipe


def checkpoint_recipe(
    quantization: str | None, imatrix: str | Path | None = None, imatrix_sha256: str | None = None
) -> Recipe | None:
    """What a checkpoint becomes, by the keys of the configuration; None where all are null.

    Raises:
        ConfigError: the quantisation is unknown.
    """
    if quantization is None and imatrix is None:
        return None
    name = parse_quantization(quantization or PRESERVE)
    if name == PRESERVE:
        return Recipe(imatrix=None if imatrix is None else Path(imatrix))
    # Imported here: only quantising needs llama.cpp.
    from skippy.engine.llama.quantise import LlamaQuantiser

    return Recipe(name, None if imatrix is None else Path(imatrix), imatrix_sha256, LlamaQuantiser())
