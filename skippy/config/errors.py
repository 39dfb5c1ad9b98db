"""The one error of this package."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration is wrong: says what, where (file, JSON path or option), and what would be right.

    What was found is quoted, so characters that would break a line or a terminal become escapes.
    """

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))
