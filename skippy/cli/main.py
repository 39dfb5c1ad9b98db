"""The ``skippy`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from skippy import __version__

from . import (
    certify,
    chat,
    child,
    config_docs,
    example,
    failure_table,
    kv,
    models,
    run,
    serve,
    sim,
    top,
)
from .errors import explain, report


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="skippy")
def cli() -> None:
    """Staged LLM inference: a model cut into layer ranges, one process per range, one OpenAI endpoint."""


for command in (
    run.run,
    chat.chat,
    kv.kv,
    top.top,
    models.inspect,
    models.slice_,
    models.package,
    models.fetch_,
    certify.certify,
    serve.serve_binary,
    serve.serve_openai,
    serve.serve,
    example.example_config,
    sim.sim,
    failure_table.failure_table,
    child.stage_child,
    config_docs.config_docs,
):
    cli.add_command(command)


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
