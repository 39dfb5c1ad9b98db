"""Who is served: decided by a request's Host, Origin and API key alone.

*Host*: a page of a stranger can have its own name resolve to this machine (DNS rebinding), so that the
browser takes the answers for that page's own. The name then is in the Host header, so names are allowed one
by one; an address is no name.

*Origin*: browsers send it with whatever a page sends to another origin, and with every WebSocket. Pages of
this endpoint, whose origin is the host that is asked, may do everything; others only if they are named.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from skippy.config import AccessOptions
from skippy.config.access import ANY

from .errors import ApiError

_AUTHORITY: Final = re.compile(r"(\[[^\]\s]+\]|[^:\s\[\]/@]+)(?::\d{1,5})?")
BUSY_RETRY_SECS: Final = 1

KeyId = bytes
"""SHA-256 of an API key: tells keys apart without being one."""


class AccessPolicy:
    """What an endpoint's options say about who may use it.

    Args:
        names: under which the endpoint may be asked, beside those of the options.
    """

    def __init__(self, options: AccessOptions | None = None, names: Sequence[str] = ()) -> None:
        options = options or AccessOptions()
        self._keys = [_key_id(key) for key in options.api_keys]
        self._limit = options.api_key_concurrency
        self._origins = frozenset(options.cors_origins)
        own = socket.gethostname().lower()
        self._names = {*options.allowed_hosts, *(name.lower() for name in names), own, f"{own}.local"}
        self._running: Counter[KeyId] = Counter()

    def check_host(self, host: str | None) -> None:
        """Refuse a request that was sent to a name that is not this endpoint's. No browser leaves it out.

        Raises:
            ApiError: 403.
        """
        if not host or ANY in self._names:  # Quart has an empty one for HTTP/1.0 without any
            return
        match = _AUTHORITY.fullmatch(host.lower())
        name = "" if match is None else match[1].removesuffix(".")
        if not (name in self._names or name == "localhost" or name.endswith(".localhost") or _is_ip(name)):
            raise ApiError(
                f"the request is addressed to {host[:100]!r}, which is no name of this server; whoever runs "
                f"it can allow the name with --allowed-host",
                status=403,
                code="host_not_allowed",
            )

    def allows_origin(self, origin: str, host: str | None) -> bool:
        """Whether pages of ``origin`` may use the endpoint that was asked as ``host``."""
        origin = origin.lower()
        return self.is_own_origin(origin, host) or bool({origin, ANY} & self._origins)

    @staticmethod
    def is_own_origin(origin: str, host: str | None) -> bool:
        """Whether ``origin`` is the endpoint's own, through a proxy with TLS or without."""
        return host is not None and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Refuse what a page of another origin sends.

        Raises:
            ApiError: 403.
        """
        if origin is not None and not self.allows_origin(origin, host):
            raise ApiError(
                f"web pages of {origin[:100]!r} may not use this server; whoever runs it can allow them with "
                f"--cors-origin",
                status=403,
                code="origin_not_allowed",
            )

    def check_key(self, credentials: str | None) -> KeyId | None:
        """The key that a request has shown; None where none is asked for.

        Compared in a time that does not depend on how much of a key was right.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if not self._keys:
            return None
        if credentials is None:
            raise ApiError(
                "no API key was given; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )
        shown = _key_id(credentials)
        # All are compared, so that the time does not tell which one was right either.
        if not sum([hmac.compare_digest(shown, known) for known in self._keys]):
            raise ApiError("the API key is not one of this server's", status=401, code="invalid_api_key")
        return shown

    def has_key(self, credentials: str | None) -> bool:
        """Whether a request may see what only those with a key may."""
        try:
            self.check_key(credentials)
        except ApiError:
            return False
        return True

    @contextlib.contextmanager
    def running(self, key: KeyId | None) -> Iterator[None]:
        """A block in which a request of ``key`` runs.

        Raises:
            ApiError: 429, as many run as may.
        """
        if key is None or self._limit is None:
            yield
            return
        if self._running[key] >= self._limit:
            raise ApiError(
                f"requests of this API key that run: {self._limit}, which is all it may have at once",
                status=429,
                retry_after_secs=BUSY_RETRY_SECS,
            )
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]


def _key_id(key: str) -> KeyId:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True
