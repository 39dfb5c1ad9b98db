"""Whose cached prompts a request may use."""

from __future__ import annotations

import hashlib
from typing import Final

_DOMAIN: Final = b"skippy-cache-namespace-v1\0"


def cache_namespace(credentials: str | None, cache_key: str | None) -> str:
    """The name of the part of every stage's prefix cache that a request reads and writes.

    Requests with the same API key and the same ``prompt_cache_key`` share prompts, all others never meet. A
    digest, so that neither of the two is in a stage's memory, in its logs or on its disk.

    Args:
        credentials: the request's API key; None or blank: it has none.
        cache_key: its ``prompt_cache_key``; None or blank: it has none.

    Returns:
        64 hexadecimal digits: SHA-256 over both, each with its length; "" for a request with neither.
    """
    given = [part if part and not part.isspace() else "" for part in (credentials, cache_key)]
    parts = [part.encode("utf-8", "surrogatepass") for part in given]  # keys that differ in a space differ
    if not any(parts):
        return ""
    digest = hashlib.sha256(_DOMAIN)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
