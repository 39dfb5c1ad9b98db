"""Trace points: levels, queue, delivery, and that none of it can block or fail the caller."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from skippy.telemetry import (
    NULL_TELEMETRY,
    Event,
    JsonLinesSink,
    Level,
    MemorySink,
    RareWarnings,
    StructlogSink,
    Telemetry,
    get_logger,
    names,
)
from skippy.telemetry.logs import QUIET_SECS


async def deliver(telemetry: Telemetry) -> None:
    """Start the service and stop it at once: what is queued is flushed."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("level", "recorded"),
    [(Level.OFF, []), (Level.SUMMARY, ["s"]), (Level.DEBUG, ["s", "d", "span"])],
)
async def test_levels(level: Level, recorded: list[str]) -> None:
    sink = MemorySink()
    telemetry = Telemetry(level, sink)
    telemetry.emit("s")
    telemetry.emit("d", level=Level.DEBUG)
    with telemetry.span("span") as span:
        span["late"] = 1
    await deliver(telemetry)
    assert [event.name for event in sink.events] == recorded
    assert telemetry.stats.sent == len(recorded)


async def test_attributes_of_an_event() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink, context={"run_id": "r"})
    telemetry.emit(names.STAGE_BINARY_SERVER_START, port=1)
    with telemetry.span(names.STAGE_BINARY_RECV, connection=7) as span:
        span["activation_bytes"] = 2304
        assert span.elapsed_ms >= 0
    await deliver(telemetry)
    instant, timed = sink.events
    assert instant.name == "stage.binary_server_start"
    assert instant.level is Level.SUMMARY
    assert instant.elapsed_ms is None
    assert dict(instant.attributes) == {"run_id": "r", "port": 1}
    assert timed.elapsed_ms is not None
    assert timed.elapsed_ms >= 0
    assert dict(timed.attributes) == {"run_id": "r", "connection": 7, "activation_bytes": 2304}
    assert timed.time_ns >= instant.time_ns


async def test_a_span_records_the_error_and_lets_it_through() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.DEBUG, sink)
    with pytest.raises(KeyError), telemetry.span("work"):
        raise KeyError("x")
    await deliver(telemetry)
    assert sink.events[0].attributes["error"] == "KeyError"


def test_nothing_is_kept_when_off() -> None:
    with NULL_TELEMETRY.span("a") as one, NULL_TELEMETRY.span("b") as two:
        one["x"] = 1
        assert one is two
        assert one.elapsed_ms == 0
    NULL_TELEMETRY.emit("c")
    assert not NULL_TELEMETRY.enabled(Level.SUMMARY)
    assert NULL_TELEMETRY.stats.queued == 0


async def test_a_full_queue_drops_and_counts() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink, capacity=3)
    for number in range(5):
        telemetry.emit("e", number=number)
    await deliver(telemetry)
    assert [event.attributes["number"] for event in sink.events] == [0, 1, 2]
    stats = telemetry.stats
    assert (stats.queued, stats.sent, stats.dropped, stats.export_errors) == (3, 3, 2, 0)


async def test_events_are_delivered_while_serving() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            for number in range(300):
                telemetry.emit("e", number=number)
                if number % 100 == 0:
                    await trio.testing.wait_all_tasks_blocked()
                    assert len(sink.events) == number + 1
            nursery.cancel_scope.cancel()
    assert [event.attributes["number"] for event in sink.events] == list(range(300))


async def test_threads_may_emit() -> None:
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink, capacity=10_000)

    def work() -> None:
        for _ in range(500):
            telemetry.emit("e", thread=threading.get_ident())

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            async with trio.open_nursery() as workers:
                for _ in range(4):
                    workers.start_soon(trio.to_thread.run_sync, work)
            nursery.cancel_scope.cancel()
    assert len(sink.events) == 2000
    assert telemetry.stats.sent == 2000


async def test_emitting_after_the_event_loop_ended() -> None:
    telemetry = Telemetry(Level.SUMMARY, MemorySink())

    def other_loop() -> None:
        async def serve() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(telemetry.serve)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

        trio.run(serve)

    await trio.to_thread.run_sync(other_loop)
    telemetry.emit("late")
    assert telemetry.stats.queued == 1


async def test_a_broken_sink_is_counted_and_survived() -> None:
    class Broken:
        blocking = False
        calls = 0

        def write(self, events: Sequence[Event]) -> None:
            self.calls += 1
            raise OSError("disk full")

    sink = Broken()
    telemetry = Telemetry(Level.SUMMARY, sink)
    telemetry.emit("a")
    await deliver(telemetry)
    telemetry.emit("b")
    await deliver(telemetry)
    assert sink.calls == 2
    assert telemetry.stats.export_errors == 2
    assert telemetry.stats.sent == 0


async def test_a_stuck_sink_does_not_hold_up_the_exit(autojump_clock: trio.testing.MockClock) -> None:
    release = threading.Event()

    class Stuck:
        blocking = True

        def write(self, events: Sequence[Event]) -> None:
            release.wait(30)

    telemetry = Telemetry(Level.SUMMARY, Stuck(), flush_seconds=2)
    for _ in range(1000):
        telemetry.emit("a")
    start = trio.current_time()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            nursery.cancel_scope.cancel()
    finally:
        release.set()
    assert trio.current_time() - start == 2


async def test_structlog_sink(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(Level.DEBUG, StructlogSink())
    telemetry.emit("summary", port=1)
    telemetry.emit("debug", level=Level.DEBUG)
    with caplog.at_level("DEBUG", logger="skippy"):
        await deliver(telemetry)
    entries = [record.msg for record in caplog.records]
    assert [(entry["level"], entry["event"]) for entry in entries] == [
        ("info", "summary"),
        ("debug", "debug"),
    ]
    assert entries[0]["port"] == 1


def log_in_a_process(code: str) -> str:
    """What a process that logs writes to stderr; nothing may go to stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ""
    return done.stderr


LOG = """
from skippy.telemetry import *
log = get_logger("skippy.x")
{}
log.info("a", n=1)
log.warning("b", n=2)
"""


def test_a_host_that_configures_nothing_sees_warnings_only() -> None:
    (line,) = log_in_a_process(LOG.format("")).splitlines()
    assert "'event': 'b'" in line


def test_warnings_that_there_is_much_reason_for(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 2.0, QUIET_SECS - 1, QUIET_SECS, QUIET_SECS + 1, 2 * QUIET_SECS])
    warnings = RareWarnings(get_logger("skippy.x"), clock=lambda: next(times))
    for event in "aabaaaa":
        warnings.tell(event, n=1)
    told = [(r.msg["event"], r.msg.get("left_out"), r.msg["n"], r.levelname) for r in caplog.records]  # type: ignore[call-overload,attr-defined]
    assert told == [
        ("a", None, 1, "WARNING"),
        ("b", None, 1, "WARNING"),
        ("a", 2, 1, "WARNING"),
        ("a", 1, 1, "WARNING"),
    ]


def test_a_process_of_ours_writes_json_with_fields_and_those_of_other_libraries() -> None:
    other = (
        "import logging\nconfigure_logging()\nlogging.getLogger('other').warning('from %s', 'elsewhere')\n"
    )
    entries = [json.loads(line) for line in log_in_a_process(LOG.format(other)).splitlines()]
    assert [(entry["event"], entry["level"], entry.get("n")) for entry in entries] == [
        ("from elsewhere", "warning", None),
        ("a", "info", 1),
        ("b", "warning", 2),
    ]


async def test_json_lines() -> None:
    stream = io.StringIO()
    telemetry = Telemetry(Level.DEBUG, JsonLinesSink(stream))
    telemetry.emit("a", path=object, event="not the name")
    with telemetry.span("b"):
        pass
    await deliver(telemetry)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "a"
    assert first["level"] == "summary"
    assert "elapsed_ms" not in first
    assert second["elapsed_ms"] >= 0


@pytest.mark.parametrize(
    ("asked", "level"),
    [(Level.OFF, Level.DEBUG), (Level.SUMMARY, Level.SUMMARY), (Level.DEBUG, Level.DEBUG)],
)
async def test_the_environment_lifts_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: Level, level: Level
) -> None:
    monkeypatch.setenv("SKIPPY_TELEMETRY_STDERR", "")
    telemetry = Telemetry.from_environment(asked, context={"stage_id": "s"})
    assert telemetry.level is level
    telemetry.emit("a")
    await deliver(telemetry)
    event = json.loads(capsys.readouterr().err)
    assert event["event"] == "a"
    assert event["stage_id"] == "s"


def test_off_stays_off_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPPY_TELEMETRY_STDERR", raising=False)
    assert Telemetry.from_environment(Level.OFF).level is Level.OFF


def test_level_names() -> None:
    assert [Level.parse(text) for text in ("off", "summary", "debug")] == list(Level)
    with pytest.raises(ValueError, match="'loud' is not one of off, summary, debug"):
        Level.parse("loud")


def test_a_queue_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Telemetry(capacity=0)


def test_every_name_is_in_use() -> None:
    package = Path(names.__file__).parent.parent
    sources = [path.read_text("utf-8") for path in package.rglob("*.py") if path != Path(names.__file__)]
    constants = [name for name in vars(names) if name.isupper()]
    assert constants
    assert [name for name in constants if not any(f"names.{name}" in source for source in sources)] == []
