"""Trace points: one line at the call site, one comparison when off, never a wait.

    telemetry.emit(names.STAGE_BINARY_SERVER_START, bind_addr=str(endpoint))
    with telemetry.span(names.STAGE_BINARY_RECV, connection=7) as span:
        ...
        span["activation_bytes"] = len(activation)

Events go into a bounded queue; a full queue drops the new event and counts it. :meth:`Telemetry.serve` is the
one task that hands them to the sink.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import attrs
import trio

STDERR_VARIABLE = "SKIPPY_TELEMETRY_STDERR"
DEFAULT_QUEUE_CAPACITY = 1024
BATCH = 128
FLUSH_SECONDS = 2.0


class Level(enum.IntEnum):
    """How much is recorded. A trace point passes when its level is at most the configured one."""

    OFF = 0
    SUMMARY = 1
    DEBUG = 2

    @classmethod
    def parse(cls, text: str) -> Level:
        """``off``, ``summary`` or ``debug``; ValueError for anything else."""
        try:
            return cls[text.upper()]
        except KeyError:
            raise ValueError(f"telemetry level {text!r} is not one of off, summary, debug") from None


@attrs.frozen(slots=True, kw_only=True)
class Event:
    """One recorded trace point.

    Attributes:
        name: from :mod:`skippy.telemetry.names`.
        level: level of the trace point (never OFF).
        time_ns: start, nanoseconds since the Unix epoch.
        elapsed_ms: duration of a span; None for an instant.
        attributes: JSON-like values, those common to the process first.
    """

    name: str
    level: Level
    time_ns: int
    elapsed_ms: float | None
    attributes: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """A flat mapping for a log line: event, level, time, elapsed_ms (spans only), then the attributes."""
        head: dict[str, Any] = {"event": self.name, "level": self.level.name.lower(), "time_ns": self.time_ns}
        if self.elapsed_ms is not None:
            head["elapsed_ms"] = round(self.elapsed_ms, 3)
        return head | {key: value for key, value in self.attributes.items() if key not in head}


class Sink(Protocol):
    """Where events end up."""

    @property
    def blocking(self) -> bool:
        """Whether ``write`` may block; if so it runs in a worker thread."""

    def write(self, events: Sequence[Event]) -> None:
        """Take events, oldest first. An exception loses them and is counted as an export error."""


@attrs.frozen(slots=True, kw_only=True)
class TelemetryStats:
    """Counts since start: taken into the queue, written, lost to a full queue, failed batches."""

    queued: int = 0
    sent: int = 0
    dropped: int = 0
    export_errors: int = 0


class Span:
    """A timed operation. Items set inside the block become attributes; leaving the block records it.

    An exception that leaves the block is recorded as ``error`` (its type's name) and goes on.
    """

    __slots__ = ("_attributes", "_level", "_name", "_start", "_telemetry", "_time_ns")

    def __init__(
        self, telemetry: Telemetry | None, name: str, level: Level, attributes: dict[str, Any]
    ) -> None:
        self._telemetry = telemetry
        self._name = name
        self._level = level
        self._attributes = attributes
        self._time_ns = 0
        self._start = 0

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the block was entered; 0.0 for a span that is not recorded."""
        return (time.perf_counter_ns() - self._start) / 1e6 if self._telemetry is not None else 0.0

    def __setitem__(self, key: str, value: Any) -> None:
        if self._telemetry is not None:
            self._attributes[key] = value

    def __enter__(self) -> Span:
        if self._telemetry is not None:
            self._time_ns = time.time_ns()
            self._start = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._telemetry is None:
            return
        elapsed = self.elapsed_ms
        if kind is not None:
            self._attributes["error"] = kind.__name__
        self._telemetry.record(self._name, self._level, self._time_ns, elapsed, self._attributes)


_UNRECORDED = Span(None, "", Level.OFF, {})


class Telemetry:
    """Takes events from any thread without ever blocking; hands them to a sink in :meth:`serve`.

    Args:
        level: what passes.
        sink: where events go; None records nothing, whatever the level.
        capacity: events the queue holds, at least 1; when it is full new events are dropped and counted.
        context: attributes added to every event, such as run and stage ids.
        flush_seconds: how long ``serve`` may take, once cancelled, to hand over what is still queued.
    """

    def __init__(
        self,
        level: Level = Level.SUMMARY,
        sink: Sink | None = None,
        *,
        capacity: int = DEFAULT_QUEUE_CAPACITY,
        context: Mapping[str, Any] | None = None,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"telemetry queue capacity is {capacity}; it must be at least 1")
        self.level = level if sink is not None else Level.OFF
        self._sink = sink
        self._capacity = capacity
        self._context = dict(context or {})
        self._flush_seconds = flush_seconds
        self._lock = threading.Lock()
        self._sink_lock = threading.Lock()
        self._queue: deque[Event] = deque()
        self._waker: tuple[trio.lowlevel.TrioToken, trio.Event] | None = None
        self._queued = self._sent = self._dropped = self._export_errors = 0

    @classmethod
    def from_environment(
        cls,
        level: Level = Level.SUMMARY,
        *,
        capacity: int = DEFAULT_QUEUE_CAPACITY,
        context: Mapping[str, Any] | None = None,
    ) -> Telemetry:
        """A process's telemetry: structlog, or JSON lines on stderr if ``SKIPPY_TELEMETRY_STDERR`` is set.

        The variable, set to anything, also lifts level off to debug.
        """
        from .sinks import JsonLinesSink, StructlogSink

        if STDERR_VARIABLE in os.environ:
            level = Level.DEBUG if level is Level.OFF else level
            return cls(level, JsonLinesSink(), capacity=capacity, context=context)
        return cls(level, StructlogSink(), capacity=capacity, context=context)

    @property
    def stats(self) -> TelemetryStats:
        with self._lock:
            return TelemetryStats(
                queued=self._queued,
                sent=self._sent,
                dropped=self._dropped,
                export_errors=self._export_errors,
            )

    def enabled(self, level: Level) -> bool:
        """Whether a trace point of this level is recorded; for call sites whose attributes cost something."""
        return self.level >= level

    def emit(self, name: str, *, level: Level = Level.SUMMARY, **attributes: Any) -> None:
        """Record an instant. Thread-safe; never blocks, never raises."""
        if self.level >= level:
            self.record(name, level, time.time_ns(), None, attributes)

    def span(self, name: str, *, level: Level = Level.DEBUG, **attributes: Any) -> Span:
        """A context manager that records the block it wraps. Thread-safe; use each span once."""
        return Span(self, name, level, attributes) if self.level >= level else _UNRECORDED

    def record(
        self,
        name: str,
        level: Level,
        time_ns: int,
        elapsed_ms: float | None,
        attributes: Mapping[str, Any],
    ) -> None:
        """Queue one event that already passed its level; drops and counts it if the queue is full."""
        if self._sink is None:
            return
        event = Event(
            name=name,
            level=level,
            time_ns=time_ns,
            elapsed_ms=elapsed_ms,
            attributes={**self._context, **attributes},
        )
        with self._lock:
            if len(self._queue) >= self._capacity:
                self._dropped += 1
                return
            self._queue.append(event)
            self._queued += 1
            waker = self._waker
            # One wake-up per burst: the serving task asks again only after it has emptied the queue.
            self._waker = None
        if waker is not None:
            token, wake = waker
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(wake.set, idempotent=True)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hand queued events to the sink until cancelled, then what is left, within ``flush_seconds``."""
        task_status.started()
        try:
            while True:
                wake = trio.Event()
                with self._lock:
                    waiting = not self._queue
                    self._waker = (trio.lowlevel.current_trio_token(), wake) if waiting else None
                if waiting:
                    await wake.wait()
                await self._hand_over()
        finally:
            with self._lock:
                self._waker = None
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self._flush_seconds):
                await self._hand_over()  # at least once: it also waits for a write that was abandoned
                while self._queue:
                    await self._hand_over()

    async def _hand_over(self) -> None:
        """Write one batch; cancellation abandons a blocked write to its thread."""
        if self._sink is None:
            await trio.lowlevel.checkpoint()
        elif self._sink.blocking:
            await trio.to_thread.run_sync(self._write, self._sink, abandon_on_cancel=True)
        else:
            self._write(self._sink)
            await trio.lowlevel.checkpoint()

    def _write(self, sink: Sink) -> None:
        """Take a batch and write it. One at a time, also when an earlier one was abandoned and still runs."""
        with self._sink_lock:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if not batch:
                return
            try:
                sink.write(batch)
            except Exception:  # a broken sink must not end the service; the count says so
                with self._lock:
                    self._export_errors += 1
                return
            with self._lock:
                self._sent += len(batch)


NULL_TELEMETRY = Telemetry(Level.OFF)
"""Records nothing; the default where no telemetry is given."""
