"""A nursery that does not show, for context managers whose users never asked for one; groups taken apart."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

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
        only, *others = leaves(group)
        if others:
            raise
        cause, context, suppress = only.__cause__, only.__context__, only.__suppress_context__
        try:
            raise only
        finally:
            # Raising inside `except` would chain the group behind it; keep what the exception had.
            only.__cause__, only.__context__, only.__suppress_context__ = cause, context, suppress
            del only, cause, context


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside a group, however deep, in order; one that is no group is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
