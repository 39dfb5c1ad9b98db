"""Fields of configuration classes: default, documentation and availability in one place."""

from __future__ import annotations

import re
from typing import Any

import attrs

from .errors import ConfigError

DOC = "skippy.doc"
UNAVAILABLE = "skippy.unavailable"


def key(doc: str, **arguments: Any) -> Any:
    """A key of this version; ``arguments`` go to :func:`attrs.field`."""
    return attrs.field(metadata={DOC: doc}, **arguments)


def unavailable(default: Any, feature: str) -> Any:
    """A key whose feature does not exist yet: only ``default`` or null is accepted.

    ``feature`` completes the sentence "<feature> not available yet".
    """
    return meaningless(default, f"{feature} not available yet")


def meaningless(default: Any, reason: str) -> Any:
    """A key that there is nothing to do for: only ``default`` or null is accepted, because of ``reason``."""
    return attrs.field(default=default, metadata={UNAVAILABLE: reason})


def refuse_unavailable(value: Any) -> None:
    """Raise ConfigError if an unavailable key of ``value`` is not at its off value."""
    for field in attrs.fields(type(value)):
        reason = field.metadata.get(UNAVAILABLE)
        given = getattr(value, field.name)
        if reason is None or given is None or given == field.default:
            continue
        off = "null" if field.default is None else _json_word(field.default)
        raise ConfigError(f"{field.name}: {reason}; leave the key out or set it to {off}")


def _json_word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == ():
        return "[]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def require(condition: bool, text: str) -> None:
    """Raise ConfigError with ``text`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(text)


def require_text(value: Any, *names: str) -> None:
    """Refuse strings in the named attributes that are blank, or can name no file (None passes)."""
    for name in names:
        text = getattr(value, name)
        if text is None:
            continue
        require(bool(text.strip()), f"{name}: must not be empty")
        require("\0" not in text, f"{name}: must not contain a null character")
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ConfigError(f"{name}: must not contain half of a surrogate pair") from None


def require_range(value: Any, low: int, high: int, *names: str) -> None:
    """Refuse integers outside ``[low, high]`` in the named attributes (None passes)."""
    for name in names:
        number = getattr(value, name)
        require(number is None or low <= number <= high, f"{name}: is {number}, must be {low} to {high}")


def require_sha256(value: Any, *names: str) -> None:
    """Refuse what is not a SHA-256 in hexadecimal in the named attributes (None passes)."""
    for name in names:
        digest = getattr(value, name)
        require(
            digest is None or re.fullmatch("[0-9a-fA-F]{64}", digest) is not None,
            f"{name}: is {digest!r}, must be 64 hexadecimal digits",
        )
