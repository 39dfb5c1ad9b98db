"""JSON values to configuration classes, by cattrs: nothing is converted or left out silently."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, Union

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn

from .errors import ConfigError

T = TypeVar("T")

_NAMES = {bool: "true or false", int: "an integer", str: "a string", float: "a number", dict: "an object"}
_FOUND = {
    bool: "",
    int: "the number",
    float: "the number",
    str: "the string",
    list: "an array",
    dict: "an object",
}


class _Mismatch(Exception):
    """A value of the wrong type."""

    def __init__(self, expected: str, found: Any) -> None:
        super().__init__(f"expected {expected}, found {_describe(found)}")


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return _FOUND[type(value)]
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return f"{_FOUND.get(type(value), type(value).__name__)} {text if len(text) <= 60 else text[:57] + '...'}"


def _exactly(kind: type[Any]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        accepted = (int, float) if kind is float else (kind,)
        if type(value) not in accepted:
            raise _Mismatch(_NAMES[kind], value)
        return kind(value)

    return structure


def _structure_literal(value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind)
    if not isinstance(value, str) or value not in choices:
        raise _Mismatch("one of " + ", ".join(f'"{choice}"' for choice in choices), value)
    return value


def _structure_object(value: Any, _: Any) -> Any:
    if not isinstance(value, dict):
        raise _Mismatch("an object", value)
    return value


def _class_hook(kind: Any) -> Callable[[Any, Any], Any]:
    structure = make_dict_structure_fn(kind, _CONVERTER, _cattrs_forbid_extra_keys=False)
    known = [field.name for field in attrs.fields(kind)]
    optional = {field.name for field in attrs.fields(kind) if field.default is not attrs.NOTHING}

    def hook(value: Any, target: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch("an object", value)
        for name in value:
            if name not in known:
                raise ConfigError(f"{name}: unknown key{_suggestion(name, known)}")
        missing = [name for name in known if name not in value and name not in optional]
        if missing:
            raise ConfigError(f"{missing[0]}: is missing")
        # null means "not said", as does leaving the key out.
        given = {name: item for name, item in value.items() if item is not None or name not in optional}
        return structure(given, target)

    return hook


def _tuple_hook(kind: Any) -> Callable[[Any, Any], Any]:
    (item, _) = typing.get_args(kind)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, list):
            raise _Mismatch("an array", value)
        items = []
        for index, element in enumerate(value):
            try:
                items.append(_CONVERTER.structure(element, item))
            except (ConfigError, _Mismatch, cattrs.BaseValidationError) as error:
                raise ConfigError(_first(error, f"[{index}]")) from None
        return tuple(items)

    return hook


def _optional_hook(kind: Any) -> Callable[[Any, Any], Any]:
    (inner,) = (argument for argument in typing.get_args(kind) if argument is not types.NoneType)
    return lambda value, _: None if value is None else _CONVERTER.structure(value, inner)


def _suggestion(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind)


def _is_optional(kind: Any) -> bool:
    return _origin(kind) in (types.UnionType, Union) and types.NoneType in typing.get_args(kind)


_CONVERTER = cattrs.Converter(detailed_validation=True)
for _kind in (bool, int, float, str):
    _CONVERTER.register_structure_hook(_kind, _exactly(_kind))
_CONVERTER.register_structure_hook_func(lambda kind: _origin(kind) is dict, _structure_object)
_CONVERTER.register_structure_hook_func(lambda kind: _origin(kind) is Literal, _structure_literal)
_CONVERTER.register_structure_hook_factory(_is_optional, _optional_hook)
_CONVERTER.register_structure_hook_factory(lambda kind: _origin(kind) is tuple, _tuple_hook)
_CONVERTER.register_structure_hook_factory(attrs.has, _class_hook)


def from_json_value(value: Any, kind: type[T]) -> T:
    """Build ``kind`` from parsed JSON.

    Raises:
        ConfigError: the first thing that is wrong, with its JSON path.
    """
    try:
        return _CONVERTER.structure(value, kind)
    except (ConfigError, _Mismatch, cattrs.BaseValidationError) as error:
        raise ConfigError(_first(error, "")) from None


def to_json_value(value: Any) -> dict[str, Any]:
    """The inverse of :func:`from_json_value` for a configuration value; holds its secrets too."""
    return attrs.asdict(value)


def _first(error: BaseException, path: str) -> str:
    """The text of the first error in a cattrs error tree, with the path that leads there in front."""
    if isinstance(error, cattrs.BaseValidationError):
        inner = error.exceptions[0]
        return _first(inner, path + "".join(_path_notes(inner)))
    separator = "" if isinstance(error, _Mismatch) or str(error).startswith("[") else "."
    if isinstance(error, _Mismatch):
        return f"{path.lstrip('.') or 'the file'}: {error}"
    return f"{path}{separator}{error}".lstrip(".") if path else str(error)


def _path_notes(error: BaseException) -> Iterator[str]:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, cattrs.AttributeValidationNote):
            yield f".{note.name}"
