"""Metadata of another type than a model's family has: refused, or copied as it is, never a crash."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from skippy.models import (
    GGUFError,
    GGUFHeader,
    LazyArray,
    Metadata,
    ModelError,
    SliceInfo,
    ValueType,
    plan_slice,
    possible_cuts,
)
from skippy.models.gguf import SCALARS, Scalar
from skippy.models.metadata import text_bytes
from skippy.models.reading import FileStamp
from skippy.models.tiny import write_tiny_model

FAMILIES = ("llama", "gemma3", "jamba", "lfm2", "minicpm", "glm-dsa", "qwen3vl", "deepseek4")
LAYERS = 4
LENGTHS = (0, 1, LAYERS, 9)
ARRAYS: dict[ValueType, tuple[Scalar, ...]] = {
    ValueType.STRING: ("", "x"),
    ValueType.FLOAT32: (0.0, float("nan")),
    ValueType.FLOAT64: (1e300,),
    ValueType.INT32: (-1,),
    ValueType.INT64: (-(1 << 63),),
    ValueType.UINT8: (3,),
    ValueType.UINT32: (0, 1, 2**32 - 1),
    ValueType.UINT64: (2**64 - 1,),
    ValueType.BOOL: (False, True),
}
ARRAY_FILE = tempfile.NamedTemporaryFile()  # noqa: SIM115  # gone when the tests are


@functools.cache
def families() -> dict[str, GGUFHeader]:
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name in FAMILIES:
            paths[name] = write_tiny_model(Path(folder, name), name, layers=LAYERS)
        return {name: GGUFHeader.read(path) for name, path in paths.items()}


@functools.cache
def values() -> list[Metadata]:
    """Of every type; arrays are in a file of their own."""
    blob = bytearray()
    places: list[tuple[ValueType, int, int, int]] = []
    found: list[Metadata] = []
    for kind, elements in ARRAYS.items():
        for element in elements:
            data = text_bytes(element) if isinstance(element, str) else SCALARS[kind].pack(element)
            found.append(Metadata("", kind, element, 0, 0))
            for length in LENGTHS:
                places.append((kind, length, len(blob), length * len(data)))
                blob += length * data
    ARRAY_FILE.write(blob)
    ARRAY_FILE.flush()
    stamp = FileStamp.of(Path(ARRAY_FILE.name), os.fstat(ARRAY_FILE.fileno()))
    arrays = [LazyArray(*place, stamp) for place in places]
    return found + [Metadata("", ValueType.ARRAY, array, 0, 0) for array in arrays]


def changed(header: GGUFHeader, key: str, value: Metadata) -> GGUFHeader:
    entry = attrs.evolve(value, key=key)
    return attrs.evolve(header, metadata={**header.metadata, key: entry})


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_key_of_any_type(data: st.DataObject) -> None:
    header = families()[data.draw(st.sampled_from(sorted(families())))]
    value = data.draw(st.sampled_from(values()))
    header = changed(header, data.draw(st.sampled_from(sorted(header.metadata))), value)
    for what in (SliceInfo.from_header, possible_cuts):
        with contextlib.suppress(ModelError):
            what(header)
    for start, end in ((0, 2), (1, 3), (2, LAYERS)):
        with contextlib.suppress(ModelError):
            assert plan_slice(header, start, end).file_bytes > 0


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("attention.head_count", ValueType.STRING, "attention.head_count' is an array of STRING, not of int"),
        (
            "attention.head_count",
            ValueType.FLOAT32,
            "attention.head_count' is an array of FLOAT32, not of int",
        ),
        (
            "n_deepstack_layers",
            ValueType.UINT32,
            "n_deepstack_layers' is ARRAY, expected a non-negative integer",
        ),
    ],
)
def test_arrays_that_are_none(key: str, kind: ValueType, message: str) -> None:
    value = next(v for v in values() if isinstance(v.value, LazyArray) and v.value.element_type is kind)
    with pytest.raises(GGUFError, match=message):
        plan_slice(changed(families()["llama"], f"llama.{key}", value), 0, 2)
