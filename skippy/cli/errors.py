"""Errors that end a command: one line on stderr and an exit code, never a traceback.

Exit code 2: the command line or a configuration file is wrong. Exit code 1: something failed later.
"""

from __future__ import annotations

import socket

import click

USAGE = 2
FAILURE = 1


class CliError(click.ClickException):
    """A failure with a text for users (exit code 1)."""

    exit_code = FAILURE


class SettingError(click.ClickException):
    """A wrong setting on the command line or in the environment (exit code 2)."""

    exit_code = USAGE


def explain(error: BaseException) -> tuple[str, int] | None:
    """The one line and the exit code for an error that users can act on; None for what must be a bug.

    Of an exception group, the first that can be explained counts, if all others can be too.
    """
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    # Not above: whoever raises one of these has imported it, and who raises none need not.
    from skippy.config import ConfigError
    from skippy.engine import EngineError
    from skippy.models import LayerRangeError, ModelError
    from skippy.stage import StageError, StageStartError
    from skippy.stage.nurseries import leaves
    from skippy.topology import PlanError

    if isinstance(error, BaseExceptionGroup):
        explained = [explain(inner) for inner in leaves(error)]
        return explained[0] if all(explained) else None
    if isinstance(error, ConfigError | PlanError | LayerRangeError | StageStartError):
        return str(error), USAGE
    if isinstance(error, ModelError | EngineError | StageError):
        return str(error), FAILURE
    if isinstance(error, socket.gaierror):
        return f"name resolution failed: {error.strerror}", FAILURE
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", FAILURE
    return None


def report(text: str) -> None:
    """Write ``error: text`` to stderr. Lines after the first, if any, are a child's last words.

    Names of files, and what llama.cpp has said of one, may be meant for a terminal to obey.
    """
    safe = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text.strip())
    click.echo(f"error: {safe}", err=True)
