"""The prefix cache of one stage as it is configured: the object ``kv_cache``, and the environment.

What a loaded stage makes of it: :mod:`skippy.kv.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import attrs

from .errors import ConfigError
from .fields import key, require, require_range, require_text

T = TypeVar("T", bound=str)
KvMode = Literal["disabled", "auto", "record", "lookup-record"]
KvPayload = Literal["auto", "resident-kv", "kv-recurrent", "full-state"]

MODE_VARIABLES: Final = ("SKIPPY_KV_CACHE", "SKIPPY_PREFIX_CACHE")
"""The first one that is set picks the mode; a word for off in either of them always counts."""
PAYLOAD_VARIABLE: Final = "SKIPPY_KV_CACHE_PAYLOAD"
NUMBER_VARIABLES: Final = {
    "SKIPPY_KV_CACHE_MAX_ENTRIES": "max_entries",
    "SKIPPY_KV_CACHE_MAX_BYTES": "max_bytes",
    "SKIPPY_KV_CACHE_MIN_TOKENS": "min_tokens",
    "SKIPPY_KV_CACHE_SHARED_STRIDE_TOKENS": "shared_prefix_stride_tokens",
    "SKIPPY_KV_CACHE_SHARED_RECORD_LIMIT": "shared_prefix_record_limit",
}
DIRECTORY_VARIABLE: Final = "SKIPPY_KV_DIR"

_MODES: Final[dict[str, KvMode]] = {
    "": "auto",
    "auto": "auto",
    "record": "record",
    **dict.fromkeys(("0", "off", "false", "disable", "disabled"), "disabled"),
    **dict.fromkeys(("1", "on", "true", "exact", "lookup-record"), "lookup-record"),
}
_PAYLOADS: Final[dict[str, KvPayload]] = {
    "": "auto",
    "auto": "auto",
    "kv-recurrent": "kv-recurrent",
    **dict.fromkeys(("resident", "kv", "resident-kv"), "resident-kv"),
    **dict.fromkeys(("full", "full-state"), "full-state"),
}
_I64_MAX: Final = 2**63 - 1


@attrs.frozen(slots=True, kw_only=True)
class KvCacheConfig:
    """What one stage remembers between requests. Valid once built: ConfigError names the wrong key."""

    mode: KvMode = key(
        "`lookup-record`: remember what was computed, and use it. `record`: remember, but do not use. "
        "`disabled`: neither. `auto`: as whoever starts the stage chooses; a stage by itself does neither.",
        default="auto",
    )
    payload: KvPayload = key(
        "What is kept. `resident-kv`: native sequences, and their exported state when they run out; for "
        "attention models only. `kv-recurrent`: these, and exported states at checkpoints of a prompt. "
        "`full-state`: exported states alone. `auto`: `resident-kv` for attention models, else "
        "`kv-recurrent`.",
        default="auto",
    )
    max_entries: int = key(
        "Token paths that may be kept while no session has them, 1 to 512; at most 16 for models with "
        "recurrent state.",
        default=64,
    )
    max_bytes: int = key(
        "Bytes of exported state in memory; 0: a sixteenth of the machine's memory.", default=0
    )
    min_tokens: int = key("Shorter prefixes are neither kept nor used.", default=64)
    shared_prefix_stride_tokens: int = key(
        "Where sequences cannot be shortened (recurrent and hybrid models), the state of a prompt is also "
        "kept at a multiple of this, or of `min_tokens` if that is less: a chunk of the prompt ends there.",
        default=128,
    )
    shared_prefix_record_limit: int = key(
        "States kept of one prompt: at its end, where it parts from what was kept before, and at the last "
        "multiples of the stride; 0: at all of them. Attention models need none: what they keep serves every "
        "shorter prefix.",
        default=2,
    )
    extra_sequences: int | None = key(
        "Native sequences on top of one per lane, so that more is kept in place. Each takes the memory of "
        "`ctx_size` positions, unless `kv_unified`. null: none, but with `kv_unified` as many as can be of "
        "use.",
        default=None,
    )
    activation_max_bytes: int = key(
        "Bytes of boundary activations in memory, from which a stage that is not the last one feeds the next "
        "one without computing; 0: none are kept.",
        default=128 * 1024 * 1024,
    )
    directory: str | None = key(
        "Folder in which exported states outlive the process; null: that of SKIPPY_KV_DIR, or they do not. "
        "Stages make folders of their own below it.",
        default=None,
    )
    directory_max_bytes: int = key("Bytes of files that one stage keeps there.", default=8 * 1024**3)
    audit_rate: float = key(
        "The share of hits, 0 to 1, that is computed again and compared with what was kept; stage 0 decides.",
        default=0.0,
    )

    def __attrs_post_init__(self) -> None:
        require_range(self, 0, 2**31 - 1, "max_entries", "min_tokens", "shared_prefix_record_limit")
        require_range(self, 1, 2**31 - 1, "shared_prefix_stride_tokens")
        require_range(self, 0, _I64_MAX, "max_bytes", "activation_max_bytes")
        require_range(self, 1, _I64_MAX, "directory_max_bytes")
        require_range(self, 0, 255, "extra_sequences")
        require_text(self, "directory")
        require(0.0 <= self.audit_rate <= 1.0, f"audit_rate: is {self.audit_rate}, must be 0 to 1")

    @property
    def on(self) -> bool:
        """Whether anything is remembered."""
        return self.mode in ("record", "lookup-record")


def with_environment(
    config: KvCacheConfig | None, environment: Mapping[str, str], *, auto: KvMode = "auto"
) -> KvCacheConfig | None:
    """The configuration as the environment changes it.

    Off where either of the mode variables says so, whatever the configuration says. Without a configuration
    the environment's, if it or ``auto`` names a mode. ``SKIPPY_KV_DIR`` is the folder where neither
    names one.

    Args:
        config: the object ``kv_cache`` of a stage; None where there is none.
        auto: the mode that the caller takes for one that is ``auto`` or not named.

    Raises:
        ConfigError: a variable has a value that it cannot have, by name.
    """
    words = {name: environment[name] for name in MODE_VARIABLES if name in environment}
    modes = [_choice(name, word, _MODES) for name, word in words.items()]
    if "disabled" in modes:
        return None if config is None else attrs.evolve(config, mode="disabled")
    if config is None and (modes or auto != "auto"):
        config = _from_environment(modes[0] if modes else auto, environment)
    if config is not None and config.mode == "auto":
        config = attrs.evolve(config, mode=auto)
    directory = environment.get(DIRECTORY_VARIABLE)
    if config is not None and config.directory is None and directory:
        try:
            config = attrs.evolve(config, directory=directory)
        except ConfigError as error:
            raise ConfigError(f"{DIRECTORY_VARIABLE}: {error}") from None
    return config


def _from_environment(mode: KvMode, environment: Mapping[str, str]) -> KvCacheConfig:
    payload = _choice(PAYLOAD_VARIABLE, environment.get(PAYLOAD_VARIABLE, ""), _PAYLOADS)
    config = KvCacheConfig(mode=mode, payload=payload)
    for variable, name in NUMBER_VARIABLES.items():
        if variable not in environment:
            continue
        word = environment[variable].strip()
        if not (word.isascii() and word.isdigit() and len(word) <= 19):
            raise ConfigError(f"{variable}: is {environment[variable]!r}, must be an integer, at least 0")
        try:
            changes: dict[str, Any] = {name: int(word)}
            config = attrs.evolve(config, **changes)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
    return config


def _choice(variable: str, word: str, choices: Mapping[str, T]) -> T:
    choice = choices.get(word.strip().lower().replace("_", "-"))
    if choice is None:
        known = ", ".join(name for name in choices if name)
        raise ConfigError(f"{variable}: is {word!r}, must be one of {known}")
    return choice
