"""Decode steps that follow each other without the event loop, where one stage is all of the chain.

The engine's thread knows the token that the next step executes as soon as it has drawn it, so it goes on by
itself, and reports tokens as they come. A chain of more stages has the same from its prediction return.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from skippy.engine import Segment
from skippy.protocol import FinishHint, ReplyAnnex

from .work import Work

MAX_AHEAD: Final = 4
"""Steps that may have run beyond the last token that was taken."""

Arrived = Callable[[int, ReplyAnnex | None, bool], object]
"""Told each token, what comes with it, and whether the next step has begun by itself."""


@attrs.define(slots=True, eq=False)
class LocalRun:
    """Steps of one session from one token on.

    Attributes:
        steps: how many there may be.
        is_end: whether no step follows a token.
        arrived: told of each token, in the event loop's thread.
        taken: tokens that their reader has taken.
        stopped: nobody wants more.
    """

    steps: int
    is_end: Callable[[int], bool]
    arrived: Arrived
    taken: int = 0
    stopped: bool = False
    _made: int = 0
    _reports: deque[tuple[int, ReplyAnnex | None, bool]] = attrs.field(factory=deque)

    def made(self, token: int, annex: ReplyAnnex | None, work: Work) -> bool:
        """In the engine's thread: a step has given a token. Begins the next one if there is to be one."""
        self._made += 1
        goes_on = (
            not self.stopped
            and self._made < self.steps
            and self._made - self.taken < MAX_AHEAD
            and not self.is_end(token)
            and (annex is None or annex.finish_hint is not FinishHint.MUST_END)
        )
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
