"""structlog configuration of a skippy process: human lines on a terminal, JSON lines anywhere else."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(*, json_lines: bool | None = None, debug: bool = False) -> None:
    """Send structlog's output to stderr. Call once, in a process that skippy owns; a host configures its own.

    Args:
        json_lines: JSON or human lines; None chooses JSON when stderr is not a terminal.
        debug: also show entries of level debug.
    """
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    renderer: structlog.typing.Processor
    renderer = structlog.processors.JSONRenderer(default=str) if as_json else structlog.dev.ConsoleRenderer()
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
