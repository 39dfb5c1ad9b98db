"""The same function for many items, over processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_each(run: Callable[[T], R], items: Iterable[T], jobs: int, *, at_once: int) -> Iterator[R]:
    """The results of ``run``, in the order of the items, from so many processes; one job is this process.

    Whatever ends this early, also a signal's exception, ends the processes at once.

    Args:
        run: must be picklable, as must be items and results.
        at_once: items that a process takes at a time.
    """
    if jobs == 1:
        yield from map(run, items)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            left = iter(items)
            with _without_interrupts():
                futures = [
                    pool.submit(_run_some, run, some)
                    for some in iter(lambda: tuple(itertools.islice(left, at_once)), ())
                ]
            for future in futures:
                yield from future.result()
        except BaseException:
            # The pool itself would finish what the processes have taken, and what is queued for them.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _run_some(run: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [run(item) for item in items]


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in the block take no Ctrl-C, which goes to all of a terminal: it is for this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
