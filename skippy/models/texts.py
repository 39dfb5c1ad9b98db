"""JSON and other texts of a model: size first, then strictly parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from skippy.models.errors import AtPathError, GGUFError, show
from skippy.models.reading import open_regular

MAX_CONTAINERS = 1 << 20  # lists and objects; the largest tokenizers have some 520 000 pairs to merge
MAX_COMMAS = 1 << 22  # so values; the largest tokenizers have some 1.8 million


class _Refused(ValueError):
    pass


def read_bytes(path: Path, limit: int, error: type[AtPathError]) -> bytes:
    """The whole of a small file.

    Raises:
        error: it has more than ``limit`` bytes, cannot be read, is missing, or no regular file.
    """
    try:
        fd = open_regular(path)
    except GGUFError as cause:
        raise error(path, cause.message) from cause
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise error(path, f"has {size} bytes, at most {limit} are read")
        try:
            return file.read(size)  # a buffer of so many bytes, so not of `limit`
        except OSError as cause:
            raise error(path, f"cannot be read: {cause.strerror}") from cause


def read_object(path: Path, limit: int, error: type[AtPathError]) -> dict[str, Any]:
    """The JSON object that a file consists of. Raises as :func:`read_bytes` and :func:`parse_object`."""
    return parse_object(path, read_bytes(path, limit, error), "the file", error)


def parse_object(path: Path, data: bytes, what: str, error: type[AtPathError]) -> dict[str, Any]:
    """The JSON object in ``data``.

    A list takes two bytes there and 64 in memory, so how many there can be is counted first.

    Raises:
        error: not UTF-8, not JSON, a key twice, NaN or Infinity, nested too deep, too many values, or not an
            object.
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS or data.count(b",") > MAX_COMMAS:
        raise error(
            path, f"{what} has over {MAX_CONTAINERS} lists and objects or {MAX_COMMAS} values, the limits"
        )
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as cause:
        raise error(path, f"{what} is not UTF-8 (byte {cause.start})") from None
    except RecursionError:
        raise error(path, f"{what} is nested too deep") from None
    except ValueError as cause:
        raise error(path, f"{what} is not valid JSON: {cause}") from None
    if not isinstance(value, dict):
        raise error(path, f"{what} is not a JSON object")
    return value


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {show(twice)} appears twice in one object")
    return value
