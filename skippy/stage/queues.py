"""Small waiting structures of a lane: replies that are owed, and the queue of its writer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from skippy.protocol import Reply, ReplyAnnex

from .errors import StageError
from .runs import ChainRun

T = TypeVar("T")


class PendingReply:
    """A place in a reply stream that is filled later, once. Replies leave in the order of their places.

    Args:
        complete: what is done with the reply as it comes.

    Attributes:
        annex: what comes with the reply, once it is there.
        open_run: asked for the steps that may follow the reply by themselves, where there are to be any; the
            reply is then that of the last of them.
    """

    __slots__ = ("_complete", "_event", "_failure", "_follow", "_reply", "annex", "open_run")

    def __init__(
        self,
        reply: Reply | None = None,
        complete: Callable[[Reply], Reply] | None = None,
        annex: ReplyAnnex | None = None,
    ) -> None:
        self.annex = annex
        self.open_run: Callable[[], ChainRun | None] | None = None
        self._complete = complete
        self._event = trio.Event()
        self._reply = reply
        self._failure: StageError | None = None
        self._follow: Callable[[PendingReply], object] | None = None
        if reply is not None:
            self._event.set()

    def set(self, reply: Reply, annex: ReplyAnnex | None = None) -> None:
        self.annex = annex
        self._reply = reply if self._complete is None else self._complete(reply)
        self._over()

    def fail(self, failure: StageError) -> None:
        """Make every present and later ``wait`` raise; no effect on a reply that is already there."""
        if self._reply is None:
            self._failure = failure
            self._over()

    def _over(self) -> None:
        self._event.set()
        if self._follow is not None:
            self._follow(self)

    def then(self, follow: Callable[[PendingReply], object]) -> None:
        """Call ``follow(self)`` once the reply is there or has failed: now, if that is so already."""
        self._follow = follow
        if self._event.is_set():
            follow(self)

    async def wait(self) -> Reply:
        """The reply, once it is there. Raises the failure of the lane instead, if that comes first."""
        await self._event.wait()
        return self.result()

    def result(self) -> Reply:
        """As :meth:`wait`, once the reply is there or has failed."""
        if self._reply is None:
            assert self._failure is not None, "nothing has come yet"
            raise self._failure
        return self._reply


class SendQueue(Generic[T]):
    """A bounded first-in-first-out queue between one putting and one getting task.

    Unlike a memory channel, ``put`` has no checkpoint: a frame and the record of what is owed for it enter
    together or, if the putter is cancelled while it waits for room, not at all.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._items: deque[T] = deque()
        self._in_hand = False
        self._held = False
        self._filled = trio.lowlevel.ParkingLot()
        self._emptied = trio.lowlevel.ParkingLot()

    async def wait_room(self) -> None:
        """Wait until ``put`` is allowed. Cancellable; nothing happened then."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._items) >= self._capacity:
            await self._emptied.park()

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is in the getter's hands, and nobody holds the queue."""
        return not self._items and not self._in_hand and not self._held

    @property
    def held(self) -> bool:
        """Somebody does: an item may be on its way past the queue."""
        return self._held

    def hold(self) -> None:
        """Keep the getter waiting until ``release``: an item is on its way past the queue, which is idle."""
        assert self.idle, "held while in use"
        self._held = True

    def release(self, first: T | None) -> None:
        """End a hold; ``first``, what is left of the held item, goes in front of everything put since."""
        self._held = False
        if first is not None:
            self._items.appendleft(first)
        if self._items:
            self._filled.unpark()
        elif self._emptied:
            self._emptied.unpark_all()

    def put(self, item: T) -> None:
        assert len(self._items) < self._capacity, "put without room"
        self._items.append(item)
        self._filled.unpark()

    async def get(self) -> T:
        """The next item. The one returned before counts as done from here on."""
        self._in_hand = False
        self._emptied.unpark_all()
        while self._held or not self._items:
            await self._filled.park()
        self._in_hand = True
        item = self._items.popleft()
        self._emptied.unpark_all()
        return item

    async def wait_flushed(self) -> None:
        """Wait until every item put so far has been got and done."""
        while not self.idle:
            await self._emptied.park()
