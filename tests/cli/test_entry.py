"""The first moments of the command."""

from __future__ import annotations

import signal
import subprocess
import sys

import click
import pytest

from skippy.cli.main import cli

INTERRUPTED = f"""
import builtins, os, signal
real = builtins.__import__

def hook(name, *rest):
    if name == "click":
        os.kill(os.getpid(), {int(signal.SIGINT)})
    return real(name, *rest)

builtins.__import__ = hook
from skippy.cli.entry import main
main()
"""


def test_an_interrupt_while_modules_load_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_big_is_loaded_before_that() -> None:
    code = "import sys, skippy.cli.entry; print(*{'click', 'trio', 'skippy.embed'}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "")


def imported(*modules: str) -> set[str]:
    code = f"import sys; from skippy.cli.main import cli; import {', '.join(modules)}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split())


def test_a_process_imports_what_its_command_needs() -> None:
    """Each stage is a process: without this their start took half as long again."""
    http = {"skippy.frontend.app", "quart", "hypercorn", "httpx", "jinja2"}
    assert not imported("skippy.cli.child", "skippy.cli.serve") & {*http, "pytest", "llama_cpp"}
    assert not imported("skippy.cli.run") & {*http, "pytest", "llama_cpp", "skippy.stage"}
    assert not imported("skippy.cli.kv") & {"trio", "numpy", "skippy.stage"}
    assert not imported("skippy.cli.top") & {"numpy", "skippy.stage"}


def test_every_command_is_where_the_command_line_looks() -> None:
    context = click.Context(cli)
    names = cli.list_commands(context)
    assert {"run", "serve-openai", "chat", "sim"} <= set(names)
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
    assert cli.get_command(context, "serves") is None


def test_a_command_that_there_is_not() -> None:
    with pytest.raises(click.UsageError, match="No such command 'serves'"):
        cli.main(["serves"], standalone_mode=False)
