"""The toy engine on virtual time: its steps take their time, and other tasks run meanwhile."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import attrs
import outcome
import trio

from skippy.engine import Segment
from skippy.engine.toy import ToyEngine
from skippy.stage.inbox import Inbox, Ready
from skippy.stage.iterations import Iterations
from skippy.stage.nurseries import open_hidden_nursery
from skippy.stage.runtime import MAX_TAKEN_IN, Runtime
from skippy.stage.work import Work, wake_all

from .clock import Alarm, SimClock
from .network import SimLink, SimNetwork

T = TypeVar("T")


@attrs.frozen(slots=True)
class StepCost:
    """Seconds that one native batch takes: a fixed part, and one for each row."""

    fixed: float = 0.0
    per_row: float = 0.0

    def of(self, rows: int) -> float:
        return self.fixed + self.per_row * rows


class SimEngine(ToyEngine):
    """A toy engine whose batches take time on a :class:`SimClock`. Other arguments: as :class:`ToyEngine`."""

    def __init__(self, *layers: int, clock: SimClock, cost: StepCost, **keys: Any) -> None:
        super().__init__(*layers, **keys)
        self._clock = clock
        self._cost = cost

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        super().decode(segments, output)
        self._clock.ahead += self._cost.of(sum(segment.count for segment in segments))


class SimInbox(Inbox):
    """The links that an engine waits on itself: what a selector does for sockets.

    Args:
        wake: called when there may be something to do.
        changed: called when :attr:`next_due` may have changed.
    """

    def __init__(
        self, network: SimNetwork, wake: Callable[[], object], changed: Callable[[], object]
    ) -> None:
        self._network = network
        self._wake = wake
        self._changed = changed
        self._watched: dict[int, tuple[SimLink, Ready]] = {}

    @property
    def watching(self) -> bool:
        return bool(self._watched)

    def watch(self, descriptor: int, ready: Ready) -> None:
        if descriptor in self._watched:
            raise KeyError(f"descriptor {descriptor} is watched already")
        link = self._network.descriptors[descriptor]
        self._watched[descriptor] = (link, ready)
        link.into.watcher = self._changed

    def unwatch(self, descriptor: int, ready: Ready) -> None:
        link, known = self._watched.get(descriptor, (None, None))
        if link is not None and known == ready:
            del self._watched[descriptor]
            link.into.watcher = lambda: None

    @property
    def next_due(self) -> float:
        """When something can be received; a link that was closed is watched no longer, and not told of."""
        due = math.inf
        for link, _ in self._watched.values():
            if link.descriptor is not None:
                due = min(due, link.into.next_due)
        return due

    def poll(self) -> None:
        """Let those receive that can."""
        now = self._network.clock()
        for descriptor, (link, ready) in list(self._watched.items()):
            if link.descriptor is not None and link.into.next_due <= now and not ready():
                self.unwatch(descriptor, ready)

    def wake(self) -> None:
        self._wake()

    def close(self) -> None:
        self._watched.clear()


class VirtualRuntime(Runtime):
    """A runtime thread as a task: the same order of calls and works, on virtual time.

    Made by :func:`open_virtual_runtime`.
    """

    waits = True
    threads = False

    def __init__(self, clock: SimClock, network: SimNetwork) -> None:
        self._clock = clock
        self._inbox = SimInbox(network, self._wake, self._look)
        self._told: list[Callable[[], object]] = []
        self._queue: deque[Callable[[], object] | Work] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._alarm = Alarm(clock, self._look)
        self._until = math.inf
        """When there is something to do, whatever arrives."""
        self._computed = trio.lowlevel.ParkingLot()
        self._iterations: Iterations | None = None
        self._stopped = False

    def attach(self, iterations: Iterations) -> None:
        self._iterations = iterations

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        results: list[outcome.Outcome[T]] = []
        done, wanted = trio.Event(), True

        def job() -> None:
            if wanted:
                results.append(outcome.capture(call))
            done.set()

        self._put(job)
        try:
            await done.wait()
        finally:
            wanted = False
        return results[0].unwrap()

    def submit(self, work: Work) -> None:
        self._put(work)

    def post(self, call: Callable[[], object]) -> None:
        self._put(call)

    @property
    def inbox(self) -> Inbox | None:
        return self._inbox

    def tell(self, call: Callable[[], object]) -> None:
        self._told.append(call)

    def stop(self) -> None:
        """End once everything queued before has run."""
        self._stopped = True
        self._wake()

    def _put(self, item: Callable[[], object] | Work) -> None:
        self._queue.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._arrived:
            self._arrived.unpark_all()

    def _look(self) -> None:
        """Go on if something is due, or when it will be."""
        if self._arrived:
            due = min(self._until, self._inbox.next_due)
            if due <= self._clock.time:
                self._arrived.unpark_all()
            else:
                self._alarm.set(due)

    async def _park(self) -> None:
        """Wait until there may be something to do."""
        due = min(self._until, self._inbox.next_due)
        if due <= self._clock.time:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            self._alarm.set(due)
            await self._arrived.park()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        waits = self._iterations is not None and self._iterations.wait_secs() is not None
        return not self._queue and not waits

    async def serve(self) -> None:
        """The thread's body."""
        while True:
            self._take_in()
            self._pass_on()
            wait = None if self._iterations is None else self._iterations.wait_secs()
            if wait == 0.0 and self._iterations is not None:
                await self._step(self._iterations)
            elif self._stopped and not self._queue:
                break
            elif not self._queue:
                self._until = math.inf if wait is None else self._clock.time + wait
                await self._park()
        self._inbox.close()
        if self._iterations is not None:
            wake_all(self._iterations.end())

    def _pass_on(self) -> None:
        """Call what the event loop's thread is to call, in its turn."""
        told, self._told = self._told, []
        for call in told:
            call()

    def _take_in(self) -> None:
        if not self._queue:
            self._inbox.poll()
        for _ in range(min(MAX_TAKEN_IN, len(self._queue))):
            item = self._queue.popleft()
            if isinstance(item, Work):
                assert self._iterations is not None, "a work before the engine"
                self._iterations.add(item)
            else:
                item()

    async def _step(self, iterations: Iterations) -> None:
        """One batch. What it sends is on its way already; who waits for it hears when its time is over."""
        woken = iterations.step()
        busy, self._clock.ahead = self._clock.ahead, 0.0
        if busy:
            self._clock.call_at(self._clock.time + busy, self._computed.unpark_all)
            await self._computed.park()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        wake_all(woken)
        self._pass_on()


@contextlib.asynccontextmanager
async def open_virtual_runtime(clock: SimClock, network: SimNetwork) -> AsyncIterator[VirtualRuntime]:
    """A virtual runtime for the length of the block; leaving it lets queued calls run."""
    runtime = VirtualRuntime(clock, network)

    async def hold() -> None:
        with trio.CancelScope(shield=True):
            await runtime.serve()

    async with open_hidden_nursery() as nursery:
        nursery.start_soon(hold)
        try:
            yield runtime
        finally:
            runtime.stop()
