"""Progress on a terminal; silence anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

_WORDS = {
    "hash": "reading",
    "wait": "waiting for another process",
    "write": "writing",
    "load": "loading",
    "run": "running",
    "download": "downloading",
    "compare": "trying out, on a small model,",
}


class SliceProgress:
    """A context manager that is also the progress callback of :mod:`skippy.models`.

    Draws on stderr, and only if that is a terminal.
    """

    def __init__(self, label: str, console: Console | None = None) -> None:
        self._label = label
        console = console if console is not None else Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> SliceProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar off the terminal. Safe to call twice."""
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes of a stage; a new stage starts a new bar."""
        if self._task is None or stage != self._stage:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(
                f"{_WORDS.get(stage, stage)} {self._label}", total=total or None
            )
            self._stage = stage
        self._progress.update(self._task, completed=done, total=total or None)
