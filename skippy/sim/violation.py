"""The one thing a simulation looks for."""

from __future__ import annotations


class Violation(Exception):
    """Something that must always hold does not."""


def require(holds: bool, text: str) -> None:
    """Raise Violation with ``text`` unless ``holds``."""
    if not holds:
        raise Violation(text)
