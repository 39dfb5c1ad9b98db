"""How a stage process ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

UNRETURNED: Final = 70
"""Exit status of a process in which something did not return within the grace period; ``EX_SOFTWARE``."""
OVERDUE: Final = "was killed because it did not stop within the grace period"

_HINTS: Final = {
    signal.SIGKILL: "perhaps out of memory",
    signal.SIGABRT: "native code gave up",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
        "a crash in native code",
    ),
}


def manner_of_death(returncode: int) -> str:
    """``was killed by signal SIGSEGV (a crash in native code)`` or ``exited with status 1``.

    Args:
        returncode: as :class:`subprocess.Popen` has it: a signal is a negative number.
    """
    if returncode < 0:
        return f"was killed by signal {_signal_name(-returncode)}"
    hint = " (a native call outlived the grace period)" if returncode == UNRETURNED else ""
    return f"exited with status {returncode}{hint}"


def obituary(returncode: int, tail: Sequence[str], *, overdue: bool = False) -> str:
    """Its :func:`manner_of_death`, with its own error if it gave one, else with its last lines.

    Args:
        overdue: SIGKILL was ours, at the end of the grace period.
    """
    ended = OVERDUE if overdue and returncode == -signal.SIGKILL else manner_of_death(returncode)
    words = [line for line in tail if line.strip()]
    for line in reversed(words):
        if returncode > 0 and line.startswith("error: "):
            return f"{ended}: {line.removeprefix('error: ')}"
    return ended + ("; its last lines were:\n" + "\n".join(f"  {line}" for line in words) if words else "")


def _signal_name(number: int) -> str:
    try:
        known = signal.Signals(number)
    except ValueError:
        return str(number)
    return f"{known.name} ({_HINTS[known]})" if known in _HINTS else known.name
