"""What a running generation has done so far, and by when it must have done more."""

from __future__ import annotations

import math
from typing import Final

import trio

from .queueing import Demand
from .status import TokenGaps

RENEWAL_SECS: Final = 1.0
"""A deadline moves no more often than this: it does for every token."""


class Work:
    """A generation from the moment it has its lane. Times are Trio's, in seconds.

    Args:
        gaps: is told the time between each token and the one before.

    Attributes:
        request_id: the client's, for people; "" where there is none.
        scope: cancelled when ``limit_secs`` pass without :meth:`renew`, give or take RENEWAL_SECS.
        began: when it got its lane.
        first_token_at: when its first token came, or None.
        generated: tokens so far.
        cached_tokens: of the prompt, those that were restored rather than computed.
        replayed: it was taken up again on another lane, or its answer was known to begin with, so its times
            say little about the next one's.
    """

    def __init__(self, demand: Demand, limit_secs: float, gaps: TokenGaps | None = None) -> None:
        self.demand = demand
        self.limit_secs = limit_secs
        self.request_id = ""
        self._gaps = TokenGaps() if gaps is None else gaps
        self._last_token_at = 0.0
        self.began = self._renewed = trio.current_time()
        self.scope = trio.CancelScope(deadline=self.began + limit_secs)
        self.first_token_at: float | None = None
        self.generated = 0
        self.cached_tokens = 0
        self.replayed = False

    def suspend(self) -> None:
        """It waits for another lane, within a time of its own."""
        self.scope.deadline = math.inf

    def resume(self) -> None:
        """It has another lane."""
        self.replayed = True
        self._renewed = trio.current_time()
        self.scope.deadline = self._renewed + self.limit_secs

    def renew(self) -> None:
        """A part of the work is done: a prefill chunk, for example."""
        self._renew(trio.current_time())

    def token(self) -> None:
        """A token has come."""
        now = trio.current_time()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self._gaps.add(now - self._last_token_at)
        self._last_token_at = now
        self.generated += 1
        self._renew(now)

    def _renew(self, now: float) -> None:
        if now - self._renewed >= RENEWAL_SECS:
            self._renewed = now
            self.scope.deadline = now + self.limit_secs

    @property
    def done_tokens(self) -> int:
        """Prompt tokens, once all of them are done, and generated ones."""
        return self.demand.prompt_tokens - self.prompt_left + self.generated

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that may still be to do."""
        return self.demand.prompt_tokens if self.first_token_at is None else 0
