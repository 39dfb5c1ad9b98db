"""Peers that a listener refuses: the log tells of each once, not once per lane and attempt."""

from __future__ import annotations

from collections import deque

from skippy.telemetry import get_logger

log = get_logger("skippy.stage")

MAX_REMEMBERED = 64


class Refusals:
    """The last MAX_REMEMBERED different refusals, by host, since one of that host was admitted."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, str]] = deque(maxlen=MAX_REMEMBERED)

    def tell(self, peer: str, reason: str) -> None:
        """Log a refusal that is new. Its host may be refused for several reasons at a time.

        Args:
            peer: address and port; the port is another one with each attempt.
        """
        what = (_host(peer), reason)
        if what not in self._told:
            self._told.append(what)
            log.warning("a connection was refused", peer=peer, reason=reason)

    def forget(self, peer: str) -> None:
        """A peer on that host was admitted: what it is refused for from now on is news."""
        if self._told:
            host = _host(peer)
            self._told = deque((what for what in self._told if what[0] != host), maxlen=MAX_REMEMBERED)


def _host(peer: str) -> str:
    return peer.rpartition(":")[0]
