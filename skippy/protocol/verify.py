"""The verify windows of one request: what was proposed, what was answered, and what a rewind undid.

Source: ``docs/protocol.md``, section "Verify windows". The table is in :mod:`skippy.protocol.states`.
"""

from __future__ import annotations

from collections import deque

from .epochs import VerifyWindowRange
from .errors import RemoteProtocolError
from .kinds import MAX_VERIFY_WINDOW_PIPELINE_DEPTH
from .machines import Machine
from .messages import Message
from .states import WINDOW, WindowEvent, WindowState


class VerifyWindow(Machine[WindowState, WindowEvent]):
    """One window, and what has become of it."""

    def __init__(self, span: VerifyWindowRange, state: WindowState = WindowState.OPEN) -> None:
        super().__init__(f"verify window {span.window_id}", WINDOW, state)
        self.id = span.window_id
        self.base = span.base_position
        self.end = span.base_position + span.token_count

    def step(self, event: WindowEvent) -> WindowState:
        """The state that ``event`` leads to. RemoteProtocolError, and no step, when it does not fit."""
        self._remote(event)
        return self._state


class VerifyPipeline:
    """The windows of one request, first in, first out. Made once per lane, and cleared between requests.

    ``open(window)`` as a window arrives to be carried out, ``skip(id)`` for one that will not be; ``resolve``
    as the oldest of them is answered (where the answers pass by: on the last stage and at stage 0) or handed
    on (in between). ``rewind`` when the session is taken back, ``retire(message)`` for a RetireVerifyWindow.

    All errors are the peer's (RemoteProtocolError); a call that raises changes nothing.
    """

    def __init__(self) -> None:
        self._unresolved: deque[VerifyWindow] = deque()
        self._committed: deque[VerifyWindow] = deque()
        self._last_id: int | None = None

    @property
    def unresolved(self) -> int:
        """Windows that are open, or stale and still to be answered."""
        return len(self._unresolved)

    @property
    def windows(self) -> tuple[VerifyWindow, ...]:
        """All windows that are not retired, oldest first."""
        return (*self._committed, *self._unresolved)

    def open(self, window: VerifyWindowRange) -> None:
        """A window arrived to be carried out; what reached beyond its base position is undone.

        Refuses an id that is not above all earlier ones, and more than 64 unresolved windows.
        """
        if self._last_id is not None and window.window_id <= self._last_id:
            raise RemoteProtocolError(
                f"verify window {window.window_id} is out of order: window {self._last_id} came before it"
            )
        self._check_depth(window.window_id)
        self.rewind(window.base_position)
        self._last_id = window.window_id
        self._unresolved.append(VerifyWindow(window))

    def skip(self, window_id: int) -> None:
        """A stale window arrived: it is only answered. It may be a late one, so its id is in no order."""
        self._check_depth(window_id)
        self._unresolved.append(VerifyWindow(VerifyWindowRange(window_id, 0, 0), WindowState.STALE))

    def _check_depth(self, window_id: int) -> None:
        if len(self._unresolved) >= MAX_VERIFY_WINDOW_PIPELINE_DEPTH:
            raise RemoteProtocolError(
                f"verify window {window_id} is one too many: {len(self._unresolved)} are unresolved"
            )

    def resolve(self, window_id: int, predictions: int) -> WindowState:
        """The oldest unresolved window is done with: answered by so many predictions, or handed on.

        Returns COMMITTED for an open one, whose predictions count, and RETIRED for a stale one, whose
        predictions, if any, do not.

        Refuses another id than that of the oldest, and for an open window no predictions, or more than it
        has tokens.
        """
        if not self._unresolved or self._unresolved[0].id != window_id:
            oldest = f"window {self._unresolved[0].id} is next" if self._unresolved else "none is unresolved"
            raise RemoteProtocolError(f"answer for verify window {window_id}, but {oldest}")
        window = self._unresolved[0]
        if window.state is WindowState.STALE:
            window.step(WindowEvent.DISCARD)
        else:
            count = window.end - window.base
            if predictions > count:
                raise RemoteProtocolError(
                    f"{predictions} predictions for verify window {window_id}, which has {count} tokens"
                )
            window.step(WindowEvent.COMMIT if predictions else WindowEvent.DISCARD)
            self._committed.append(window)
        self._unresolved.popleft()
        return window.state

    def rewind(self, length: int) -> None:
        """The session is taken back to ``length``: windows that reach beyond are undone."""
        while self._committed and self._committed[-1].end > length:
            self._committed.pop().step(WindowEvent.REWIND)
        for window in self._unresolved:
            if window.end > length:
                window.step(WindowEvent.REWIND)

    def retire(self, message: Message) -> None:
        """A RetireVerifyWindow: windows that end within its range, or before it, need no way back any more.

        Refuses a negative position or count, and a range that touches a window which is not committed.
        """
        start, count = message.pos_start, message.token_count
        if start < 0 or count < 0:
            raise RemoteProtocolError(
                f"{message.kind.name} of {count} positions from {start} on: neither may be negative"
            )
        end = start + count
        for window in self._unresolved:
            if window.base < end and start < window.end:
                window.step(WindowEvent.RETIRE)  # raises: neither an open nor a stale window fits
        while self._committed and self._committed[0].end <= end:
            self._committed.popleft().step(WindowEvent.RETIRE)

    def clear(self) -> None:
        """The request is over; the next one counts its windows anew."""
        self._unresolved.clear()
        self._committed.clear()
        self._last_id = None
