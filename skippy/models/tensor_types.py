"""How ggml stores values: its types and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
from gguf import GGML_QUANT_SIZES


@attrs.frozen(slots=True)
class TensorType:
    """How values are stored: ``block`` of them in ``nbytes``."""

    name: str
    block: int
    nbytes: int


TYPES: Mapping[int, TensorType] = {
    **{int(kind): TensorType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()},
    42: TensorType("Q2_0", 64, 2 + 64 // 4),  # ggml's, not yet in the gguf package
}
"""ggml's types by number."""


def tensor_bytes(type_id: int, dims: tuple[int, ...]) -> int:
    """Bytes of a tensor: ``elements / block * bytes_per_block``.

    Raises:
        ValueError: unknown type, or rows that are not whole blocks.
    """
    kind = TYPES.get(type_id)
    if kind is None:
        raise ValueError(f"unknown ggml type {type_id}")
    if dims[0] % kind.block:
        raise ValueError(f"rows of {dims[0]} values are not whole blocks of {kind.block}")
    return math.prod(dims) // kind.block * kind.nbytes
