"""The ``skippy`` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from skippy import __version__

from .errors import explain, report

_COMMANDS: Final[Mapping[str, str]] = {
    "run": "run:run",
    "chat": "chat:chat",
    "kv": "kv:kv",
    "top": "top:top",
    "inspect": "models:inspect",
    "slice": "models:slice_",
    "package": "models:package",
    "fetch": "models:fetch_",
    "certify": "certify:certify",
    "serve-binary": "serve:serve_binary",
    "serve-openai": "serve:serve_openai",
    "serve": "serve:serve",
    "example-config": "example:example_config",
    "sim": "sim:sim",
    "failure-table": "failure_table:failure_table",
    "stage-child": "child:stage_child",
    "config-docs": "config_docs:config_docs",
}
"""Where each command is: a module of this package, and a name in it."""


class _Commands(click.Group):
    """Imports a command when it is asked for: all of them take seconds, and every stage is a process."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, name = place.split(":")
        command: Any = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="skippy")
def cli() -> None:
    """Staged LLM inference: a model cut into layer ranges, one process per range, one OpenAI endpoint."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted."""
    try:
        code = cli.main(args=arguments, prog_name="skippy", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # whoever read our output has gone
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        text, code = explained
        report(text)
        sys.exit(code)
    sys.exit(code if isinstance(code, int) else 0)
