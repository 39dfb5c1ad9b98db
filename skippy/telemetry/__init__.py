"""Spans and events of the running system. A leaf: anyone may import it, it imports nothing of skippy."""

from . import names
from .core import NULL_TELEMETRY, STDERR_VARIABLE, Event, Level, Sink, Span, Telemetry, TelemetryStats
from .logs import RareWarnings, configure_logging, get_logger
from .sinks import JsonLinesSink, MemorySink, StructlogSink

__all__ = [
    "NULL_TELEMETRY",
    "STDERR_VARIABLE",
    "Event",
    "JsonLinesSink",
    "Level",
    "MemorySink",
    "RareWarnings",
    "Sink",
    "Span",
    "StructlogSink",
    "Telemetry",
    "TelemetryStats",
    "configure_logging",
    "get_logger",
    "names",
]
