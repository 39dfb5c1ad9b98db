"""The lane pool of stage 0: persistent lanes through the whole chain, one request each."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Sequence

import trio

from skippy.protocol import Message, MessageKind, ReplyStats, default_state
from skippy.stage import Lane, LaneLost, PendingReply, Stage, StageError
from skippy.stage.nurseries import leaves
from skippy.telemetry import get_logger, names

from .work import Work

log = get_logger("skippy.frontend")

REPLY_TIMEOUT_SECS = 300.0
"""Longest wait for one reply of the chain: far above a slow prefill, below what HTTP clients wait."""
RETRY_PAUSE_SECS = 0.5
MAX_RETRY_PAUSE_SECS = 10.0
"""The pause doubles up to this while a lane is refused: what was compared does not change by waiting."""
KEEP_WAIT_SECS = 1.0
"""How long a request may wait for what another one, which is over, leaves in the caches: far above the round
trip of a Stop, below what computing a prompt that is worth it takes."""


def shares_more(path: Sequence[int], tokens: Sequence[int], known: int) -> bool:
    """Whether the two begin with the same tokens, and more than ``known`` of them."""
    count = known + 1
    return count <= min(len(path), len(tokens)) and all(map(operator.eq, path[:count], tokens[:count]))


class LocalReplies:
    """The owed replies of a lane whose upstream is this process, oldest first."""

    annexed = True

    def __init__(self) -> None:
        self._places: deque[PendingReply] = deque()

    async def put(self, reply: PendingReply) -> None:
        self._places.append(reply)

    @property
    def full(self) -> bool:
        return False

    def put_nowait(self, reply: PendingReply) -> None:
        self._places.append(reply)

    def take(self) -> PendingReply:
        """The place of the reply that is owed for the message handled last."""
        return self._places.popleft()

    def clear(self) -> None:
        """Forget places that nobody took; the lane itself keeps count of what is owed."""
        self._places.clear()


class PooledLane:
    """A lane of the pool, leased to one generation at a time."""

    def __init__(self, lane: Lane, replies: LocalReplies) -> None:
        self.lane = lane
        self.replies = replies
        self.request: tuple[int, int] | None = None
        """(request_id, session_id) of the generation that uses it; None before its first message."""
        self.generation = 0
        """checkpoint_generation of the frames of that generation: raised with each replay."""
        self.work: Work | None = None
        """The generation's progress, where it was admitted by a gate."""
        self.ended = False
        """It has left the pool for good."""
        self.returning = False
        """It is being cleaned, to be idle again."""
        self.left: tuple[str, Sequence[int]] | None = None
        """Namespace and tokens of the request that has just left it, which its stages may keep; None once the
        lane is clean."""
        self._returned = trio.Event()

    def give_back(self) -> None:
        """The generation has left, whatever state it left the lane in. Never waits."""
        self._returned.set()

    async def wait_given_back(self) -> None:
        await self._returned.wait()
        self._returned = trio.Event()

    async def handle(self, message: Message) -> PendingReply:
        """Execute a message and return the place of its reply. Raises StageError when the lane ends."""
        await self.lane.handle(message)
        if self.work is not None:
            self.work.renew()
        return self.replies.take()

    def handle_now(self, message: Message) -> PendingReply | None:
        """:meth:`handle` for a decode step that nothing has to be waited for; None where it is not one."""
        return self.replies.take() if self.lane.handle_now(message) else None

    def token_received(self) -> None:
        """The generation has got another token."""
        if self.work is not None:
            self.work.token()


class LanePool:
    """Keeps ``size`` lanes connected; each is replaced when it fails.

    Run :meth:`serve` in a nursery, then :meth:`take` lanes and ``give_back`` them.

    Args:
        size: lanes, at most the stage's lane_count.
        outage: asked first why no lane is connected; None where nothing else is known.

    Attributes:
        on_request_over: told what the stages of the chain have observed of each request.
    """

    def __init__(self, stage: Stage, size: int, outage: Callable[[], str | None] = lambda: None) -> None:
        self._stage = stage
        self._outage = outage
        self.size = size
        self._idle: deque[PooledLane] = deque()
        self._connected = 0
        self._connecting = trio.lowlevel.ParkingLot()
        self._lanes: set[PooledLane] = set()
        self._cleaned = trio.lowlevel.ParkingLot()
        self._watchers: list[Callable[[PooledLane], None]] = []
        self._last_error: str | None = None
        self._reported: str | None = None
        self._lost: str | None = None
        """Why idle lanes were lost, as the log has it since the pool was last whole."""
        self.on_request_over: Callable[[ReplyStats], object] = lambda _: None

    @property
    def ready(self) -> bool:
        """Whether a lane is connected, which means that every stage below is loaded and connected."""
        return self._connected > 0

    @property
    def lanes(self) -> Collection[PooledLane]:
        """Those that are connected."""
        return self._lanes

    @property
    def connected(self) -> int:
        """How many lanes are connected."""
        return self._connected

    @property
    def idle_lanes(self) -> int:
        """How many lanes nobody has leased."""
        return len(self._idle)

    @property
    def owed_by_idle(self) -> int:
        """How many of those still owe something, which none of them may."""
        return sum(pooled.lane.owes for pooled in self._idle)

    @property
    def last_error(self) -> str | None:
        """Why no lane is connected; None while one is, or before the first attempt has come to anything."""
        watch = self._stage.context.downstream_watch
        # A wait explains least: whatever ended the last lane says more.
        return None if self.ready else self._outage() or watch.trouble or self._last_error or watch.waiting

    @property
    def unready(self) -> str | None:
        """What clients are told while no lane is connected; None while one is."""
        if self.ready:
            return None
        return f"the chain is not ready: {self.last_error or 'still connecting to the next stage'}"

    async def wait_ready(self) -> None:
        while not self.ready:
            await self._connecting.park()

    def watch(self, changed: Callable[[PooledLane], None]) -> None:
        """Have ``changed`` called with each lane that becomes idle or has ended. It must not raise."""
        self._watchers.append(changed)

    async def serve(self) -> None:
        """Keep the lanes until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(self.size):
                nursery.start_soon(self._keep_lane)

    @property
    def idle(self) -> bool:
        """Whether :meth:`take` has a lane to give."""
        while self._idle and self._idle[0].lane.failure is not None:
            self._idle.popleft()  # it has just ended
        return bool(self._idle)

    def take(self) -> PooledLane | None:
        """A lane that is connected and idle, now leased; None while there is none."""
        if not self.idle:
            return None
        pooled = self._idle.popleft()
        pooled.lane.machine.lease()
        return pooled

    async def wait_kept(self, namespace: str, tokens: Sequence[int], known: int) -> bool:
        """Wait, up to KEEP_WAIT_SECS, for lanes being cleaned whose stages may then keep more of ``tokens``.

        An answer's end reaches its client before the stages hear of it: the next turn of a chat must find
        what this one leaves.

        Args:
            known: so many tokens the stages are known to have already.

        Returns:
            Whether there was any such lane, so that there may be more by now.
        """

        def promising() -> bool:
            left = (pooled.left for pooled in self._lanes if pooled.left is not None)
            return any(space == namespace and shares_more(path, tokens, known) for space, path in left)

        if not promising():
            return False
        with trio.move_on_after(KEEP_WAIT_SECS):
            while promising():
                await self._cleaned.park()
        return True

    async def wait_clean(self) -> None:
        """Wait until no lane is being cleaned: until then, stages do not keep what its request leaves."""
        while any(pooled.left is not None for pooled in self._lanes):
            await self._cleaned.park()

    async def wait_left(self, pooled: PooledLane) -> None:
        """Wait until what ``left`` says of a lane that was given back is with the stages, or it ends."""
        while pooled.left is not None and not pooled.ended:
            await self._cleaned.park()

    def _tell(self, pooled: PooledLane) -> None:
        for changed in self._watchers:
            changed(pooled)

    async def _keep_lane(self) -> None:
        pause = RETRY_PAUSE_SECS
        while True:
            began, next_pause = trio.current_time(), min(2 * pause, MAX_RETRY_PAUSE_SECS)
            try:
                await self._one_lane()
                pause = next_pause = RETRY_PAUSE_SECS
            except* StageError as group:
                self._last_error = str(next(leaves(group)))
                if self._last_error != self._reported:  # once, not once per lane and attempt
                    self._reported = self._last_error
                    log.error("the next stage cannot be reached; trying again", reason=self._last_error)
                    self._stage.context.telemetry.emit(
                        names.STAGE_OPENAI_DOWNSTREAM_LANE_REPLACE_FAILED, error=self._last_error
                    )
            except* Exception as group:
                # A fault of ours: it must not take the other lanes with it, and must not stay unseen.
                self._last_error = "a lane failed by a fault of this program; see its log"
                log.error("lane failed by a fault of this program", exc_info=group)
            # A lane that has lived is replaced at once; one that fails at once is not tried in a tight loop.
            await trio.sleep_until(began + RETRY_PAUSE_SECS)
            with trio.move_on_at(began + pause):
                await self._connecting.park()
                next_pause = RETRY_PAUSE_SECS  # another lane is connected, so this one may be, too
            pause = next_pause

    async def _one_lane(self) -> None:
        telemetry = self._stage.context.telemetry
        replies = LocalReplies()
        lane = Lane(self._stage.context, replies)
        async with trio.open_nursery() as nursery:
            with telemetry.span(names.STAGE_OPENAI_DOWNSTREAM_PERSISTENT_CONNECT, lane=lane.number):
                await nursery.start(lane.run)
            lane.check_alive()
            pooled = PooledLane(lane, replies)
            lane.machine.connected()
            self._connected += 1
            self._lanes.add(pooled)
            self._reported = None
            self._connecting.unpark_all()
            if self._connected == self.size:
                self._lost = None
                telemetry.emit(names.STAGE_OPENAI_DOWNSTREAM_POOL_READY, pool_capacity=self.size)
            try:
                await self._circulate(pooled)
            finally:
                self._connected -= 1
                self._lanes.remove(pooled)
                self._cleaned.unpark_all()
                pooled.ended = True
                if pooled in self._idle:
                    self._idle.remove(pooled)
                self._tell(pooled)
                nursery.cancel_scope.cancel()
        self._last_error = str(lane.failure)
        if pooled.request is None and self._last_error != self._lost:  # who replays a request says so
            self._lost = self._last_error
            log.warning("an idle lane was lost and is replaced", reason=self._last_error)
        if pooled.returning:
            telemetry.emit(
                names.STAGE_OPENAI_DOWNSTREAM_LANE_RETURN_FAILED, lane=lane.number, error=self._last_error
            )
        telemetry.emit(
            names.STAGE_OPENAI_DOWNSTREAM_LANE_REPLACED, retired_lane=lane.number, error=self._last_error
        )

    async def _circulate(self, pooled: PooledLane) -> None:
        """Idle, leased, cleaned, idle …, until the lane ends."""
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await pooled.lane.wait_ended()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            while pooled.lane.failure is None:
                self._idle.append(pooled)
                self._tell(pooled)
                await pooled.wait_given_back()
                await self._clean(pooled)
                pooled.left = None
                self._cleaned.unpark_all()

    async def _clean(self, pooled: PooledLane) -> None:
        """Make a returned lane idle: read all it owes, Stop, read the Ack. A lane that cannot is closed."""
        lane = pooled.lane
        if lane.failure is not None:
            return
        pooled.returning = True
        telemetry = self._stage.context.telemetry
        with (
            trio.move_on_after(REPLY_TIMEOUT_SECS) as scope,
            telemetry.span(names.STAGE_OPENAI_SESSION_STOP, lane=lane.number),
        ):
            try:
                await lane.wait_settled()
                pooled.replies.clear()
                request_id, session_id = pooled.request or (0, 0)
                pooled.request = None
                lane.machine.stop()
                kind = MessageKind.STOP
                place = await pooled.handle(
                    Message(kind, default_state(kind), request_id=request_id, session_id=session_id)
                )
                await place.wait()
                lane.check_alive()
                lane.machine.stop_acknowledged()
                lane.machine.release()
                pooled.returning = False
                self.on_request_over(lane.stats.take_request())
            except StageError:
                pass  # the lane has ended, which `watch` sees
        if scope.cancelled_caught:
            lane.fail(LaneLost(f"no answer to Stop within {REPLY_TIMEOUT_SECS:g} s"))
