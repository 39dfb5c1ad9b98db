"""Options of ``skippy run`` for the prefix caches of its stages."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import click

from skippy.config import ConfigError, KvCacheConfig
from skippy.config.kv import KvPayload
from skippy.kv.settings import MAX_ENTRIES

from .flags import combine

OPTIONS = {
    "kv_cache": "mode",
    "kv_payload": "payload",
    "kv_max_entries": "max_entries",
    "kv_max_bytes": "max_bytes",
    "kv_dir": "directory",
    "kv_audit_rate": "audit_rate",
}
"""By parameter, the key of ``kv_cache`` that each of them is."""

kv_options = combine(
    click.option(
        "--kv-cache",
        type=click.Choice(["lookup-record", "record", "disabled"]),
        help="Whether stages remember prompts; default: what SKIPPY_KV_CACHE says, else lookup-record.",
    ),
    click.option("--kv-payload", type=click.Choice(get_args(KvPayload)), help="What is kept; default: auto."),
    click.option(
        "--kv-max-entries",
        type=click.IntRange(1, MAX_ENTRIES),
        metavar="N",
        help="Prompts that a stage keeps; default: 64.",
    ),
    click.option(
        "--kv-max-bytes",
        type=click.IntRange(min=0),
        metavar="BYTES",
        help="Exported state in a stage's memory; default: a sixteenth of the machine's.",
    ),
    click.option("--kv-dir", metavar="FOLDER", help="Keep exported states there, also when stages restart."),
    click.option(
        "--kv-audit-rate",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        help="Hits to compute again and compare, 0 to 1; default: 0.",
    ),
)


def kv_cache(values: dict[str, Any]) -> KvCacheConfig | None:
    """What the options ask for, which are taken out of ``values``; None where none is given.

    Raises:
        ConfigError: a value that the key cannot have, by the name of the option.
    """
    given = {name: value for name in OPTIONS if (value := values.pop(name)) is not None}
    config = KvCacheConfig()
    for name, value in given.items():
        changes: dict[str, Any] = {OPTIONS[name]: value}
        try:
            config = attrs.evolve(config, **changes)
        except ConfigError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    return config if given else None
