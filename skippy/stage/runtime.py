"""The thread that owns the engine: calls run as they come, works when :class:`Iterations` chooses them."""

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

from .doorbell import Doorbell
from .inbox import Inbox
from .iterations import Iterations
from .nurseries import open_hidden_nursery
from .work import Work, wake_all

T = TypeVar("T")

_log = get_logger("skippy.stage")
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

MAX_TAKEN_IN = 64
"""Calls and works taken in between two iterations."""
SHUTDOWN_GRACE_SECS = 3.0
"""How long a native call may go on after shutdown began before the process ends itself."""


class Runtime(abc.ABC):
    """Runs engine calls and works, one at a time.

    Calls are short and run in the order in which they were handed over, between two iterations, so before
    works that wait: whoever needs a work to have run waits for it first, or cancels it.
    """

    waits: bool
    """Whether a work may wait for others to join its batch."""
    threads = True
    """Whether there may be threads beside the event loop's; no other one may do anything on virtual time."""
    broken = False
    """Whether the engine's thread has ended by a fault of this program: nothing runs any more."""

    @abc.abstractmethod
    def attach(self, iterations: Iterations) -> None:
        """From now on works are accepted. Called by an engine call, before the first work."""

    @abc.abstractmethod
    async def run(self, call: Callable[[], T]) -> T:
        """Queue ``call`` and wait for its result; its exception is raised here.

        Cancellation: a call that has not begun never runs; one that has runs to its end in the background and
        its result is dropped. Calls queued later still run after it.
        """

    @abc.abstractmethod
    def submit(self, work: Work) -> None:
        """Queue a work without waiting. It runs, or fails, or ends as cancelled."""

    @abc.abstractmethod
    def post(self, call: Callable[[], object]) -> None:
        """Queue ``call`` without waiting. It always runs, in order, also after its poster was cancelled.

        Its exception goes to the log.
        """

    @property
    def inbox(self) -> Inbox | None:
        """Where the engine's thread waits for sockets itself; None where it is no thread of its own."""
        return None

    def tell(self, call: Callable[[], object]) -> None:
        """In the engine's thread: have ``call`` called in the event loop's."""
        call()


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

    Attributes:
        doorbell: by which the event loop hears of what has happened, as this thread stops to need the
            interpreter.
    """

    waits = True

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | Work | None] = queue.SimpleQueue()
        self.doorbell = Doorbell()
        self._iterations: Iterations | None = None
        self._inbox = Inbox()

    def attach(self, iterations: Iterations) -> None:
        self._iterations = iterations
        iterations.on_native = self._pass_on

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        job: _Job[T] = _Job(call, trio.lowlevel.current_task())
        self._put(functools.partial(self._run_job, job))

        def give_up(_: Callable[[], object]) -> trio.lowlevel.Abort:
            job.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        result: T = await trio.lowlevel.wait_task_rescheduled(give_up)
        return result

    def submit(self, work: Work) -> None:
        self._put(work)

    def post(self, call: Callable[[], object]) -> None:
        self._put(functools.partial(_run_posted, call))

    def stop(self) -> None:
        """End the thread once everything queued before has run."""
        self._put(None)

    def _put(self, item: Callable[[], None] | Work | None) -> None:
        self._work.put(item)
        self._inbox.wake()

    @property
    def inbox(self) -> Inbox | None:
        return self._inbox

    def tell(self, call: Callable[[], object]) -> None:
        self.doorbell.leave(call)

    def _pass_on(self) -> None:
        """Wake the event loop for what it was told.

        Where that happens any earlier than just before a native call or a wait, the event loop gets the
        interpreter, and the next step begins when it is done with what it has heard.
        """
        self.doorbell.ring()

    def work(self) -> None:
        """The thread's body. Raises what is no engine's or work's fault, but this program's."""
        try:
            self._work_until_stopped()
        except BaseException:
            self.broken = True
            raise
        finally:
            self._pass_on()
            self._inbox.close()

    def _work_until_stopped(self) -> None:
        while self._take_in():
            if self._iterations is not None and self._iterations.wait_secs() == 0.0:
                self._wake(self._iterations.step())
                # Where the next stage is on this machine, the system has just put its reader on a core, as
                # likely as not behind this thread.
                _yield_core()
        if self._iterations is not None:
            self._wake(self._iterations.end())

    def _take_in(self) -> bool:
        """Run calls and pass on works, until the next iteration is due. False when the thread is to end."""
        for _ in range(MAX_TAKEN_IN):
            wait = None if self._iterations is None else self._iterations.wait_secs()
            try:
                item = self._next(wait)
            except queue.Empty:
                break
            if item is None:
                return False
            if isinstance(item, Work):
                assert self._iterations is not None, "a work before the engine"
                self._iterations.add(item)
            else:
                self._pass_on()  # the call may take long
                item()
            del item  # it may hold activation buffers
        return True

    def _next(self, wait: float | None) -> Callable[[], None] | Work | None:
        """What was queued, or has arrived on a socket. Raises queue.Empty after ``wait`` seconds."""
        if wait != 0.0 and self._work.empty():
            self._pass_on()
        if not self._inbox.watching:
            return self._work.get_nowait() if wait == 0.0 else self._work.get(timeout=wait)
        if self._work.empty():
            self._inbox.wait(wait, has_work=lambda: not self._work.empty())
        return self._work.get_nowait()

    def _run_job(self, job: _Job[Any]) -> None:
        if job.task is not None:
            self.tell(functools.partial(job.deliver, outcome.capture(job.call)))

    def _wake(self, works: list[Work]) -> None:
        if works:
            self.tell(functools.partial(wake_all, works))


def _run_posted(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # nobody waits for it, so the log is the only place left
        _log.exception("posted engine call failed")


class InlineRuntime(Runtime):
    """Runs engine calls on the event loop itself: for exact engines under a virtual clock."""

    waits = False
    threads = False

    def __init__(self) -> None:
        self._iterations: Iterations | None = None

    def attach(self, iterations: Iterations) -> None:
        self._iterations = iterations

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return call()

    def submit(self, work: Work) -> None:
        assert self._iterations is not None, "a work before the engine"
        self._iterations.add(work)
        while self._iterations.wait_secs() == 0.0:
            wake_all(self._iterations.step())

    def post(self, call: Callable[[], object]) -> None:
        _run_posted(call)


@contextlib.asynccontextmanager
async def open_runtime_thread() -> AsyncIterator[RuntimeThread]:
    """A runtime thread for the length of the block.

    Leaving the block lets queued calls run. A native call that goes on for longer than
    ``SHUTDOWN_GRACE_SECS`` cannot be interrupted, so the process then ends itself with status 70. Where the
    thread ends by a fault of this program, the block is cancelled, and that is raised.
    """
    runtime = RuntimeThread()
    finished = trio.Event()

    async def hold_thread() -> None:
        # Shielded: the thread ends when it is told to, not when its owner is cancelled.
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(runtime.work, limiter=trio.CapacityLimiter(1))
        finally:
            finished.set()

    async def answer() -> None:
        with answering:
            await runtime.doorbell.answer()

    # Shielded, too: whoever is cancelled may still have something to wait for.
    answering = trio.CancelScope(shield=True)
    with contextlib.closing(runtime.doorbell):
        async with open_hidden_nursery() as nursery:
            nursery.start_soon(hold_thread)
            nursery.start_soon(answer)
            try:
                yield runtime
            finally:
                runtime.stop()
                with trio.move_on_after(SHUTDOWN_GRACE_SECS, shield=True):
                    await finished.wait()
                if not finished.is_set():
                    _log.error(
                        "a native call outlived the shutdown grace period", grace_secs=SHUTDOWN_GRACE_SECS
                    )
                    os._exit(70)
                answering.cancel()
