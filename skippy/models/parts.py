"""A model in several GGUF files, as ``llama-gguf-split`` writes it, read as one.

The files are called ``NAME-00001-of-0000N.gguf`` and so on; the first has all metadata, each has tensors of
its own, and the keys ``split.no`` (from 0), ``split.count`` and ``split.tensors.count`` say which is which.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import attrs

from skippy.models.errors import GGUFError, show
from skippy.models.gguf import MAX_TENSORS, GGUFHeader, TensorInfo

MAX_PARTS = 4096  # the largest real models have a few hundred
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NO, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_names(name: str) -> list[str] | None:
    """Names of all files of the model that a file so called belongs to; None unless it is one of several."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 < int(match[3]) <= MAX_PARTS:
        return None
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def read_gguf(path: str | os.PathLike[str]) -> GGUFHeader:
    """The header of a GGUF model, of all its files if ``path`` is one of several: tensors say where they are.

    Reads headers only. ``path`` of the answer is the first file.

    Raises:
        GGUFError: as :meth:`GGUFHeader.read`; or a file of several is missing, there is one too many, or they
            do not belong together.
    """
    header = GGUFHeader.read(path)
    count = header.count(COUNT, 1)
    return header if count <= 1 else _read_parts(header, count)


def _read_parts(given: GGUFHeader, count: int) -> GGUFHeader:
    path = given.path
    names = part_names(path.name)
    if names is None or len(names) != count:
        raise GGUFError(
            path,
            f"says it is one of {count} files of a model ({COUNT}), so its name has to end in "
            f"-00001-of-{count:05}.gguf or another number before -of-",
        )
    _refuse_strays(path, count)
    own = names.index(path.name) if path.name in names else -1
    if own < 0:
        raise GGUFError(path, f"is no file of its model, whose {count} files are numbered from 00001")
    parts: list[GGUFHeader] = []
    tensors: dict[str, TensorInfo] = {}
    for index, name in enumerate(names):
        if index == own:
            part = given
        elif not (path.parent / name).exists():
            raise GGUFError(path.parent / name, f"no such file; the model has {count} files, all are needed")
        else:
            part = GGUFHeader.read(path.parent / name)
        _check_part(part, index, count, parts[0] if parts else part)
        parts.append(part)
        _add_tensors(tensors, part)
    first = parts[0]
    expected = first.count(TENSORS, len(tensors))
    if expected != len(tensors):
        raise GGUFError(
            first.path,
            f"says the model has {expected} tensors ({TENSORS}), its {count} files have {len(tensors)}",
        )
    metadata = {key: entry for key, entry in first.metadata.items() if not key.startswith("split.")}
    return attrs.evolve(first, metadata=metadata, tensors=tensors, files=tuple(part.stamp for part in parts))


def _check_part(part: GGUFHeader, index: int, count: int, first: GGUFHeader) -> None:
    """Whether a file is what its name says, and of the same model as the first."""
    for key, expected in ((COUNT, count), (NO, index)):
        found = part.count(key)
        if found != expected:
            raise GGUFError(part.path, f"damaged or renamed: {key} is {found}, its name says {expected}")
    for key in (TENSORS, "general.architecture", "general.name"):
        mine, its = part.value(key), first.value(key)
        if mine is not None and mine != its:
            raise GGUFError(
                part.path,
                f"is of another model than {first.path.name}: {key} is {show(str(mine))}, "
                f"there it is {show(str(its))}",
            )


def _add_tensors(tensors: dict[str, TensorInfo], part: GGUFHeader) -> None:
    for name, tensor in part.tensors.items():
        if name in tensors:
            raise GGUFError(
                part.path, f"has tensor {show(name)}, which {tensors[name].file.path.name} has, too"
            )
        tensors[name] = tensor
    if len(tensors) > MAX_TENSORS:
        raise GGUFError(part.path, f"with it the model has over {MAX_TENSORS} tensors, which is the limit")


def _refuse_strays(path: Path, count: int) -> None:
    """Files with the model's name and count, and a number that is none of it."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    with os.scandir(path.parent) as entries:
        for entry in entries:
            other = _NAME.fullmatch(entry.name)
            if other and other[1] == match[1] and other[3] == match[3] and not 1 <= int(other[2]) <= count:
                raise GGUFError(path.parent / entry.name, f"is one too many: the model has {count} files")
