"""JSON and other texts of a checkpoint folder: size first, then strictly parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from skippy.models.errors import CheckpointError, show
from skippy.models.reading import open_regular

MAX_CONFIG = 1 << 20  # bytes; real ones have a few thousand
MAX_TOKENIZER = 64 << 20  # bytes; the largest real ones have some 35 million
MAX_INDEX = 16 << 20  # bytes; the largest real ones have some 10 million


class _Refused(ValueError):
    pass


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole of a small file.

    Raises:
        CheckpointError: it has more than ``limit`` bytes, or cannot be read.
        GGUFError: it is missing or no regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(path, f"has {size} bytes, at most {limit} are read")
        try:
            return file.read(size)  # a buffer of so many bytes, so not of `limit`
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from error


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object that a file consists of. Raises as :func:`read_bytes` and :func:`parse_object`."""
    return parse_object(path, read_bytes(path, limit), "the file")


def parse_object(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``data``.

    Raises:
        CheckpointError: not UTF-8, not JSON, a key twice, NaN or Infinity, nested too deep, or not an object.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"{what} is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise CheckpointError(path, f"{what} is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(path, f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{what} is not a JSON object")
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
