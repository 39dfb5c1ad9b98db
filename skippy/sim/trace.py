"""What happened in a simulation, line by line."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

import trio


class Trace:
    """Lines with the virtual time they happened at; the same seed gives the same lines, byte for byte."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, text: str) -> None:
        self.lines.append(f"{trio.current_time():12.6f} {text}")

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)

    @property
    def digest(self) -> str:
        """Of all lines."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()


class LogTrace(logging.Handler):
    """Puts what stages and front end log as warnings and errors into a trace.

    Attributes:
        faults: entries that carry an exception: something failed that was not foreseen.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.WARNING)
        self._trace = trace
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        entry = record.msg if isinstance(record.msg, Mapping) else {"event": record.getMessage()}
        text = str(entry.get("event"))
        for name in ("reason", "error", "lane", "peer"):
            if name in entry:
                text += f" {name}={entry[name]}"
        error = entry.get("exc_info") or (record.exc_info[1] if record.exc_info else None)
        if error is not None:
            text += f": {error!r}"
            self.faults.append(text)
        self._trace(f"log: {text}")
