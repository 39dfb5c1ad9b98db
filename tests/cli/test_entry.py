"""The first moments of the command."""

from __future__ import annotations

import signal
import subprocess
import sys

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
