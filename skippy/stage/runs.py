"""Decode steps that follow each other without the event loop, and its reports of what they gave.

The engine's thread knows the token that the next step executes as soon as it has drawn it, where one stage is
all of the chain, or as soon as the last stage's prediction has come, so it goes on by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from skippy.engine import Segment
from skippy.protocol import EMPTY_STATS, FinishHint, Message, ReplyAnnex, ReplyStats

from .work import Work

MAX_AHEAD: Final = 4
"""Steps that may have run beyond the last token that was taken."""

Arrived = Callable[[int, ReplyAnnex | None, bool], object]
"""Told each token, what comes with it, and whether the next step has begun by itself."""


@attrs.define(slots=True, eq=False)
class Run:
    """Steps of one session from one token on.

    Attributes:
        steps: how many there may be.
        is_end: whether no step follows a token.
        arrived: told of each token, in the event loop's thread.
        taken: tokens that their reader has taken; may be negative where some wait for it.
        stopped: nobody wants more.
    """

    steps: int
    is_end: Callable[[int], bool]
    arrived: Arrived
    taken: int = 0
    stopped: bool = False
    _made: int = 0

    def _goes_on(self, token: int, annex: ReplyAnnex | None) -> bool:
        """Whether a step follows the token that has just come, which ``_made`` counts."""
        return (
            not self.stopped
            and self._made < self.steps
            and self._made - self.taken < MAX_AHEAD
            and not self.is_end(token)
            and (annex is None or annex.finish_hint is not FinishHint.MUST_END)
        )


@attrs.define(slots=True, eq=False)
class LocalRun(Run):
    """Where one stage is all of the chain."""

    _reports: deque[tuple[int, ReplyAnnex | None, bool]] = attrs.field(factory=deque)

    def made(self, token: int, annex: ReplyAnnex | None, work: Work) -> bool:
        """In the engine's thread: a step has given a token. Begins the next one if there is to be one."""
        self._made += 1
        goes_on = self._goes_on(token, annex)
        if goes_on:
            last = work.segment
            work.repeat(
                Segment(last.sequence, last.position + 1, 1, tokens=(token,), activation=None, logits=1)
            )
        self._reports.append((token, annex, goes_on))
        return True

    def report(self) -> None:
        """In the event loop's thread: pass on what has come."""
        while self._reports:
            self.arrived(*self._reports.popleft())


@attrs.define(slots=True, eq=False)
class ChainRun(Run):
    """Where predictions come from the last of several stages.

    A token that nothing follows is not the run's: the event loop takes it like any other prediction.

    Attributes:
        message: the step that executes a token, which is so many steps after the one that was under way when
            the run began.
        ended: called in the event loop's thread when the run is over.
    """

    message: Callable[[int, int], Message] = attrs.field(kw_only=True)
    ended: Callable[[], object] = attrs.field(kw_only=True)
    _reports: deque[tuple[int, ReplyAnnex | None, ReplyStats]] = attrs.field(factory=deque)

    def follows(self, token: int, annex: ReplyAnnex | None) -> bool:
        """In the engine's thread: whether a step follows the token that has come. Begin it, or ``undo``."""
        self._made += 1
        if not self._goes_on(token, annex):
            self._made -= 1
            return False
        return True

    def undo(self) -> None:
        """In the engine's thread: the step that follows cannot be begun here."""
        self._made -= 1

    def next_message(self, token: int) -> Message:
        """In the engine's thread: the step that follows."""
        return self.message(self._made, token)

    def went_on(self, token: int, annex: ReplyAnnex | None = None, stats: ReplyStats = EMPTY_STATS) -> None:
        """In the engine's thread: that step has begun."""
        self._reports.append((token, annex, stats))

    def report(self, came: Callable[[ReplyStats], object]) -> None:
        """In the event loop's thread: pass on what has come, and show the statistics to ``came``."""
        while self._reports:
            token, annex, stats = self._reports.popleft()
            came(stats)
            self.arrived(token, annex, True)
