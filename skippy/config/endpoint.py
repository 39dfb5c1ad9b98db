"""Network endpoints as users write them."""

from __future__ import annotations

import ipaddress

import attrs

from .errors import ConfigError

_SCHEME = "tcp://"
_FORMS = "write host:port or tcp://host:port, with brackets around an IPv6 address"


@attrs.frozen(slots=True)
class Endpoint:
    """A host (name or IP address, IPv6 without brackets) and a TCP port; port 0 asks the system for one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, where: str = "endpoint", allow_any_port: bool = False) -> Endpoint:
        """Read ``host:port`` or ``tcp://host:port``; IPv6 addresses stand in brackets.

        Args:
            text: what the user wrote.
            where: names the option or key in errors.
            allow_any_port: accept port 0 (to bind, never to connect).

        Raises:
            ConfigError: with ``where``, the text, and the form that would be right.
        """
        rest = text.removeprefix(_SCHEME)
        if "://" in rest:
            raise ConfigError(f"{where}: {text!r} has a scheme other than tcp://; {_FORMS}")
        host, colon, port_text = rest.rpartition(":")
        if not colon or not host:
            raise ConfigError(f"{where}: {text!r} is not an endpoint; {_FORMS}")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if not _is_ipv6(host):
                raise ConfigError(f"{where}: {text!r} has no IPv6 address between its brackets")
        elif ":" in host:
            raise ConfigError(f"{where}: {text!r} has several colons; {_FORMS}")
        if any(character.isspace() or character in "/[]@?#" for character in host):
            raise ConfigError(f"{where}: {text!r} has characters that no host name has; {_FORMS}")
        lowest = 0 if allow_any_port else 1
        port = int(port_text) if port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 else -1
        if not lowest <= port <= 65535:
            raise ConfigError(f"{where}: {text!r} has port {port_text!r}; it must be {lowest} to 65535")
        return cls(host, port)

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
    def url(self) -> str:
        return f"{_SCHEME}{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
