"""Network endpoints as users write them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import attrs

from .errors import ConfigError

LINK_SCHEMES = ("tcp", "tls", "ws", "wss")
"""How stages reach each other: plain TCP, TLS, and WebSockets over either."""


@attrs.frozen(slots=True)
class Endpoint:
    """A host (name or IP address, IPv6 without brackets), a TCP port, and how to speak there.

    Port 0 asks the system for one.
    """

    host: str
    port: int
    scheme: str = "tcp"

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        where: str = "endpoint",
        allow_any_port: bool = False,
        schemes: Sequence[str] = LINK_SCHEMES,
    ) -> Endpoint:
        """Read ``host:port`` (which is TCP) or ``scheme://host:port``; IPv6 addresses stand in brackets.

        Args:
            text: what the user wrote.
            where: names the option or key in errors.
            allow_any_port: accept port 0 (to bind, never to connect).
            schemes: what may be asked for.

        Raises:
            ConfigError: with ``where``, the text, and the form that would be right.
        """
        scheme, separator, rest = text.rpartition("://")
        scheme = scheme if separator else "tcp"
        known = ", ".join(f"{name}://" for name in schemes)
        forms = f"write host:port, with {known} in front or nothing, and brackets around an IPv6 address"
        if scheme not in schemes:
            raise ConfigError(f"{where}: {text!r} has scheme {scheme}://, which is not known here; {forms}")
        host, colon, port_text = rest.rpartition(":")
        if not colon or not host:
            raise ConfigError(f"{where}: {text!r} is not an endpoint; {forms}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if not _is_ipv6(host):
                raise ConfigError(f"{where}: {text!r} has no IPv6 address between its brackets")
        elif ":" in host:
            raise ConfigError(f"{where}: {text!r} has several colons; {forms}")
        if any(character.isspace() or character in "/[]@?#" for character in host):
            raise ConfigError(f"{where}: {text!r} has characters that no host name has; {forms}")
        lowest = 0 if allow_any_port else 1
        port = int(port_text) if port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 else -1
        if not lowest <= port <= 65535:
            raise ConfigError(f"{where}: {text!r} has port {port_text!r}; it must be {lowest} to 65535")
        return cls(host, port, scheme)

    def with_scheme(self, scheme: str) -> Endpoint:
        """The same place, spoken to in another way."""
        return attrs.evolve(self, scheme=scheme)

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address, without a zone; None for a name."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return None

    @property
    def is_ipv6(self) -> bool:
        return _is_ipv6(self.host)

    @property
    def is_unspecified(self) -> bool:
        """Whether the host is the "any" address (``0.0.0.0`` or ``::``): good to bind, not to connect to."""
        return self.ip is not None and self.ip.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """Whether this is the machine it is asked on, as far as the address says; False for a name."""
        return self.ip is not None and self.ip.is_loopback

    @property
    def beyond_loopback(self) -> bool:
        """Whether other machines may reach a listener here, as far as the address says; False for a name."""
        return self.ip is not None and not self.ip.is_loopback

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self._address}"

    @property
    def _address(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self._address if self.scheme == "tcp" else self.url


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
