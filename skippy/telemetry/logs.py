"""Logs: structured entries that go through the standard library's logging.

A host sees them as any library's: nothing on its terminal but warnings, unless it asks for more. A process
that skippy owns calls :func:`configure_logging`: human lines on a terminal, JSON lines anywhere else.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

ROOT = "skippy"
QUIET_SECS: Final = 600.0


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose entries are an event and fields: ``log.info("listening", port=1)``.

    The record's message is the mapping of both, which any handler can print.

    Args:
        name: ``skippy``, or a name below it.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        cache_logger_on_first_use=True,
    )
    return logger


class RareWarnings:
    """Warnings that every request may give cause for: each is logged once in ten minutes. Any thread.

    The first one after that says how many were left out (``left_out``).
    """

    def __init__(
        self, log: structlog.stdlib.BoundLogger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def tell(self, event: str, **fields: Any) -> None:
        """Log ``event``, or count it. ``event`` is one of a fixed few; what varies goes into ``fields``."""
        now, told = self._clock(), self._told.get(event)
        if told is not None and now - told < QUIET_SECS:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._told[event] = now
        if left_out := self._left_out.pop(event, 0):
            fields["left_out"] = left_out
        self._log.warning(event, **fields)


def configure_logging(*, json_lines: bool | None = None, debug: bool = False) -> None:
    """Send logs to stderr. Call once, in a process that skippy owns; a host configures its own logging.

    Args:
        json_lines: JSON or human lines; None chooses JSON when stderr is not a terminal.
        debug: also show entries of level debug.
    """
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    renderer: list[structlog.typing.Processor]
    if as_json:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        renderer = [structlog.dev.ConsoleRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            # For entries of other libraries, which come as plain text.
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(ROOT).setLevel(logging.DEBUG if debug else logging.INFO)
