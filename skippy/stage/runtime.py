"""The one thread that owns the engine, and the first-in-first-out queue in front of it."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from skippy.telemetry import get_logger

from .nurseries import open_hidden_nursery

T = TypeVar("T")

_log = get_logger("skippy.stage")

SHUTDOWN_GRACE_SECS = 3.0
"""How long a native call may go on after shutdown began before the process ends itself."""


class Started:
    """A call that runs whether or not anyone waits, and what follows it in the event loop's thread.

    ``settle`` is called once, with the exception of the call or None: soon after the call where the call
    failed, asked for it, or is waited for; else when somebody asks. Waking the event loop costs more than
    what it would do then, so a call with nothing urgent behind it leaves that to the next message.
    """

    __slots__ = ("_call", "_error", "_over", "_settle", "_settled", "_waiting")

    def __init__(self, call: Callable[[], bool], settle: Callable[[Exception | None], None]) -> None:
        self._call: Callable[[], bool] | None = call
        self._settle = settle
        self._error: Exception | None = None
        self._over = False
        self._settled = False
        self._waiting: trio.lowlevel.Task | None = None

    def perform(self) -> bool:
        """Run the call, in the runtime's thread. True when ``settle`` must not wait until somebody asks."""
        assert self._call is not None
        urgent = True
        try:
            urgent = self._call()
        except Exception as exc:
            self._error = exc
        self._call = None  # it may hold activation buffers
        # In this order here, and in the other one in `wait`: one of the two sides sees the other.
        self._over = True
        return urgent or self._waiting is not None

    def settle(self) -> bool:
        """Settle the call if it is over and nobody has; False while it is not over. Never waits."""
        if not self._over:
            return False
        if not self._settled:
            self._settled = True
            self._settle(self._error)
        return True

    def wake(self) -> None:
        """In the event loop's thread, after a call for which :meth:`perform` gave True."""
        self.settle()
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Wait until the call is over and settled. One task at a time; cancelling it changes nothing."""
        if self.settle():
            return
        self._waiting = trio.lowlevel.current_task()
        if self.settle():
            self._waiting = None
            return

        def give_up(_: Callable[[], object]) -> trio.lowlevel.Abort:
            self._waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)


class Runtime(abc.ABC):
    """Runs engine calls one at a time, in the order in which they were handed over."""

    @abc.abstractmethod
    async def run(self, call: Callable[[], T]) -> T:
        """Queue ``call`` and wait for its result; its exception is raised here.

        Cancellation: a call that has not begun never runs; one that has runs to its end in the background and
        its result is dropped. Calls queued later still run after it.
        """

    @abc.abstractmethod
    def start(self, call: Callable[[], bool], settle: Callable[[Exception | None], None]) -> Started:
        """Queue ``call`` without waiting. It always runs, in order; see :class:`Started` for what follows.

        Args:
            call: gives True when ``settle`` must follow soon.
        """

    @abc.abstractmethod
    def post(self, call: Callable[[], object]) -> None:
        """Queue ``call`` without waiting. It always runs, in order, also after its poster was cancelled.

        Its exception goes to the log.
        """


class _Job(Generic[T]):
    """A call that a task waits for, until it gives up."""

    __slots__ = ("call", "task")

    def __init__(self, call: Callable[[], T], task: trio.lowlevel.Task) -> None:
        self.call = call
        self.task: trio.lowlevel.Task | None = task

    def deliver(self, result: outcome.Outcome[T]) -> None:
        if self.task is not None:
            task, self.task = self.task, None
            trio.lowlevel.reschedule(task, result)


class RuntimeThread(Runtime):
    """A runtime on an operating-system thread of its own, held for life.

    Made by :func:`open_runtime_thread`.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        job: _Job[T] = _Job(call, trio.lowlevel.current_task())
        self._work.put(functools.partial(self._run_job, job))

        def give_up(_: Callable[[], object]) -> trio.lowlevel.Abort:
            job.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(give_up)
        return result

    def start(self, call: Callable[[], bool], settle: Callable[[Exception | None], None]) -> Started:
        started = Started(call, settle)
        self._work.put(functools.partial(self._run_started, started))
        return started

    def post(self, call: Callable[[], object]) -> None:
        self._work.put(functools.partial(_run_posted, call))

    def stop(self) -> None:
        """End the thread once everything queued before has run."""
        self._work.put(None)

    def work(self) -> None:
        """The thread's body."""
        while (item := self._work.get()) is not None:
            item()
            del item  # it may hold activation buffers

    def _run_job(self, job: _Job[Any]) -> None:
        if job.task is not None:
            self._soon(job.deliver, outcome.capture(job.call))

    def _run_started(self, started: Started) -> None:
        if started.perform():
            self._soon(started.wake)

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *arguments)


def _run_posted(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # nobody waits for it, so the log is the only place left
        _log.exception("posted engine call failed")


class InlineRuntime(Runtime):
    """Runs engine calls on the event loop itself: for exact engines under a virtual clock."""

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return call()

    def start(self, call: Callable[[], bool], settle: Callable[[Exception | None], None]) -> Started:
        started = Started(call, settle)
        if started.perform():
            started.wake()
        return started

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
