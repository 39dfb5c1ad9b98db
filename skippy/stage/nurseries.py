"""A nursery that does not show: for context managers whose users never asked for one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio


@contextlib.asynccontextmanager
async def open_hidden_nursery() -> AsyncIterator[trio.Nursery]:
    """As ``trio.open_nursery``, but a single exception leaves the block as itself, not in a group.

    A host that writes ``async with open_stage(...)`` expects its own exceptions back as it raised them, and
    the documented ones of the stage. Several at once still come as a group.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        only = _only_leaf(group)
        if only is None:
            raise
        cause, context, suppress = only.__cause__, only.__context__, only.__suppress_context__
        try:
            raise only
        finally:
            # Raising inside `except` would chain the group behind it; keep what the exception had.
            only.__cause__, only.__context__, only.__suppress_context__ = cause, context, suppress
            del only, cause, context


def _only_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup):
        if len(exc.exceptions) != 1:
            return None
        exc = exc.exceptions[0]
    return exc
