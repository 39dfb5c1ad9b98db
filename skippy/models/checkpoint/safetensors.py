"""A bounded reader of SafeTensors headers; tensor data is read in ranges, by whoever needs it.

Format: https://github.com/huggingface/safetensors#format. Eight bytes of length, a JSON object with type,
shape and place of every tensor, and the data, which the tensors cover without holes or overlaps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs

from skippy.models.errors import CheckpointError, show
from skippy.models.reading import FileStamp, open_regular
from skippy.models.texts import parse_object

MAX_HEADER: Final = 16 << 20  # bytes; shards with 10 000 tensors have some 2 million
MAX_TENSORS: Final = 1 << 17  # in a checkpoint; the largest real ones (experts stored apart) have some 90 000
MAX_NAME: Final = 512  # characters
MAX_DIMENSIONS: Final = 8

WIDTHS: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes per value of the format's types."""


@attrs.frozen(slots=True)
class StoredTensor:
    """Where a tensor of a checkpoint is and how it is stored.

    Attributes:
        name: as in the file.
        dtype: a key of :data:`WIDTHS`.
        shape: sizes, the contiguous one last (PyTorch's order).
        offset: file offset of the data (absolute).
        nbytes: bytes of the data.
        file: the file that has it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: FileStamp

    def fail(self, message: str) -> NoReturn:
        """Raise CheckpointError about this tensor."""
        raise CheckpointError(self.file.path, f"tensor {show(self.name)} {message}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one SafeTensors file, by name.

    Memory and time grow with the header's bytes, which are limited; tensor data is not read.

    Raises:
        CheckpointError: truncated, damaged, or beyond the limits; says where and why.
        GGUFError: the file is missing or not a regular one.
    """
    fd = open_regular(path)
    try:
        stamp = FileStamp.of(path, os.fstat(fd))
        start, text = _header_text(stamp, fd)
    finally:
        os.close(fd)
    entries = parse_object(path, text, "the header", CheckpointError)
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(path, f"the header lists {len(entries)} tensors, the limit is {MAX_TENSORS}")
    tensors = {name: _tensor(stamp, start, name, entry) for name, entry in entries.items()}
    _check_cover(stamp, start, tensors)
    return tensors


def _header_text(stamp: FileStamp, fd: int) -> tuple[int, bytes]:
    """File offset of the data, and the header's JSON."""
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise CheckpointError(stamp.path, f"truncated: it has {stamp.size} bytes, its length alone takes 8")
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":
        raise CheckpointError(
            stamp.path, "not SafeTensors; it looks like a Git LFS pointer, fetch the real file"
        )
    if length > MAX_HEADER:
        raise CheckpointError(
            stamp.path, f"damaged: claims a header of {length} bytes, the limit is {MAX_HEADER}"
        )
    if length > stamp.size - 8:
        raise CheckpointError(
            stamp.path, f"truncated: claims a header of {length} bytes, has {stamp.size - 8}"
        )
    text = os.pread(fd, length, 8)
    if len(text) < length:
        raise CheckpointError(stamp.path, "truncated while its header was read")
    return 8 + length, text


def _tensor(stamp: FileStamp, start: int, name: str, entry: Any) -> StoredTensor:
    def fail(message: str) -> NoReturn:
        raise CheckpointError(stamp.path, f"damaged: tensor {show(name)} {message}")

    if not name or len(name) > MAX_NAME:
        fail(f"has a name of {len(name)} characters, expected 1 to {MAX_NAME}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        fail("needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        fail(f"has the unknown type {show(str(dtype))}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        fail(f"has an impossible shape; expected up to {MAX_DIMENSIONS} counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail("has impossible data_offsets; expected [BEGIN, END]")
    size = math.prod(shape) * WIDTHS[dtype]
    begin, end = offsets
    if end - begin != size:
        fail(f"has {end - begin} bytes of data, its type and shape make {size}")
    if start + end > stamp.size:
        raise CheckpointError(
            stamp.path,
            f"truncated: tensor {show(name)} ends at byte {start + end}, the file has {stamp.size}",
        )
    return StoredTensor(name, dtype, tuple(shape), start + begin, size, stamp)


def _counts(value: Any) -> bool:
    """Whether it is a list of integers that can be counts."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(stamp: FileStamp, start: int, tensors: Mapping[str, StoredTensor]) -> None:
    """The tensors must cover the data exactly."""
    position, before = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            how = "overlaps" if tensor.offset < position else "leaves a gap behind"
            raise CheckpointError(stamp.path, f"damaged: tensor {show(tensor.name)} {how} {before}")
        position, before = tensor.offset + tensor.nbytes, f"tensor {show(tensor.name)}"
    if position != stamp.size:
        raise CheckpointError(
            stamp.path, f"damaged: {stamp.size - position} bytes behind {before} belong to no tensor"
        )
