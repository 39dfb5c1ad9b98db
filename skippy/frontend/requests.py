"""The requests whose answers are being generated: they can be ended by id, and are counted when they end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import attrs

from .access import KeyId
from .caller import Caller
from .errors import ApiError
from .metrics import Metrics
from .running import GenerationTask

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that a client has cancelled: the one in use for it that no client library takes for a
reason to ask again."""


@attrs.frozen(slots=True)
class _Running:
    request_id: str
    key: KeyId | None


class RunningRequests:
    """What runs, and whose it is."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running: dict[GenerationTask, _Running] = {}

    @contextlib.contextmanager
    def running(self, task: GenerationTask, caller: Caller) -> Iterator[None]:
        """A block in which ``task`` generates the answer to a request of ``caller``."""
        self._running[task] = _Running(caller.request_id, caller.key)
        try:
            with self._metrics.request(task, caller.route):
                yield
        finally:
            del self._running[task]

    def cancel(self, request_id: str, key: KeyId | None) -> int:
        """End the requests with this id that were asked with ``key``. Does not wait; how many there were."""
        wanted = _Running(request_id, key)
        # An answer that is whole is on its way to the client, though not out of the list.
        return self._end(
            [task for task, running in self._running.items() if running == wanted],
            lambda: ApiError("the request was cancelled", status=CLIENT_CLOSED_REQUEST, code="cancelled"),
        )

    def end_all(self, error: Callable[[], ApiError]) -> None:
        """End every request with an error. Does not wait."""
        self._end(list(self._running), error)

    @staticmethod
    def _end(tasks: Sequence[GenerationTask], error: Callable[[], ApiError]) -> int:
        """Each task raises an error of its own: one that many raise would gather all their tracebacks."""
        return sum([task.end(error()) for task in tasks])
