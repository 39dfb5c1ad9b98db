"""The one thread that owns the engine, and the first-in-first-out queue in front of it."""

from __future__ import annotations

import abc
import contextlib
import os
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from skippy.telemetry import get_logger

from .nurseries import open_hidden_nursery

T = TypeVar("T")
Finish = Callable[[Exception | None], None]

_log = get_logger("skippy.stage")

SHUTDOWN_GRACE_SECS = 3.0
"""How long a native call may go on after shutdown began before the process ends itself."""


class Runtime(abc.ABC):
    """Runs engine calls one at a time, in the order in which they were handed over."""

    @abc.abstractmethod
    async def run(self, call: Callable[[], T], finish: Finish | None = None) -> T:
        """Queue ``call`` and wait for its result; its exception is raised here.

        With ``finish`` the call has effects that must not be lost: it always runs, and ``finish`` is called
        in the event loop's thread right after it, with its exception or None, whether or not anyone waits.

        Cancellation: a call without ``finish`` that has not begun never runs; any other runs to its end in
        the background and its result is dropped. Calls queued later still run after it.
        """

    @abc.abstractmethod
    def post(self, call: Callable[[], object]) -> None:
        """Queue ``call`` without waiting. It always runs, in order, also after its poster was cancelled.

        Its exception goes to the log.
        """


class _Job(Generic[T]):
    __slots__ = ("always", "call", "finish", "task")

    def __init__(
        self, call: Callable[[], T], task: trio.lowlevel.Task | None, finish: Finish | None = None
    ) -> None:
        self.call = call
        self.task = task
        """The task that waits; None once it has given up, or where nobody waits."""
        self.finish = finish
        self.always = task is None or finish is not None


class RuntimeThread(Runtime):
    """A runtime on an operating-system thread of its own, held for life.

    Made by :func:`open_runtime_thread`.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    async def run(self, call: Callable[[], T], finish: Finish | None = None) -> T:
        if finish is None:
            await trio.lowlevel.checkpoint_if_cancelled()
        job: _Job[T] = _Job(call, trio.lowlevel.current_task(), finish)
        self._jobs.put(job)

        def give_up(_: Callable[[], object]) -> trio.lowlevel.Abort:
            job.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(give_up)
        return result

    def post(self, call: Callable[[], object]) -> None:
        self._jobs.put(_Job(call, None))

    def stop(self) -> None:
        """End the thread once everything queued before has run."""
        self._jobs.put(None)

    def work(self) -> None:
        """The thread's body."""
        while (job := self._jobs.get()) is not None:
            if job.always and job.finish is None:
                _run_posted(job.call)
            elif job.always or job.task is not None:
                result = outcome.capture(job.call)
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._deliver, job, result)
                del result
            del job  # the call may hold activation buffers

    @staticmethod
    def _deliver(job: _Job[Any], result: outcome.Outcome[Any]) -> None:
        if job.finish is not None:
            job.finish(_error_of(result))
        if job.task is not None:
            task, job.task = job.task, None
            trio.lowlevel.reschedule(task, result)


def _error_of(result: outcome.Outcome[Any]) -> Exception | None:
    error = result.error if isinstance(result, outcome.Error) else None
    return error if isinstance(error, Exception) else None


def _run_posted(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # nobody waits for it, so the log is the only place left
        _log.exception("posted engine call failed")


class InlineRuntime(Runtime):
    """Runs engine calls on the event loop itself: for exact engines under a virtual clock."""

    async def run(self, call: Callable[[], T], finish: Finish | None = None) -> T:
        if finish is None:
            await trio.lowlevel.checkpoint()
            return call()
        result: outcome.Outcome[T] = outcome.capture(call)
        finish(_error_of(result))
        await trio.lowlevel.checkpoint()
        return result.unwrap()

    def post(self, call: Callable[[], object]) -> None:
        _run_posted(call)


@contextlib.asynccontextmanager
async def open_runtime_thread() -> AsyncIterator[RuntimeThread]:
    """A runtime thread for the length of the block.

    Leaving the block lets queued calls run. A native call that goes on for longer than
    ``SHUTDOWN_GRACE_SECS`` cannot be interrupted, so the process then ends itself with status 70.
    """
    runtime = RuntimeThread()
    finished = trio.Event()

    async def hold_thread() -> None:
        # Shielded: the thread ends when it is told to, not when its owner is cancelled.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(runtime.work, limiter=trio.CapacityLimiter(1))
        finished.set()

    async with open_hidden_nursery() as nursery:
        nursery.start_soon(hold_thread)
        try:
            yield runtime
        finally:
            runtime.stop()
            with trio.move_on_after(SHUTDOWN_GRACE_SECS, shield=True):
                await finished.wait()
            if not finished.is_set():
                _log.error("a native call outlived the shutdown grace period", grace_secs=SHUTDOWN_GRACE_SECS)
                os._exit(70)
