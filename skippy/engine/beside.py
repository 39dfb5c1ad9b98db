"""Calls beside a thread that must not be held up by them."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import attrs

T = TypeVar("T")

_WALL_FACTOR: Final = 20
"""Wall time is so much longer at most: a busy machine is not to be taken for a call that takes too long."""


class RanAway(Exception):
    """A call took too long. It goes on in a thread of its own, to an end that nobody waits for."""


@attrs.define(slots=True, eq=False)
class _Call(Generic[T]):
    function: Callable[[], T]
    done: threading.Event = attrs.field(factory=threading.Event)
    result: T | None = None
    error: BaseException | None = None
    spent: float = 0.0


class _Thread:
    """One thread that works off calls; it is a daemon, since nothing native can be ended from outside."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="beside the engine", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            began = time.thread_time()
            try:
                call.result = call.function()
            except BaseException as exc:  # a panic of native code is no Exception
                call.error = exc
            call.spent = time.thread_time() - began
            call.done.set()

    def put(self, call: _Call[T]) -> None:
        self._calls.put(call)  # type: ignore[arg-type]

    def leave(self) -> None:
        """It ends behind what it is doing."""
        self._calls.put(None)

    def give_way(self) -> None:
        """What it still does comes behind all else, where threads have priorities of their own."""
        if sys.platform == "linux" and self.thread.native_id is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self.thread.native_id, 19)

    def processor_secs(self) -> float | None:
        """What it has used up so far; None where the system does not tell."""
        get_clock = getattr(time, "pthread_getcpuclockid", None)
        if get_clock is None or self.thread.ident is None or not self.thread.is_alive():
            return None
        return time.clock_gettime(get_clock(self.thread.ident))


class Beside:
    """Runs calls one after the other in another thread, and leaves those that take too long behind.

    For calls that let go of the interpreter's lock while they work. One caller at a time; :meth:`settle` and
    :meth:`close` from any thread.
    """

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._runaways: list[threading.Thread] = []

    def run(self, function: Callable[[], T], secs: float) -> tuple[T, float]:
        """``function()``, or what it raises, and the processor time that it took.

        Raises:
            RanAway: it took more than ``secs`` of processor time.
        """
        if self._thread is None:
            self._thread = _Thread()
        thread, call = self._thread, _Call(function)
        before = thread.processor_secs() or 0.0
        latest = time.monotonic() + _WALL_FACTOR * secs
        thread.put(call)
        while not call.done.wait(secs):
            now = thread.processor_secs()
            if (now is not None and now - before > secs) or time.monotonic() > latest:
                thread.leave()
                thread.give_way()
                self._runaways = [other for other in self._runaways if other.is_alive()] + [thread.thread]
                self._thread = None
                raise RanAway
        if call.error is not None:
            raise call.error
        return call.result, call.spent  # type: ignore[return-value]

    def settle(self, most: int, secs: float) -> bool:
        """Wait until no more than ``most`` calls that ran away still run; False: after ``secs`` they do."""
        latest = time.monotonic() + secs
        for thread in self._runaways[: max(0, len(self._runaways) - most)]:
            thread.join(max(0.0, latest - time.monotonic()))
        return sum(thread.is_alive() for thread in self._runaways) <= most

    def close(self) -> None:
        """Its thread ends, if there is one. Does not wait."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.leave()
