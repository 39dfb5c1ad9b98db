"""Models in several files, made of one as ``llama-gguf-split`` would."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from skippy.models import GGUFHeader, Metadata, ValueType
from skippy.models.layout import FilePlan, copied
from skippy.models.slicer import write_plan


def number(key: str, value: int, kind: ValueType = ValueType.UINT16) -> bytes:
    """A metadata entry of a file."""
    return (
        struct.pack("<Q", len(key))
        + key.encode()
        + struct.pack("<IH", kind, value)
        + bytes(2 if kind is ValueType.INT32 else 0)
    )


def write_gguf(
    path: Path, source: GGUFHeader, metadata: tuple[Metadata | bytes, ...], names: list[str]
) -> Path:
    """A file with these entries, and these tensors of ``source``."""
    write_plan(FilePlan(source, metadata, tuple(copied(source.tensors[name], name) for name in names)), path)
    return path


def split_model(
    model: Path, folder: Path, count: int = 3, *, changes: Mapping[int, Mapping[str, int]] | None = None
) -> list[Path]:
    """The files of a model in ``count`` parts; ``changes``: other values of split keys, by part."""
    source = GGUFHeader.read(model)
    names = list(source.tensors)
    size = -(-len(names) // count)
    paths = []
    for index in range(count):
        keys = {"no": index, "count": count, "tensors.count": len(names)}
        keys |= (changes or {}).get(index, {})
        own = tuple(
            number(f"split.{key}", value, ValueType.INT32 if key == "tensors.count" else ValueType.UINT16)
            for key, value in keys.items()
        )
        first = tuple(source.metadata.values()) if index == 0 else ()
        path = folder / f"{model.stem}-{index + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, source, (*first, *own), names[index * size : (index + 1) * size]))
    return paths
