"""Reading typed fields out of a JSON object, with errors that name the field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, Final

from .errors import ApiError

I32_MAX: Final = 2**31 - 1
U32_MAX: Final = 2**32 - 1


def describe(value: Any) -> str:
    """A JSON value's type in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


class Fields:
    """One JSON object being read. A field that is null counts as absent, also one nobody knows.

    Args:
        data: the object.
        path: where it sits in the request, e.g. ``"messages[2]"``; empty for the request itself.
    """

    def __init__(self, data: dict[str, Any], path: str = "") -> None:
        self._data = data
        self._path = path
        self._known: set[str] = set()

    @classmethod
    def of(cls, value: Any, path: str) -> Fields:
        """Read ``value``, which must be an object."""
        if not isinstance(value, dict):
            raise ApiError(f"{path} must be an object, not {describe(value)}", param=path)
        return cls(value, path)

    @property
    def place(self) -> str:
        """Where the object sits in the request."""
        return self._path

    @property
    def known(self) -> frozenset[str]:
        """The fields that have been asked for so far."""
        return frozenset(self._known)

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, text: str, code: str = "") -> ApiError:
        """An error about field ``name``; ``text`` goes on after its path."""
        return ApiError(f"{self.path(name)} {text}", param=self.path(name), code=code)

    def get(self, name: str) -> Any:
        """The raw value; None if absent."""
        self._known.add(name)
        return self._data.get(name)

    def is_given(self, name: str) -> bool:
        self._known.add(name)
        return self._data.get(name) is not None

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.error(name, f"must be a string, not {describe(value)}")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.error(name, f"must be true or false, not {describe(value)}")

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, not {describe(value)}")
        if not low <= value <= high:
            raise self.error(name, f"is {value}; it must be from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {describe(value)}")
        # Integers here have at most 40 digits, so the conversion cannot overflow.
        result = float(value)
        if not (math.isfinite(result) and low <= result <= high):
            raise self.error(name, f"is {value}; it must be from {low:g} to {high:g}")
        return result

    def array(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None or isinstance(value, list):
            return value
        raise self.error(name, f"must be an array, not {describe(value)}")

    def accept_only(self, name: str, allowed: Sequence[Any], reason: str) -> None:
        """Refuse the field unless it is absent or exactly one of ``allowed``."""
        value = self.get(name)
        if value is None or any(type(value) is type(one) and value == one for one in allowed):
            return
        raise self.error(name, f"is not supported: {reason}", code="unsupported_model_feature")

    def other_type(self, taken: str) -> ApiError:
        """The error of an object whose ``type`` is missing or not supported; ``taken`` says which are."""
        kind = self.text("type")
        if kind is None:
            return self.error("type", f"is missing; {taken}")
        text = f"is {kind[:40]!r}, which is not supported; {taken}"
        return self.error("type", text, code="unsupported_model_feature")

    def refuse_unknown(self) -> None:
        """Call last: refuse what no reader above has asked for.

        Nulls pass: clients send back whole messages, with a null for every field they know of.
        """
        for name, value in self._data.items():
            if name in self._known or value is None:
                continue
            shown = name[:100]
            near = difflib.get_close_matches(shown, sorted(self._known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            where = f" in {self._path}" if self._path else ""
            raise ApiError(
                f"unknown parameter {shown!r}{where}{hint}", param=self.path(shown), code="unknown_parameter"
            )
