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
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from gguf import GGUFValueType, GGUFWriter

_LAYERS = 6
_WHOLE = ("rope.dimension_sections", "ple.")
"""Arrays that are not per layer begin like this."""


Value = tuple[Any, GGUFValueType]
"""A scalar, or a list, and the type of it or of its elements."""


@functools.cache
def tiny_data() -> Mapping[str, Any]:
    """What ``tiny.json`` holds."""
    data: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("tiny.json").read_text())
    return data


@attrs.frozen(slots=True, kw_only=True, eq=False)
class TinyModel:
    """A small random model, to be written.

    Attributes:
        architecture: ``general.architecture``.
        vocabulary: tokens; the tokenizer is of no use but for their number.
        metadata: under the architecture's prefix, by name without it.
        tensors: shapes, contiguous size first.
        seed: of the weights.
    """

    architecture: str
    vocabulary: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, tuple[int, ...]]
    seed: tuple[int, ...] = (0,)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return 4 * sum(map(math.prod, self.tensors.values()))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write it; the same model gives the same file."""
        writer = GGUFWriter(os.fspath(path), self.architecture)
        for key, (value, kind) in self.metadata.items():
            if isinstance(value, list):
                writer.add_key_value(f"{writer.arch}.{key}", value, GGUFValueType.ARRAY, kind)
            else:
                writer.add_key_value(f"{writer.arch}.{key}", value, kind)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"tok{index}" for index in range(self.vocabulary)])
        writer.add_token_types([1] * self.vocabulary)
        writer.add_token_merges(["t o"])
        generator = np.random.default_rng(self.seed)
        for name, shape in self.tensors.items():
            writer.add_tensor(name, _weights(generator, name, shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Path(path)

    def describe(self) -> list[Any]:
        """All that decides what the file is, as JSON can hold it."""
        values = [[key, value, int(kind)] for key, (value, kind) in self.metadata.items()]
        return [self.architecture, self.vocabulary, values, list(self.tensors.items()), self.seed]


def tiny_models() -> tuple[str, ...]:
    """What :func:`write_tiny_model` makes: names of architectures, some with a variant ``-moe``."""
    return tuple(tiny_data()["families"])


def tiny_architecture(name: str) -> str:
    """``general.architecture`` of one of :func:`tiny_models`."""
    architecture: str = tiny_data()["families"][name].get("architecture", name)
    return architecture


def tiny_layers(name: str) -> int:
    """How deep the model is by default: six layers, more where a pattern repeats more slowly."""
    layers: int = tiny_data()["families"][name].get("layers", _LAYERS)
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
    family = tiny_data()["families"][name]
    layers = tiny_layers(name) if layers is None else layers
    values = {**tiny_data()["metadata"], **family["metadata"], **(metadata or {})}
    architecture, vocabulary = tiny_architecture(name), family.get("vocabulary", 128)
    entries = {"block_count": _typed(layers), "vocab_size": _typed(vocabulary)}
    for key, value in values.items():
        if value is not None:
            entries[key] = _typed(_deepened(key, value, layers), tiny_data()["types"].get(key))
    shapes = dict(_tensors(family, layers, values.get("leading_dense_block_count", 0)))
    shapes_of_all = {**shapes, **(tensors or {}), **({"output.weight": None} if tied else {})}
    model = TinyModel(
        architecture=architecture,
        vocabulary=vocabulary,
        metadata=entries,
        tensors={tensor: shape for tensor, shape in shapes_of_all.items() if shape is not None},
        seed=(seed, *name.encode()),
    )
    return model.write(path)


def _deepened(key: str, value: object, layers: int) -> object:
    if not isinstance(value, list) or key.startswith(_WHOLE):
        return value
    return [value[index % len(value)] for index in range(layers)]


def _typed(value: Any, kind: str | None = None) -> Value:
    if isinstance(value, dict):  # a type that the value itself does not show
        value, kind = value["value"], value["type"]
    if kind is None:
        sample: object = value[0] if isinstance(value, list) else value
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(sample)]
    return value, GGUFValueType[kind]


def _tensors(family: Mapping[str, Any], layers: int, dense: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixers, ffns = family["mixers"], family["ffns"]
    yield from tiny_part(family["other"], "")
    lookups = family["metadata"].get("ple.layers", range(layers))
    for layer in range(layers):
        block = f"blk.{layer}."
        for name, shape in tiny_part(mixers[layer % len(mixers)], block):
            if layer in lookups or ".ple_" not in name:
                yield name, shape
        if dense and len(ffns) > 1:
            yield from tiny_part(ffns[0 if layer < dense else 1], block)
        else:
            yield from tiny_part(ffns[layer % len(ffns)], block)


def tiny_part(index: int, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    part: Mapping[str, str] = tiny_data()["parts"][index]
    for shape, names in part.items():
        for name in names.split():
            yield block + name, tuple(map(int, shape.split()))


def _weights(generator: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    if "tid2eid" in name:  # experts by token id
        return np.asarray(generator.integers(0, 2, shape[::-1], dtype=np.int32))
    data = generator.standard_normal(shape[::-1], dtype=np.float32) * np.float32(0.1)
    if "ssm_a" in name:
        return np.asarray(-np.abs(data))  # a decay
    if "norm" in name and name.endswith("weight"):
        data += 1
    return data
