"""Running on virtual time, where nothing but the seed decides."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import trio

from skippy.stage.clock import measured_on
from skippy.stage.nurseries import leaves
from skippy.telemetry.logs import ROOT

from .clock import SimClock
from .trace import LogTrace, Trace
from .violation import Violation, require


@contextlib.contextmanager
def within(secs: float, otherwise: str) -> Iterator[None]:
    """Violation with ``otherwise`` unless the block ends in time."""
    with trio.move_on_after(max(0.0, secs)) as scope:
        yield
    require(not scope.cancelled_caught, f"{otherwise} within {secs:g} s")


def run_virtually(
    main: Callable[[], Awaitable[None]], seed: int, clock: SimClock, trace: Trace
) -> str | None:
    """Run ``main`` on ``clock``, which its stages measure on too, in this thread, which runs no Trio yet.

    Returns what does not hold: a Violation's text, or any other error; None where all does.
    """
    handler = LogTrace(trace)
    with _determined(seed), _logged_to(handler), measured_on(clock):
        try:
            trio.run(main, clock=clock)
        except BaseExceptionGroup as group:
            return "; ".join(dict.fromkeys(_text(error) for error in leaves(group)))
        except Exception as error:
            return _text(error)
    return f"a fault of the program: {handler.faults[0]}" if handler.faults else None


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _determined(seed: int) -> Iterator[None]:
    """Trio chooses the order of tasks by dice that come from the seed, and by nothing else.

    The dice and the switch have no public names; Trio's own plugin for Hypothesis sets the same two.
    Collecting garbage may run code at any time, so it waits for the end.
    """
    _run: Any = importlib.import_module("trio._core._run")
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True
    _run._r.seed(f"scheduler/{seed}")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before
        _run._r.seed()
        if collects:
            gc.enable()


@contextlib.contextmanager
def _logged_to(handler: logging.Handler) -> Iterator[None]:
    """What the program logs goes there, and nowhere else."""
    logger = logging.getLogger(ROOT)
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, _ = before
        logger.setLevel(before[1])
