"""Listening sockets that a command makes itself, so that a port in use is its own clear error."""

from __future__ import annotations

import errno
import socket

from skippy.config import Endpoint

from .errors import CliError

BACKLOG = 128


def listen_on(endpoint: Endpoint, what: str, advice: str = "") -> socket.socket:
    """A TCP socket that listens on ``endpoint`` (port 0: any free one).

    Raises:
        CliError: says what was to listen where, and why it cannot.
    """
    try:
        addresses = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CliError(f"{what} cannot listen on {endpoint}: {error.strerror}") from None
    try:
        # Without it, a restart within a minute of the last connection would find the port taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise CliError(f"{what} cannot listen on {endpoint}: {reason}{advice}") from None
    return listener


def endpoint_of(listener: socket.socket) -> Endpoint:
    """Where a socket listens."""
    host, port = listener.getsockname()[:2]
    return Endpoint(host, port)


def url_host(endpoint: Endpoint) -> Endpoint:
    """An endpoint a client on this machine can connect to."""
    if not endpoint.is_unspecified:
        return endpoint
    return Endpoint("::1" if endpoint.is_ipv6 else "127.0.0.1", endpoint.port)
