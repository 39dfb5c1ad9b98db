"""The clock that stages measure their work on, which decides what waits for what and how prompts are cut.

Deadlines are Trio's. This one may be read in the engine's thread, and a simulation brings its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_source: Callable[[], float] = time.perf_counter


def seconds() -> float:
    """Of a clock that only differences mean something on."""
    return _source()


def microseconds() -> int:
    """As :func:`seconds`, in whole µs."""
    return int(_source() * 1e6)


@contextlib.contextmanager
def measured_on(source: Callable[[], float]) -> Iterator[None]:
    """For the length of the block, all stages of this process measure on ``source``."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
