"""Flags of whoever may use an OpenAI endpoint; called alike in all commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import attrs
import click

from skippy.config import AccessOptions
from skippy.config.access import MAX_KEY_CHARACTERS, MAX_KEYS

from .errors import SettingError
from .flags import combine

MAX_KEY_FILE_BYTES: Final = MAX_KEYS * (MAX_KEY_CHARACTERS + 2)
FLAGS: Final = {
    "api_keys": "--api-key",
    "api_key_concurrency": "--api-key-concurrency",
    "cors_origins": "--cors-origin",
    "allowed_hosts": "--allowed-host",
}
"""The flag of each option of :class:`AccessOptions`."""
_KEY_FILE: Final = "--api-key-file"

access_options = combine(
    click.option(
        FLAGS["api_keys"],
        "api_keys",
        multiple=True,
        metavar="KEY",
        help="Serve only requests with this key, or another one given; others on this machine can see it.",
    ),
    click.option(
        _KEY_FILE,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The same for keys in a file, one a line; lines that are empty or begin with # are skipped.",
    ),
    click.option(
        FLAGS["api_key_concurrency"], type=int, metavar="N", help="Requests that one key may have at once."
    ),
    click.option(
        FLAGS["cors_origins"],
        "cors_origins",
        multiple=True,
        metavar="ORIGIN",
        help="Also serve web pages of this origin, such as https://app.example; *: of all.",
    ),
    click.option(
        FLAGS["allowed_hosts"],
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="Also answer requests that are addressed to this host name; *: to any.",
    ),
)


def take_access(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`AccessOptions` out of the values of :data:`access_options`.

    Raises:
        SettingError: the key file cannot be used.
    """
    given = {field.name: values.pop(field.name) for field in attrs.fields(AccessOptions)}
    given["api_keys"] = (*given["api_keys"], *read_api_keys(values.pop("api_key_file")))
    return given


def read_api_keys(path: Path | None) -> list[str]:
    """The keys in a file; their form is for AccessOptions to check.

    Raises:
        SettingError: it cannot be read, or has none.
    """
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise SettingError(f"{_KEY_FILE}: {path}: {error.strerror}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise SettingError(f"{_KEY_FILE}: {path}: is larger than {MAX_KEY_FILE_BYTES} bytes")
    try:
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise SettingError(f"{_KEY_FILE}: {path}: not UTF-8") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingError(f"{_KEY_FILE}: {path}: has no key; write one a line")
    return keys
