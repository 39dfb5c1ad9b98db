"""Which replay gets the next lane. Pure: no clock, no tasks."""

from __future__ import annotations

from typing import Generic, TypeVar

R = TypeVar("R")


class ReplayLine(Generic[R]):
    """Replays that wait for a lane, in order of arrival, and those that have one and no token yet.

    A request whose last replay came to nothing may be what the stage dies of. It is a suspect, and replayed
    alone: among others it would take them with it each time, until none of them had a replay left.
    """

    def __init__(self) -> None:
        self._waiting: dict[R, bool] = {}
        self._under_way: dict[R, bool] = {}
        """Both with whether it is a suspect."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def join(self, replay: R, *, suspect: bool) -> None:
        """It waits for a lane, perhaps because the one it got was of no use."""
        self._under_way.pop(replay, None)
        self._waiting[replay] = suspect

    def leave(self, replay: R) -> None:
        """It has come to a token, or to nothing, or never was in line."""
        self._waiting.pop(replay, None)
        self._under_way.pop(replay, None)

    def take(self) -> R | None:
        """The one that may have a lane now; None while there is none."""
        if any(self._under_way.values()):
            return None
        chosen = next((replay for replay, suspect in self._waiting.items() if not suspect), None)
        if chosen is None and not self._under_way:
            chosen = next(iter(self._waiting), None)
        if chosen is not None:
            self._under_way[chosen] = self._waiting.pop(chosen)
        return chosen
