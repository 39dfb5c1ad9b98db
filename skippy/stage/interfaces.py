"""What the parts of a lane ask of each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from .errors import StageError
from .queues import PendingReply


class ReplyChannel(Protocol):
    """A way that replies take."""

    @property
    def annexed(self) -> bool:
        """Whether a reply may come with an annex."""


class ReplySink(ReplyChannel, Protocol):
    """Where a lane's owed replies go, in order."""

    async def put(self, reply: PendingReply) -> None: ...

    @property
    def full(self) -> bool: ...

    def put_nowait(self, reply: PendingReply) -> None:
        """:meth:`put` for a sink that is not full."""


class TaskStarter(Protocol):
    """Runs a task whose end is the lane's end, and ``close`` after it."""

    def __call__(self, task: Callable[[], Awaitable[None]], close: Callable[[], None] = ...) -> None: ...


class LaneTasks(Protocol):
    """What an execution asks of the lane that it belongs to. None of it waits."""

    def fail_for(self, error: Exception) -> None:
        """End the lane for what went wrong on the engine's thread."""

    def lose(self, failure: StageError) -> None:
        """A link is broken, or stage 0's return stream has ended."""

    def start(self, task: Callable[[], Awaitable[None]], close: Callable[[], None] = ...) -> None:
        """Run a task whose end is the lane's end, and ``close`` after it."""
