"""Sinks for :class:`~skippy.telemetry.Telemetry`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from .core import Event, Level
from .logs import get_logger


class StructlogSink:
    """One structlog entry per event: summary at info, debug at debug."""

    blocking = True

    def __init__(self, logger: Any | None = None) -> None:
        self._logger = logger if logger is not None else get_logger("skippy.telemetry")

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            log = self._logger.debug if event.level is Level.DEBUG else self._logger.info
            fields = event.as_dict()
            name = fields.pop("event")
            del fields["level"], fields["time_ns"]
            log(name, **fields)


class JsonLinesSink:
    """One JSON object per line, on stderr unless told otherwise."""

    blocking = True

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, events: Sequence[Event]) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        stream.write("".join(json.dumps(event.as_dict(), default=str) + "\n" for event in events))
        stream.flush()


class MemorySink:
    """Keeps events in ``events``; for tests and for hosts that look at them."""

    blocking = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
