"""Who may use an OpenAI endpoint: keys, origins of web pages, and names of the host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs

from .fields import key, require, require_range

MAX_KEYS: Final = 1000
MAX_KEY_CHARACTERS: Final = 512
ANY: Final = "*"
"""Among origins or host names: all of them."""
_KEY: Final = re.compile(r"[!-~]+")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\"'<>?#@]+")
_HOST: Final = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _lower(value: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(text.lower() for text in _texts(value))


@attrs.frozen(slots=True, kw_only=True)
class AccessOptions:
    """Who may use an endpoint. ConfigError names the wrong option, and never shows a key."""

    api_keys: tuple[str, ...] = key(
        "API keys, one of which every request must show, but for `/health`, `/healthz`, `/readyz` and the "
        "web page itself; printable ASCII without spaces. None: nobody is asked.",
        default=(),
        repr=False,
        converter=_texts,
    )
    api_key_concurrency: int | None = key(
        "Requests that one API key may have at once; one more is answered with 429. null: no limit.",
        default=None,
    )
    cors_origins: tuple[str, ...] = key(
        "Origins of web pages, such as `https://app.example`, that may use the endpoint beside its own; `*`: "
        "all.",
        default=(),
        converter=_lower,
    )
    allowed_hosts: tuple[str, ...] = key(
        "Host names that requests may be addressed to beside IP addresses, `localhost` and the machine's own "
        "name, such as the one a proxy has; `*`: all, which lets web pages of others in by DNS rebinding.",
        default=(),
        converter=_lower,
    )

    def __attrs_post_init__(self) -> None:
        self.check_access()

    def check_access(self) -> None:
        """Raise ConfigError where one of these options is wrong."""
        keys = self.api_keys
        require(len(keys) <= MAX_KEYS, f"api_keys: are {len(keys)}, must be {MAX_KEYS} at most")
        for number, text in enumerate(keys, 1):
            require(
                len(text) <= MAX_KEY_CHARACTERS and _KEY.fullmatch(text) is not None,
                f"api_keys: number {number} must be 1 to {MAX_KEY_CHARACTERS} printable ASCII characters "
                f"without spaces",
            )
        require_range(self, 1, 1_000_000, "api_key_concurrency")
        require(
            self.api_key_concurrency is None or bool(keys),
            "api_key_concurrency: has no effect without api_keys",
        )
        for origin in self.cors_origins:
            require(
                origin == ANY or _ORIGIN.fullmatch(origin) is not None,
                f"cors_origins: {origin!r} is no origin; write scheme://host or scheme://host:port, without "
                f"a path or a final slash",
            )
        for host in self.allowed_hosts:
            require(
                host == ANY or _HOST.fullmatch(host) is not None,
                f"allowed_hosts: {host!r} is no host name; write one without scheme and port",
            )
