"""Signals while a command does blocking work outside of trio."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + number) in the block, so that it cleans up as after Ctrl-C.

    Their default action would leave half-written files behind. A signal that is ignored stays so, and one
    that somebody handles stays theirs. Main thread only.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    taken = [number for number in ENDINGS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
