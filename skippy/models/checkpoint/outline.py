"""The GGUF that a checkpoint would be, without its data: every type decided, every tensor a hole.

llama.cpp decides the type of a quantised tensor by names, widths and the sizes of the whole model, and by how
many tensors of its kind came before. Instead of knowing these rules, the outline asks: a model of the same
names, widths and sizes with two rows in each matrix goes through llama.cpp's quantiser, and what comes out
says the types. That takes milliseconds for each hundred tensors, and is right for whatever that version does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFValueType, GGUFWriter, LlamaFileType

from skippy.config.quantization import PRESERVE
from skippy.models.errors import CheckpointError, show
from skippy.models.gguf import GGUFHeader
from skippy.models.tensor_types import tensor_bytes

from .imatrix import ImportanceMatrix
from .quantising import Quantiser
from .tensors import F32, ConvertedTensor, Floats
from .vocabulary import Metadata

_ROWS: Final = 2
"""Of each matrix of the sample; one would make it a vector, which is never quantised."""
_FILE_TYPES: Final = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
}


def decide_types(
    architecture: str,
    settings: Metadata,
    tensors: Mapping[str, ConvertedTensor],
    quantization: str,
    quantiser: Quantiser | None,
    importance: ImportanceMatrix | None,
) -> tuple[dict[str, int], int]:
    """The ggml type of each tensor, and the number of the file type.

    Raises:
        ModelError: the quantisation is not possible, say because the importance matrix lacks a tensor.
    """
    if quantization == PRESERVE:
        types = {name: int(tensor.type) for name, tensor in tensors.items()}
        return types, int(_FILE_TYPES[tensors["token_embd.weight"].type.name])
    assert quantiser is not None, "only preserve needs none"
    with tempfile.TemporaryDirectory(prefix="skippy-") as folder:
        source, target = Path(folder, "sample.gguf"), Path(folder, "quantised.gguf")
        sample = {name: _sample(tensor) for name, tensor in tensors.items()}
        _write_sample(source, architecture, settings, tensors, sample)
        quantiser.quantise_file(source, target, quantization, _presence(tensors, sample, importance))
        header = GGUFHeader.read(target)
    return {name: header.tensors[name].type for name in tensors}, header.count("general.file_type")


def _sample(tensor: ConvertedTensor) -> tuple[int, ...]:
    """The dimensions of a tensor in the sample."""
    return (*tensor.dims[:1], *(_ROWS for _ in tensor.dims[1:]))


def _presence(
    tensors: Mapping[str, ConvertedTensor],
    sample: Mapping[str, tuple[int, ...]],
    importance: ImportanceMatrix | None,
) -> dict[str, Floats]:
    """An importance of 1 for what the file has entries for. Sizes must fit, but for the embedding's."""
    if importance is None:
        return {}
    out = {"": np.ones(1, np.float32)}  # so that there is a matrix even if no entry fits
    for name, tensor in tensors.items():
        entry = importance.entries.get(name)
        if entry is None:
            continue
        wanted = tensor.dims[0] * (tensor.dims[2] if len(tensor.dims) > 2 else 1)
        if entry.size == wanted:
            dims = sample[name]
            out[name] = np.ones(dims[0] * (dims[2] if len(dims) > 2 else 1), np.float32)
        elif name != "token_embd.weight":
            raise CheckpointError(
                importance.stamp.path,
                f"has {entry.size} values for {show(name)}, the checkpoint's tensor has {wanted} inputs",
            )
    return out


def _write_sample(
    path: Path,
    architecture: str,
    settings: Metadata,
    tensors: Mapping[str, ConvertedTensor],
    sample: Mapping[str, tuple[int, ...]],
) -> None:
    out = GGUFWriter(os.fspath(path), architecture)
    add_metadata(out, settings)
    for name, tensor in tensors.items():
        data: Any = np.zeros(sample[name][::-1], np.float32 if tensor.type == F32 else np.uint16)
        out.add_tensor_info(name, data.shape, np.dtype(np.float32), data.nbytes, tensor.type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    out.close()
    size = sum(_padded(tensor_bytes(int(tensor.type), sample[name])) for name, tensor in tensors.items())
    _extend(path, size)


def write_outline(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Mapping[str, ConvertedTensor],
    types: Mapping[str, int],
    file_type: int,
) -> None:
    """Write the whole model's header, followed by a hole as large as its data."""
    out = GGUFWriter(os.fspath(path), architecture)
    add_metadata(out, metadata)
    out.add_quantization_version(GGML_QUANT_VERSION)
    out.add_file_type(file_type)
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor_bytes(types[name], tensor.dims)
        out.add_tensor_info(name, tensor.dims[::-1], np.dtype(np.float32), nbytes, cast(Any, types[name]))
        size += _padded(nbytes)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    out.close()
    _extend(path, size)


def add_metadata(out: GGUFWriter, metadata: Metadata) -> None:
    """Add every key, but empty arrays, which the format's writer refuses."""
    for key, (kind, value) in metadata.items():
        if not isinstance(value, list):
            out.add_key_value(key, value, kind)
        elif value:
            out.add_key_value(key, value, GGUFValueType.ARRAY, kind)


def _padded(size: int) -> int:
    return size + -size % 32


def _extend(path: Path, size: int) -> None:
    """Let the header's end be aligned and followed by ``size`` zero bytes, as a hole."""
    os.truncate(path, _padded(path.stat().st_size) + size)
