"""What stages write to stderr: log entries, a line of JSON each, and words of native code and the like."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any, Final

import attrs
import trio

from skippy.telemetry import get_logger

log = get_logger("skippy")

PERIOD_SECS = 60.0
MAX_PER_PERIOD = 20
"""Different warnings of one stage that are passed on within PERIOD_SECS; the rest are left out."""

_WEIGHTY: Final = {"warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}


@attrs.frozen(slots=True)
class StageLine:
    """A line of a stage.

    Attributes:
        text: as it was written.
        entry: the log entry, or trace point, that it is; None for other words.
    """

    text: str
    entry: dict[str, Any] | None

    @classmethod
    def parse(cls, text: str) -> StageLine:
        entry = None
        if text.startswith("{"):
            with contextlib.suppress(ValueError):  # other words after all
                entry = json.loads(text)
        return cls(text, entry if isinstance(entry, dict) and "event" in entry else None)

    @property
    def level(self) -> int:
        """As :mod:`logging` has it; anything below a warning is INFO, and so are other words."""
        return _WEIGHTY.get(str((self.entry or {}).get("level")), logging.INFO)

    @property
    def may_explain_an_end(self) -> bool:
        """It is a warning, an error, or no log entry at all, such as the last words of native code."""
        return self.entry is None or self.level > logging.INFO


class Warnings:
    """Passes a stage's warnings and errors on to the log of this process, each as one line.

    The same one again is left out for what remains of PERIOD_SECS, and so is what goes beyond MAX_PER_PERIOD.
    """

    def __init__(self, stage_id: str) -> None:
        self._stage_id = stage_id
        self._told: set[str] = set()
        self._ends_at = 0.0

    def take(self, line: StageLine) -> None:
        """Log what ``line`` says, unless it is less than a warning. Needs Trio's clock; never waits."""
        if line.entry is None or line.level < logging.WARNING:
            return
        if (now := trio.current_time()) >= self._ends_at:
            self._told.clear()
            self._ends_at = now + PERIOD_SECS
        fields = {key: _one_line(value) for key, value in line.entry.items() if key != "timestamp"}
        what = json.dumps(fields, sort_keys=True)
        if what in self._told or len(self._told) > MAX_PER_PERIOD:
            return
        self._told.add(what)
        if len(self._told) > MAX_PER_PERIOD:
            log.warning(f"[{self._stage_id}] warns of more than is shown here; skippy run -v shows it all")
            return
        del fields["level"]
        log.log(line.level, f"[{self._stage_id}] {fields.pop('event')}", **fields)


def _one_line(value: Any) -> Any:
    """The last line of a text, which is where a traceback says what has happened."""
    return value.rstrip().rpartition("\n")[2] if isinstance(value, str) else value
