"""Configuration files: bytes to values, with errors that name the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError
from .stage import StageConfig
from .structure import from_json_value
from .topology import StageTopology

T = TypeVar("T")
MAX_BYTES = 16 * 1024 * 1024


def load_stage_config(path: str | Path) -> StageConfig:
    """Read ``stage.json``. ConfigError names the file and, where it has one, the line or JSON path."""
    return _load(Path(path), StageConfig)


def load_topology(path: str | Path) -> StageTopology:
    """Read ``topology.json``. ConfigError names the file and, where it has one, the line or JSON path."""
    return _load(Path(path), StageTopology)


def stage_config_from_json(data: bytes) -> StageConfig:
    """A StageConfig from the bytes of a JSON document, or ConfigError."""
    return from_json_value(_parse(data), StageConfig)


def topology_from_json(data: bytes) -> StageTopology:
    """A StageTopology from the bytes of a JSON document, or ConfigError."""
    return from_json_value(_parse(data), StageTopology)


def _load(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes; this is no configuration file")
    try:
        return from_json_value(_parse(data), kind)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"line {line}: not UTF-8 (byte 0x{data[error.start]:02x})") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError("not a configuration: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer with more digits than Python converts
        raise ConfigError(f"not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ConfigError(f"{name}: the key appears twice")
        result[name] = value
    return result


def _no_constant(word: str) -> Any:
    raise ConfigError(f"not JSON: {word} is no JSON number")
