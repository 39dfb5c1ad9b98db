"""SIGINT, SIGTERM and SIGHUP of a process that serves: a stop in order, and an end that is not put off."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

import trio

from skippy.workers.obituary import UNRETURNED

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSIST_SECS: Final = 0.2
"""A signal that comes sooner after the first one is the same one: timeout(1) and others send theirs to a
process and once more to its group."""


class Stop:
    """A stop that may be requested once, at any time, from a signal handler or another thread.

    Attributes:
        requested: set in Trio's turn after the request.
    """

    def __init__(self) -> None:
        self.requested = trio.Event()
        self._asked = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._in_order = False
        self._at_once = False

    def request(self, *, at_once: bool = False) -> None:
        """Never waits; safe to call twice.

        Args:
            at_once: whoever wanted to end by itself is cancelled all the same.
        """
        self._asked = True
        self._at_once = self._at_once or at_once
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._act, idempotent=True)

    def _act(self) -> None:
        self.requested.set()
        if self._at_once or not self._in_order:
            self._scope.cancel()

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run ``main``, which a request cancels unless it has said :meth:`in_order` before."""
        self._token = trio.lowlevel.current_trio_token()
        if self._asked:
            self._act()
        with self._scope:
            await main()

    def in_order(self) -> None:
        """From here on the caller waits for ``requested`` and ends by itself: it is not cancelled."""
        self._in_order = True


@contextlib.contextmanager
def stop_signals(
    hard_secs: float, *, abandon: Callable[[], object] = lambda: None, patient: bool = False
) -> Iterator[Stop]:
    """Turn the first stop signal into a request to stop, for the length of the block. Main thread only.

    If the block has not been left ``hard_secs`` after the signal, whatever the event loop or other threads
    are doing, the process calls ``abandon`` and exits with status 70. Another signal does that at once, with
    status 128 + its number.

    SIGINT and SIGHUP that were ignored before stay so, as for any program behind ``nohup``.

    Args:
        patient: further signals change nothing, and none is ignored: the process that sends them decides.
    """
    stop = Stop()
    times: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    asked_at: float | None = None

    def leave(status: int) -> NoReturn:
        try:
            abandon()
        finally:  # whatever comes of that
            os._exit(status)

    def watch() -> None:
        seconds = times.get()
        if seconds is not None:
            try:
                times.get(timeout=seconds)
            except queue.Empty:
                leave(UNRETURNED)

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            times.put(hard_secs)
            stop.request()
        elif not patient and time.monotonic() - asked_at >= INSIST_SECS:
            leave(128 + number)

    # It waits here already: starting a thread in a signal handler may deadlock.
    watchdog = threading.Thread(target=watch, name="stop watchdog", daemon=True)
    watchdog.start()
    handlers = {}
    for number in STOP_SIGNALS:
        if patient or number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        times.put(None)
        watchdog.join()


def end_process(status: int) -> NoReturn:
    """Exit within the block of :func:`stop_signals`, when all that must be closed is.

    The interpreter's own clean-up would take another half a second, for what the system frees at once.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
