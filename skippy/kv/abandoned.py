"""Folders of stages that nobody runs any more: a changed model, setting or cut has another identity.

What such a folder holds is never read again, and no budget counts it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

from skippy.config import ConfigError
from skippy.telemetry import get_logger

from .folders import PrivateFolder

MAX_IDLE_SECS: Final = 30 * 24 * 3600
LOCK_NAME: Final = "owner.lock"
_NAME: Final = re.compile(r"[0-9a-f]{32}")

_log = get_logger("skippy.kv")


def remove_abandoned(directory: Path, *, max_idle_secs: float = MAX_IDLE_SECS) -> list[str]:
    """Remove the folders of stages in ``directory`` that no process uses, nor has opened for that long.

    Anything else in there is left alone, and so is what cannot be removed. Returns the names that are gone.
    """
    try:
        names = sorted(filter(_NAME.fullmatch, os.listdir(directory)))
    except OSError:
        return []
    removed = [
        name for name in names if _idle_secs(directory / name) > max_idle_secs and _remove(directory / name)
    ]
    if removed:
        _log.info("abandoned folders of the prefix cache were removed", folder=str(directory), names=removed)
    return removed


def _idle_secs(path: Path) -> float:
    """For how long no process has opened the folder; 0 if it is none of ours."""
    try:
        return time.time() - os.stat(path / LOCK_NAME, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _remove(path: Path) -> bool:
    """Whether nobody had the folder, and it is gone."""
    try:
        with contextlib.ExitStack() as stack:
            folder = PrivateFolder.open(path)
            stack.callback(folder.close)
            stack.callback(os.close, folder.lock(LOCK_NAME))
            for name in ("states", "quarantine"):
                inner = PrivateFolder.open(path / name, within=folder)
                stack.callback(inner.close)
                for file in inner.names():
                    with contextlib.suppress(OSError):  # the others go all the same
                        inner.remove(file)
                folder.remove(name)
            folder.remove(LOCK_NAME)
            os.rmdir(path)
    except (ConfigError, OSError):
        return False
    return True
