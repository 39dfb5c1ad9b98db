"""What SIGUSR1 is answered with: counts of this process, one log entry for each signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from skippy.telemetry import get_logger

if TYPE_CHECKING:
    from skippy.embed import Stage

STATISTICS_SIGNAL: Final[signal.Signals | None] = getattr(signal, "SIGUSR1", None)
"""None on platforms that have no such signal."""

_STARTED: Final = time.monotonic()
_PROC: Final = Path("/proc/self")


def process_statistics() -> dict[str, Any]:
    """Counts of this process; inside trio. Memory is None where the system does not tell."""
    return {
        "pid": os.getpid(),
        "uptime_secs": round(time.monotonic() - _STARTED, 3),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "threads": _threads(),
        "descriptors": _descriptors(),
        "resident_bytes": _resident_bytes(),
    }


def stage_statistics(stage_id: str, stage: Stage | None) -> dict[str, Any]:
    """Counts of a process that is a stage; ``stage`` is None until its model is loaded."""
    counts: dict[str, Any] = {"stage_id": stage_id, "lanes": {}, "sequences": None, "free_sequences": None}
    if stage is not None:
        counts["lanes"] = stage.lane_states()
        counts["sequences"] = stage.info.max_sequences
        counts["free_sequences"] = stage.context.scheduler.free_sequences
    return counts | process_statistics()


def log_statistics(counts: dict[str, Any]) -> None:
    """One log entry."""
    get_logger("skippy").info("statistics", **counts)


async def answer_statistics_signal(
    answer: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``answer`` for each SIGUSR1 until cancelled. Main thread only."""
    if STATISTICS_SIGNAL is None:
        task_status.started()
        return
    with trio.open_signal_receiver(STATISTICS_SIGNAL) as signals:
        task_status.started()
        async for _ in signals:
            answer()


def _threads() -> int:
    """Of the system, where it tells; else those that Python knows."""
    with contextlib.suppress(OSError):
        return len(os.listdir(_PROC / "task"))
    return threading.active_count()


def _descriptors() -> int:
    # The listing itself has one open.
    return len(os.listdir("/dev/fd")) - 1


def _resident_bytes() -> int | None:
    with contextlib.suppress(OSError):
        return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
