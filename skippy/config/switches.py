"""Switches in the environment."""

from __future__ import annotations

import os

from .errors import ConfigError

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def switched_on(variable: str) -> bool:
    """Whether an environment variable says yes; unset or empty is no.

    Raises:
        ConfigError: it holds neither a word for on nor one for off.
    """
    word = os.environ.get(variable, "")
    if word.strip().lower() in _ON:
        return True
    if word.strip().lower() in _OFF:
        return False
    raise ConfigError(f"{variable}: is {word!r}, must be one of {', '.join(_ON)}, or {', '.join(_OFF[1:])}")
