"""Small random models of every architecture that a split was tried with, of any depth.

The weights are noise, so the text is noise too; what such a model is for is comparing a split run with the
unsplit one: an error of slicing shows as a difference of 1e-4 or more, and a right split gives none.

``tiny.json`` beside this file holds what llama.cpp expects of each: metadata that all share, what differs by
family, and parts of layers (tensor names by shape). A layer is a mixer (attention or a recurrence) and a
feed-forward part; ``mixers`` and ``ffns`` repeat down the model, as do metadata arrays with an entry per
layer.
Where leading layers are dense, the second feed-forward part is that of all layers behind them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter

_LAYERS = 6
_WHOLE = ("rope.dimension_sections", "ple.")
"""Arrays that are not per layer begin like this."""


@functools.cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("tiny.json").read_text())
    return data


def tiny_models() -> tuple[str, ...]:
    """What :func:`write_tiny_model` makes: names of architectures, some with a variant ``-moe``."""
    return tuple(_data()["families"])


def tiny_architecture(name: str) -> str:
    """``general.architecture`` of one of :func:`tiny_models`."""
    architecture: str = _data()["families"][name].get("architecture", name)
    return architecture


def tiny_layers(name: str) -> int:
    """How deep the model is by default: six layers, more where a pattern repeats more slowly."""
    layers: int = _data()["families"][name].get("layers", _LAYERS)
    return layers


def write_tiny_model(
    path: str | os.PathLike[str],
    name: str,
    layers: int | None = None,
    *,
    seed: int = 0,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    tied: bool = False,
) -> Path:
    """Write a random model; the same arguments give the same file.

    Args:
        path: the file, overwritten.
        name: one of :func:`tiny_models`.
        layers: its depth, by default :func:`tiny_layers`.
        seed: of the weights.
        metadata: replaces or adds keys under the architecture's prefix; None leaves a key out. A list with
            fewer entries than layers repeats.
        tensors: adds tensors by name and shape (contiguous size first); None leaves one out.
        tied: without an output matrix of its own.
    """
    family = _data()["families"][name]
    layers = tiny_layers(name) if layers is None else layers
    values = {**_data()["metadata"], **family["metadata"], **(metadata or {})}
    vocabulary = family.get("vocabulary", 128)
    writer = GGUFWriter(os.fspath(path), tiny_architecture(name))
    prefix = writer.arch
    _add(writer, f"{prefix}.block_count", layers)
    _add(writer, f"{prefix}.vocab_size", vocabulary)
    for key, value in values.items():
        if value is not None:
            _add(writer, f"{prefix}.{key}", _deepened(key, value, layers), _data()["types"].get(key))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"tok{index}" for index in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["t o"])
    generator = np.random.default_rng([seed, *name.encode()])
    shapes = dict(_tensors(family, layers, values.get("leading_dense_block_count", 0)))
    for tensor, shape in {**shapes, **(tensors or {}), **({"output.weight": None} if tied else {})}.items():
        if shape is not None:
            writer.add_tensor(tensor, _weights(generator, tensor, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _deepened(key: str, value: object, layers: int) -> object:
    if not isinstance(value, list) or key.startswith(_WHOLE):
        return value
    return [value[index % len(value)] for index in range(layers)]


def _add(writer: GGUFWriter, key: str, value: Any, kind: str | None = None) -> None:
    if isinstance(value, dict):  # a type that the value itself does not show
        value, kind = value["value"], value["type"]
    if kind is None:
        sample: object = value[0] if isinstance(value, list) else value
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(sample)]
    if isinstance(value, list):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType[kind])
    else:
        writer.add_key_value(key, value, GGUFValueType[kind])


def _tensors(family: Mapping[str, Any], layers: int, dense: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixers, ffns = family["mixers"], family["ffns"]
    yield from _part(family["other"], "")
    lookups = family["metadata"].get("ple.layers", range(layers))
    for layer in range(layers):
        block = f"blk.{layer}."
        for name, shape in _part(mixers[layer % len(mixers)], block):
            if layer in lookups or ".ple_" not in name:
                yield name, shape
        if dense and len(ffns) > 1:
            yield from _part(ffns[0 if layer < dense else 1], block)
        else:
            yield from _part(ffns[layer % len(ffns)], block)


def _part(index: int, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    part: Mapping[str, str] = _data()["parts"][index]
    for shape, names in part.items():
        for name in names.split():
            yield block + name, tuple(map(int, shape.split()))


def _weights(generator: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    data = generator.standard_normal(shape[::-1], dtype=np.float32) * np.float32(0.1)
    if "ssm_a" in name:
        return np.asarray(-np.abs(data))  # a decay
    if "norm" in name and name.endswith("weight"):
        data += 1
    return data
