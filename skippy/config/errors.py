"""The one error of this package."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration is wrong: says what, where (file, JSON path or option), and what would be right."""
