"""JSON that a peer sends: strict, bounded, and with the name of the field in every complaint.

Source of the rules: ``docs/protocol.md``, section "Admission".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from .errors import RemoteProtocolError

I64_MAX: Final = 2**63 - 1


class _Refused(ValueError):
    pass


def canonical_json(value: object) -> bytes:
    """The one spelling of a value: sorted keys, no spaces, UTF-8 without needless escapes (RFC 8785)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def parse_object(body: bytes, what: str) -> Fields:
    """The object in ``body``; ``what`` names it in errors.

    Raises:
        RemoteProtocolError: not UTF-8, not JSON, a key twice, NaN or Infinity, a lone surrogate, too deep, or
            not an object.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
        # Escapes can spell half a character, which is no text; this is also where nesting is walked.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{what} is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise RemoteProtocolError(f"{what} holds a lone surrogate, which is no Unicode text") from None
    except RecursionError:
        raise RemoteProtocolError(f"{what} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise RemoteProtocolError(f"{what} is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # ours, or a number with thousands of digits
        raise RemoteProtocolError(f"{what} is not strict JSON: {error}") from None
    return Fields(value, what)


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _Refused(f"field {name[:80]!r} appears twice")
        result[name] = value
    return result


class Fields:
    """Takes the fields of one object by name and type; :meth:`end` refuses what was not taken.

    Every method raises RemoteProtocolError with the path of the field.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise RemoteProtocolError(f"{where} must be an object, not {_kind(value)}")
        self._rest: dict[str, Any] = dict(value)
        self._where = where

    def _take(self, name: str) -> Any:
        if name not in self._rest:
            raise RemoteProtocolError(f"{self._where}: field {name!r} is missing")
        return self._rest.pop(name)

    def _wrong(self, name: str, wanted: str, value: object) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._where}: field {name!r} must be {wanted}, not {_kind(value)}")

    def text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def choice(self, name: str, allowed: Mapping[str, Any]) -> Any:
        value = self.text(name)
        if value not in allowed:
            raise RemoteProtocolError(
                f"{self._where}: field {name!r} must be one of {', '.join(allowed)}, not {value[:80]!r}"
            )
        return allowed[value]

    def text_or_null(self, name: str) -> str | None:
        return None if self._null(name) else self.text(name)

    def text_or_absent(self, name: str) -> str | None:
        return self.text(name) if name in self._rest else None

    def integer(self, name: str, low: int = 0, high: int = I64_MAX) -> int:
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "an integer", value)
        if not low <= value <= high:
            raise RemoteProtocolError(f"{self._where}: field {name!r} must be {low} to {high}")
        return value

    def integer_or_null(self, name: str, low: int, high: int) -> int | None:
        return None if self._null(name) else self.integer(name, low, high)

    def integer_or_absent(self, name: str, low: int, high: int) -> int | None:
        return self.integer(name, low, high) if name in self._rest else None

    def integers_or_absent(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers from ``low`` to ``high``; empty where the field is absent."""
        values = self._list(name) if name in self._rest else []
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise self._wrong(name, f"a list of integers from {low} to {high}", value)
        return tuple(values)

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def boolean_or_absent(self, name: str) -> bool | None:
        return self.boolean(name) if name in self._rest else None

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._list(name)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(name, "a list of strings", value)
        return tuple(values)

    def objects(self, name: str) -> list[Fields]:
        return [Fields(value, f"{self._where}.{name}[{i}]") for i, value in enumerate(self._list(name))]

    def object(self, name: str) -> Fields:
        return Fields(self._take(name), f"{self._where}.{name}")

    def object_or_null(self, name: str) -> Fields | None:
        return None if self._null(name) else self.object(name)

    def end(self) -> None:
        """Refuse fields that nobody took."""
        if self._rest:
            raise RemoteProtocolError(f"{self._where}: unknown field {next(iter(self._rest))[:80]!r}")

    def _list(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list", value)
        return value

    def _null(self, name: str) -> bool:
        if name in self._rest and self._rest[name] is None:
            del self._rest[name]
            return True
        return False


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {str: "a string", int: "an integer", float: "a fraction", list: "a list"}
    return names.get(type(value), "an object")
