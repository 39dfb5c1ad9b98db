"""Calls from the engine's thread into the event loop: what ``run_sync_soon`` does, at less cost.

Every token needs one. Trio's way takes a lock and, to be woken, two receptions of which the second one fails;
here it is one byte in a pipe, and none while one is on its way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

import trio


class Doorbell:
    """Runs calls in the event loop's thread, in order, while :meth:`answer` runs. To be closed."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._rung = False
        """There is a byte in the pipe, or about to be."""
        self._read_end, self._write_end = os.pipe()

    def leave(self, call: Callable[[], object]) -> None:
        """Have ``call``, which must not wait, run after the next :meth:`ring` at the latest. Any thread."""
        self._calls.append(call)

    def ring(self) -> None:
        """Have what was left run soon; nothing comes of it after :meth:`close`. Any thread."""
        # `answer` takes the bell for silent before it looks for calls, so none of them is missed.
        if self._calls and not self._rung:
            self._rung = True
            os.write(self._write_end, b"\0")

    async def answer(self) -> None:
        """Run what is left, until cancelled; what a call raises is raised here."""
        while True:
            await trio.lowlevel.wait_readable(self._read_end)
            os.read(self._read_end, 64)
            self._rung = False
            self._run_calls()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Run what is left, once more, and end. Not while :meth:`answer` runs."""
        self._rung = True  # nothing is written any more
        os.close(self._read_end)
        os.close(self._write_end)
        self._run_calls()
