"""A worker process: jobs come in on standard input, answers go out on standard output.

Frames, both ways: a 4-byte big-endian length, then ASCII JSON. The worker says ``{"ready": true}`` first,
then answers one job after the other; some take a frame before that. An endless loop ends in SIGPROF, a huge
allocation in a MemoryError, whose answer has the kind ``memory``; the worker ends behind that one, and at the
end of its input.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER_BYTES = 4


def serve(
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    cpu_secs: float,
    memory_bytes: int,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Answer jobs until the input ends.

    Args:
        answer: the answer to one job; must not raise.
        cpu_secs: processor time of one job.
        memory_bytes: address space of this process.
        prepare: takes the first frame, which is no job and comes from no stranger, before it is ready.
    """
    # A terminal's Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(memory_bytes)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    if prepare is not None and (opening := read_frame(source)) is not None:
        prepare(opening)
    target.write(pack_frame({"ready": True}))
    target.flush()
    while (job := read_frame(source)) is not None:
        _limit_time(cpu_secs)
        result = answer(job)
        _limit_time(0)
        target.write(pack_frame(result))
        target.flush()
        if result.get("kind") == "memory":
            return


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, or None at the end of input."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    value: dict[str, Any] = json.loads(body)
    return value


def pack_frame(value: dict[str, Any]) -> bytes:
    """A frame. ASCII escapes carry even lone surrogates."""
    body = json.dumps(value).encode("ascii")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, OSError, ValueError):
        pass  # not on this platform; the parent's deadline still holds


def _limit_time(seconds: float) -> None:
    # The default action of SIGPROF ends the process, even inside C code that never looks for signals.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
