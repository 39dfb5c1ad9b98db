"""Who may use the engine, and when: sequences are handed out here, calls run first in, first out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import trio

from skippy.engine import EngineInfo, StageEngine, Vocabulary

from .errors import RequestFailed
from .runtime import Runtime, Started

T = TypeVar("T")

SEQUENCE_WAIT_SECS = 30.0
"""How long a new session waits for a native sequence while all are in use."""


class Scheduler:
    """Gives sessions their native sequences and runs their engine calls in order of arrival."""

    def __init__(self, engine: StageEngine, runtime: Runtime) -> None:
        self._engine = engine
        self.info: EngineInfo = engine.info
        """What the engine is; the same for its whole life."""
        self._runtime = runtime
        self._free = list(reversed(range(engine.info.max_sequences)))
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer, which other threads may use; None on a middle stage."""
        return self._engine.vocabulary

    @property
    def free_sequences(self) -> int:
        return len(self._free)

    async def acquire_sequence(self) -> int:
        """A free native sequence id; waits up to SEQUENCE_WAIT_SECS for one, else RequestFailed."""
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(SEQUENCE_WAIT_SECS):
            while not self._free:
                await self._waiting.park()
            return self._free.pop()
        raise RequestFailed(
            f"no free sequence within {SEQUENCE_WAIT_SECS:.0f} s: all {self.info.max_sequences} are in use; "
            "raise lane_count on this stage, or send fewer requests at once"
        )

    def release_sequence(self, sequence: int) -> None:
        """Forget the sequence's state and make the id free. Never waits.

        The id is free at once: whoever takes it queues its calls behind the drop.
        """
        self._runtime.post(lambda: self._engine.drop(sequence))
        self._free.append(sequence)
        self._waiting.unpark()

    async def run(self, call: Callable[[StageEngine], T]) -> T:
        """Run ``call(engine)`` on the runtime. Cancellation: as :meth:`Runtime.run`."""
        engine = self._engine
        return await self._runtime.run(lambda: call(engine))

    def start(
        self, call: Callable[[StageEngine], bool], settle: Callable[[Exception | None], None]
    ) -> Started:
        """Start ``call(engine)`` on the runtime, as :meth:`Runtime.start`."""
        engine = self._engine
        return self._runtime.start(lambda: call(engine), settle)

    def post(self, call: Callable[[StageEngine], object]) -> None:
        """Queue ``call(engine)`` without waiting; it always runs."""
        engine = self._engine
        self._runtime.post(lambda: call(engine))


@contextlib.asynccontextmanager
async def open_scheduler(
    make_engine: Callable[[], StageEngine], runtime: Runtime
) -> AsyncIterator[Scheduler]:
    """Load the engine on the runtime and close it there when the block is left.

    Cancellation: a load that has begun goes on to its end; the engine it makes is closed right behind it.
    """
    engines: list[StageEngine] = []

    def close() -> None:
        for engine in engines:
            engine.close()

    try:
        await runtime.run(lambda: engines.append(make_engine()))
        yield Scheduler(engines[0], runtime)
    finally:
        runtime.post(close)
