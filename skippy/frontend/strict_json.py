"""JSON from strangers: bytes in, plain values out, or a 400 that says what is wrong.

Stricter than :func:`json.loads`: UTF-8 only, no NaN or Infinity, no number that overflows a double, no
integer of more than 40 digits, no duplicate keys, no lone surrogates, at most 64 levels deep.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

from .errors import ApiError

MAX_DEPTH: Final = 64
MAX_INTEGER_DIGITS: Final = 40


class _Refused(ValueError):
    pass


def _refuse_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _parse_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise _Refused(f"an integer of {len(text)} digits is too long")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text[:40]} is too large")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {key[:100]!r} appears twice in one object")
            seen.add(key)
    return result


def _check_tree(value: Any) -> None:
    """Refuse what is too deep or holds text that is not Unicode."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
        if not below:
            return
        level = below
    raise _Refused(f"it is nested more than {MAX_DEPTH} levels deep")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        ApiError: 400; nothing else, whatever the bytes.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the request body is not valid UTF-8 (byte {error.start})") from None
    if text.startswith("\ufeff"):
        raise ApiError("the request body begins with a byte order mark, which JSON does not allow")
    if not text.strip(" \t\r\n"):
        raise ApiError("the request body is empty; a JSON object is expected")
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            parse_float=_parse_float,
            object_pairs_hook=_unique_keys,
        )
        _check_tree(value)
    except UnicodeEncodeError:
        raise ApiError("the request body has a lone surrogate escape, which is no Unicode text") from None
    except RecursionError:
        raise ApiError(f"the request body is nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        what = error.msg.removesuffix(" at")
        raise ApiError(f"the request body is not valid JSON: {what} at {where}") from None
    except _Refused as error:
        raise ApiError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("the request body is not a JSON object")
    return value
