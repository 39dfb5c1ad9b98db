"""Replay: a generation whose lane was lost goes on on another lane, from the token it had come to.

Its settings go ahead, alone: what acknowledges them is a chain whose stages are all there, and only then does
a replay count. Lanes that only seemed to be alive, of which there may be many just after a stage has gone,
cost nothing but time, of which there is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from skippy.config import OpenAIOptions
from skippy.engine.sampling import state_between_draws
from skippy.protocol import SamplingConfig
from skippy.stage import LaneLost
from skippy.telemetry import Telemetry, get_logger, names

from .admission import Admission
from .generation import ChainUnavailable, ReplayRefused
from .lanes import PooledLane

log = get_logger("skippy.frontend")

MAX_FRUITLESS: Final = 3
"""Replays of one generation, one after the other, that bring no token: it may be what the stage dies of."""


class Recovery:
    """The replays of one generation, one after the other. :meth:`close` it on every path.

    Attributes:
        count: replays that have come to a chain, which is their checkpoint generation, too.
    """

    def __init__(
        self,
        admission: Admission,
        options: OpenAIOptions,
        telemetry: Telemetry,
        request_id: int,
        sampling: SamplingConfig | None,
    ) -> None:
        self._admission = admission
        self._options = options
        self._telemetry = telemetry
        self._request_id = request_id
        self._sampling = sampling
        self._began_at: float | None = None
        """When the replay under way began; None while none is."""
        self.count = 0
        self._fruitless = 0
        """Replays since a token came."""

    async def take_lane(
        self, lost: LaneLost, generated: int, configure: Callable[[PooledLane], Awaitable[object]]
    ) -> None:
        """Begin a replay: wait for a lane whose whole chain takes the settings.

        Args:
            generated: tokens that have come.
            configure: sends a lane the settings and waits for their acknowledgement. May raise LaneLost, and
                is then called with another lane.

        Raises:
            ChainUnavailable: no more replays, or no such lane within the time for it.
            ReplayRefused: the generation depends on what only the lost stage knew.
        """
        self.close(str(lost))
        self._check(lost, generated)
        self._began_at = trio.current_time()
        self._tell(names.STAGE_OPENAI_REPLAY_BEGIN, reason=str(lost), generated_token_count=generated)
        log.warning(
            "a lane was lost; its request is replayed on another one",
            request_id=self._request_id,
            replay=self.count + 1,
            generated=generated,
            reason=str(lost),
        )
        patience = self._options.replay_timeout_secs
        latest = lost
        with trio.move_on_after(patience or math.inf):
            while True:
                await self._admission.replace_lane(suspect=self._fruitless > 0)
                try:
                    await configure(self._admission.lane)
                except LaneLost as error:
                    latest = error
                else:
                    self.count += 1
                    self._fruitless += 1
                    return
        text = f"a stage of the chain was lost and not there again within {patience:g} s: {latest}"
        self.close(text)
        raise ChainUnavailable(text)

    def _check(self, lost: LaneLost, generated: int) -> None:
        if not self._options.replay_on_stage_loss:
            raise ChainUnavailable(f"a stage of the chain was lost: {lost}")
        if self._fruitless >= MAX_FRUITLESS:
            raise ChainUnavailable(
                f"a stage of the chain was lost again, after {MAX_FRUITLESS} replays of this request that "
                f"brought no token: {lost}"
            )
        state = None if self._sampling is None else state_between_draws(self._sampling)
        if state is not None and generated:
            raise ReplayRefused(
                f"a stage of the chain was lost, and the request cannot be replayed, because {state}: {lost}"
            )

    @property
    def under_way(self) -> bool:
        """Whether a replay has begun, and nothing has come of it yet."""
        return self._began_at is not None

    def caught_up(self) -> None:
        """A token or the end has come: the replay, if one was under way, has done what it was for."""
        self._fruitless = 0
        if self._began_at is not None:
            self._over(names.STAGE_OPENAI_REPLAY_END)

    def close(self, reason: str = "the generation has ended") -> None:
        """The replay, if one is under way, comes to nothing. Never waits."""
        if self._began_at is not None:
            self._over(names.STAGE_OPENAI_REPLAY_FAILED, reason=reason)

    def _over(self, name: str, **attributes: Any) -> None:
        self._tell(name, **attributes)
        self._began_at = None
        self._admission.replay_over()

    def _tell(self, name: str, **attributes: Any) -> None:
        assert self._began_at is not None
        self._telemetry.emit(
            name,
            request_id=self._request_id,
            replay_count=self.count,
            elapsed_ms=1000 * (trio.current_time() - self._began_at),
            **attributes,
        )
