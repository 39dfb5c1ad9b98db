"""The admission gate: who gets a lane and room in the KV cache, who waits, and who is to come back later.

A request is admitted with a lane and all the cache positions it may come to use, both or neither. Others wait
in order of arrival, except that one whose positions are there may overtake one that needs more than are free;
:mod:`skippy.frontend.queueing` has the order. Nothing here polls: the gate looks again whenever a lane or a
place becomes free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import attrs
import trio

from skippy.config import OpenAIOptions
from skippy.stage import LaneLost
from skippy.stage.nurseries import leaves
from skippy.telemetry import NULL_TELEMETRY, Telemetry, names

from .adaptive import Adaptation, ConcurrencyController
from .generation import (
    ChainUnavailable,
    ContextLengthExceeded,
    GenerationError,
    TooManyRequests,
    WorkTimedOut,
)
from .lanes import LanePool, PooledLane
from .queueing import Demand, ServiceRates, WaitingLine, default_queue_capacity, work_limit_secs
from .replay_line import ReplayLine
from .status import TokenGaps, Totals
from .work import Work

RECONNECT_WAIT_SECS = 3.0
"""How long a request waits for a lane while none is connected."""


@attrs.define(slots=True, eq=False)
class _Waiter:
    demand: Demand
    deadline: float
    patience_secs: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    admitted: trio.Event = attrs.field(factory=trio.Event)
    admission: Admission | None = None
    passed: int = 0


class Admission:
    """A generation's right to run: lane, cache positions and deadline. Enter :meth:`running` once.

    Attributes:
        lane: the lane, which :meth:`replace_lane` changes.
        replaced: set when it has.
    """

    def __init__(self, gate: AdmissionGate, lane: PooledLane, work: Work) -> None:
        self._gate = gate
        self.lane = lane
        self.work = work
        self.replaced = trio.Event()
        lane.work = work

    @contextlib.contextmanager
    def running(self) -> Iterator[PooledLane]:
        """The lane for the length of the block, which is cancelled when the work makes no progress.

        Leaving never waits; the lane is cleaned in the background.

        Raises:
            WorkTimedOut: no chunk and no token came for the work limit; the lane is replaced.
        """
        failed = finished = False
        try:
            with self.work.scope:
                yield self.lane
            finished = not self.work.scope.cancelled_caught
            if not finished:
                raise self._timed_out()
        except Exception as error:
            failed = any(isinstance(leaf, GenerationError) and leaf.status >= 500 for leaf in leaves(error))
            raise
        finally:
            self._gate.leave(self, finished=finished, failed=failed)

    async def replace_lane(self, *, suspect: bool) -> None:
        """Wait for another lane in place of one that has ended, ahead of all who wait for their first.

        The cache positions are kept meanwhile, and the work's deadline stands still.

        Args:
            suspect: the generation's last replay brought nothing, so this one is to be alone: it waits for
                those of others, and they for it, up to :meth:`replay_over`.
        """
        self.work.suspend()
        try:
            await self._gate.replace_lane(self, suspect=suspect)
        finally:
            self.work.resume()

    def replay_over(self) -> None:
        """The generation has gone on, or given up: others need not wait for it. Never waits."""
        self._gate.replay_over(self)

    def _timed_out(self) -> WorkTimedOut:
        reason = f"the generation made no progress for {self.work.limit_secs:g} s"
        self.lane.lane.fail(LaneLost(reason))
        return WorkTimedOut(reason)


class AdmissionGate:
    """Admits generations to the lanes of a pool.

    Args:
        pool: its size is the highest concurrency.
        kv_tokens: cache positions that all generations share.
        options: how many may wait and for how long, and whether the concurrency adapts.

    Attributes:
        kv_tokens: as given.
        queue_capacity: requests that may wait.
        gaps: times between tokens, of all generations.
    """

    def __init__(
        self,
        pool: LanePool,
        kv_tokens: int,
        options: OpenAIOptions,
        telemetry: Telemetry = NULL_TELEMETRY,
    ) -> None:
        self._pool = pool
        self.kv_tokens = self._free_tokens = kv_tokens
        self._telemetry = telemetry
        self._timeout_secs = options.generation_admission_timeout_secs
        replay_secs = options.replay_timeout_secs or math.inf
        self._promised_secs = replay_secs if options.replay_on_stage_loss else RECONNECT_WAIT_SECS
        self.queue_capacity = options.generation_queue_capacity or default_queue_capacity(pool.size)
        self._controller: ConcurrencyController | None = None
        if options.adaptive_generation_concurrency:
            least = options.adaptive_generation_min_concurrency or 1
            self._controller = ConcurrencyController(least, pool.size)
        self._line: WaitingLine[_Waiter] = WaitingLine()
        self._replays: ReplayLine[Admission] = ReplayLine()
        self._preparing = 0
        self._running: set[Admission] = set()
        self._reserved: dict[PooledLane, int] = {}
        self._rates = ServiceRates()
        self._done_tokens = 0
        self._totals = Totals()
        self.gaps = TokenGaps()
        self._connected = pool.ready
        pool.watch(self._lanes_changed)

    @property
    def concurrency(self) -> int:
        """Generations that may run at once, now."""
        return self._pool.size if self._controller is None else self._controller.limit

    @property
    def running(self) -> int:
        """Generations that run."""
        return len(self._running)

    @property
    def queue_depth(self) -> int:
        """Requests that wait for admission, or have their prompt prepared."""
        return len(self._line) + self._preparing

    def totals(self) -> Totals:
        """What all generations have come to, those that run included."""
        return self._totals.plus(admission.work for admission in self._running)

    @property
    def reserved_tokens(self) -> int:
        """Cache positions that are taken, or may come to be."""
        return self.kv_tokens - self._free_tokens

    @property
    def predicted_wait_secs(self) -> float | None:
        """What one more request would wait; None until a generation has finished.

        All work that runs or waits, at the cost per token of what has finished, shared by the lanes.
        """
        prompt = answer = 0.0
        for admission in self._running:
            work = admission.work
            prompt += work.prompt_left
            answer += max(0.0, self._rates.answer_tokens(work.demand.max_tokens) - work.generated)
        for waiter in self._line:
            prompt += waiter.demand.prompt_tokens
            answer += self._rates.answer_tokens(waiter.demand.max_tokens)
        secs = self._rates.secs(prompt, answer)
        return None if secs is None else secs / self.concurrency

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A request whose prompt is being made, which counts as one that waits.

        Raises:
            TooManyRequests: the queue is full.
        """
        self._check_room()
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    async def acquire(self, prompt_tokens: int, max_tokens: int, *, promised: bool = False) -> Admission:
        """Wait for a lane and its cache positions; enter the admission's ``running`` at once.

        A ``promised`` one, whose answer has begun with another, is not refused for want of room or time.
        Cancellation gives the place in the queue back.

        Raises:
            ContextLengthExceeded: more cache positions than there are.
            TooManyRequests: the queue is full, or the wait is or would be too long.
            ChainUnavailable: no lane is connected within RECONNECT_WAIT_SECS; promised: a replay's patience.
        """
        demand = Demand(prompt_tokens, max_tokens)
        if demand.tokens > self.kv_tokens:
            raise ContextLengthExceeded(
                f"prompt and answer take {demand.tokens} positions, the cache has {self.kv_tokens}"
            )
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._telemetry.span(names.STAGE_OPENAI_GENERATION_ADMIT, **self._attributes()) as span:
            if not self._line and (admission := self._admit(demand)) is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
            else:
                admission = await self._wait(self._join(demand, promised=promised))
            span["reserved_kv_tokens"] = self.reserved_tokens
            span["concurrency"] = self.concurrency
        return admission

    def leave(self, admission: Admission, *, finished: bool, failed: bool) -> None:
        """The generation is over: its lane is cleaned, and others may come. Never waits."""
        work, now = admission.work, trio.current_time()
        self._running.remove(admission)
        self._done_tokens += work.done_tokens
        self._totals.add(work)
        self._give_back(admission.lane)
        if work.replayed:
            finished = False  # what it took says nothing about others
        if finished and work.first_token_at is not None:
            prefill, decode = work.first_token_at - work.began, now - work.first_token_at
            computed = work.demand.prompt_tokens - work.cached_tokens
            self._rates.observe(computed, 1000 * prefill, work.generated, 1000 * decode)
        if self._controller is not None:
            adaptation = None
            if failed:
                adaptation = self._controller.failed(now)
            elif finished and work.first_token_at is not None:
                tokens = self._done_tokens + sum(other.work.done_tokens for other in self._running)
                ms_per_token = 1000 * (now - work.began) / work.done_tokens
                adaptation = self._controller.finished(now, tokens, ms_per_token, queued=bool(self._line))
            self._report(adaptation)
        self._elect()

    def _report(self, adaptation: Adaptation | None) -> None:
        if adaptation is not None:
            self._telemetry.emit(
                names.STAGE_OPENAI_GENERATION_CONCURRENCY_ADAPT,
                **adaptation.attributes(),
                ceiling=self._pool.size,
            )

    # -- places ----------------------------------------------------------------------------------------

    def _admit(self, demand: Demand) -> Admission | None:
        """Lane and cache positions for a request, or neither."""
        if len(self._running) >= self.concurrency or demand.tokens > self._free_tokens:
            return None
        lane = self._pool.take()
        if lane is None:
            return None
        limit = work_limit_secs(demand.prompt_tokens, self._timeout_secs)
        admission = Admission(self, lane, Work(demand, limit, self.gaps))
        self._running.add(admission)
        self._reserved[lane] = demand.tokens
        self._free_tokens -= demand.tokens
        return admission

    async def replace_lane(self, admission: Admission, *, suspect: bool) -> None:
        """As :meth:`Admission.replace_lane`."""
        lost, admission.replaced = admission.lane, trio.Event()
        self._replays.join(admission, suspect=suspect)
        try:
            self._elect()
            await admission.replaced.wait()
        finally:
            if admission.lane is lost:
                self.replay_over(admission)

    def replay_over(self, admission: Admission) -> None:
        """As :meth:`Admission.replay_over`."""
        self._replays.leave(admission)
        self._elect()

    def _move(self, admission: Admission, lane: PooledLane) -> None:
        """Let a generation go on with this lane instead of one that has ended."""
        lost, admission.lane, lane.work = admission.lane, lane, admission.work
        self._reserved[lane] = self._reserved.pop(lost)
        lost.work = None
        lost.give_back()

    def _give_back(self, lane: PooledLane) -> None:
        """Nobody runs on it any more; its cache positions are free once it is idle or has ended."""
        lane.work = None
        lane.give_back()
        if lane.ended:
            self._free_tokens += self._reserved.pop(lane)

    def _elect(self) -> None:
        """Hand out lanes to those whose turn it is."""
        while self._pool.idle and (admission := self._replays.take()) is not None:
            lane = self._pool.take()
            assert lane is not None  # one is idle
            self._move(admission, lane)
            admission.replaced.set()
        while self._line and self._pool.idle and len(self._running) < self.concurrency:
            waiter = self._line.take(self._free_tokens)
            if waiter is None:
                return
            waiter.admission = self._admit(waiter.demand)
            assert waiter.admission is not None  # what was asked above is all it takes
            waiter.admitted.set()

    def _lanes_changed(self, lane: PooledLane) -> None:
        """``lane`` has become idle or has ended. Its cache positions are free if nobody runs on it."""
        if lane.work is None:
            self._free_tokens += self._reserved.pop(lane, 0)
        if self._connected != self._pool.ready:
            self._connected = not self._connected
            for waiter in self._line:
                self._set_deadline(waiter)
        self._elect()

    def _set_deadline(self, waiter: _Waiter) -> None:
        patience = math.inf if self._connected else trio.current_time() + waiter.patience_secs
        waiter.scope.deadline = min(waiter.deadline, patience)

    async def _wait(self, waiter: _Waiter) -> Admission:
        self._elect()  # it may overtake
        try:
            with waiter.scope:
                await waiter.admitted.wait()
        except BaseException:
            if waiter.admission is not None:
                # Cancelled between the admission and here: it never ran.
                self.leave(waiter.admission, finished=False, failed=False)
            raise
        finally:
            if waiter.admission is None:
                self._line.leave(waiter)
                self._elect()  # whom it kept from overtaking
        if waiter.admission is not None:
            return waiter.admission
        if trio.current_time() >= waiter.deadline:
            raise self._refuse("timeout", f"no lane became free within {self._timeout_secs:g} s")
        raise ChainUnavailable(self._pool.unready or "no lane of the chain is connected")

    def _join(self, demand: Demand, *, promised: bool) -> _Waiter:
        timeout, patience = math.inf, self._promised_secs
        if not promised:
            self._check_room()
            timeout, patience = self._timeout_secs or math.inf, RECONNECT_WAIT_SECS
        predicted = self.predicted_wait_secs
        if predicted is not None and predicted > timeout:
            text = f"the wait would be about {predicted:.0f} s, and may be {timeout:g} s"
            raise self._refuse("predicted_wait", text)
        waiter = _Waiter(demand, trio.current_time() + timeout, patience)
        self._set_deadline(waiter)
        self._line.join(waiter)
        return waiter

    def _check_room(self) -> None:
        running, waiting = len(self._running), self.queue_depth
        if running + waiting >= max(running, self.concurrency) + self.queue_capacity:
            text = f"requests that run: {running}, that wait: {waiting}; there is room for no more"
            raise self._refuse("queue_full", text)

    def _refuse(self, reason: str, text: str) -> TooManyRequests:
        predicted = self.predicted_wait_secs
        self._telemetry.emit(
            names.STAGE_OPENAI_GENERATION_ADMISSION_REJECTED, reason=reason, **self._attributes()
        )
        retry_after = max(1, math.ceil(predicted or 0.0))
        return TooManyRequests(f"{text}; try again in {retry_after} s", retry_after)

    def _attributes(self) -> dict[str, Any]:
        return {
            "queue_depth": self.queue_depth,
            "queue_capacity": self.queue_capacity,
            "predicted_wait_secs": self.predicted_wait_secs,
        }
