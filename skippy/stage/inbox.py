"""Sockets that the engine's thread waits on itself, beside its queue, between two native calls."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable

Ready = Callable[[], bool]
"""Called when something can be received; False: watch no longer."""


class Inbox:
    """What the engine's thread watches. All but :meth:`wake` belong to that thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._asleep = False

    @property
    def watching(self) -> bool:
        """Whether there is any socket to wait for."""
        return len(self._selector.get_map()) > 1

    def watch(self, descriptor: int, ready: Ready) -> None:
        """Call ``ready`` from :meth:`wait` whenever the socket can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, ready)

    def unwatch(self, descriptor: int, ready: Ready) -> None:
        """Undo :meth:`watch`, unless that is done; the descriptor may be closed, or another one's by now."""
        key = self._selector.get_map().get(descriptor)
        if key is not None and key.data == ready:
            self._selector.unregister(descriptor)

    def wait(self, seconds: float | None, has_work: Callable[[], bool]) -> None:
        """Wait until a socket can be read, or somebody calls :meth:`wake`, at most ``seconds``.

        ``has_work`` is asked before falling asleep: whoever gives work and calls ``wake`` is not missed.
        """
        self._asleep = True
        try:
            events = self._selector.select(0.0 if has_work() else seconds)
        finally:
            self._asleep = False
        for key, _ in events:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif not key.data():
                self.unwatch(key.fd, key.data)

    def wake(self) -> None:
        """End a :meth:`wait`. From any thread."""
        if self._asleep:
            with contextlib.suppress(BlockingIOError, OSError):  # it has been woken enough, or is over
                self._waker.send(b"\0")

    def close(self) -> None:
        self._selector.close()
        self._woken.close()
        self._waker.close()
