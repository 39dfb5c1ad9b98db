"""The protocol's machines driven by bytes: every five bytes are one call.

A call that does not fit raises one of the two protocol errors and changes nothing; everything else is a
finding, and so is a counter out of its bounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import attrs

from skippy.protocol import (
    DATA_KINDS,
    Lane,
    Message,
    MessageKind,
    PredictionReturn,
    ProtocolError,
    RemoteProtocolError,
    Reply,
    ReplyKind,
    Session,
    UpstreamConnection,
    UpstreamEvent,
    Verb,
    WindowState,
    authoritative_position,
    default_state,
    execution_tokens,
)
from skippy.protocol.kinds import MAX_VERIFY_WINDOW_PIPELINE_DEPTH

STEP_BYTES: Final = 5
MAX_STEPS: Final = 200
_KINDS: Final = tuple(MessageKind)
_REPLIES: Final = tuple(ReplyKind)


def _message(kind_byte: int, shape: int, place: int, count: int) -> Message:
    """A message from four bytes: mostly its kind's own header, small numbers, one of two requests."""
    kind = _KINDS[kind_byte % len(_KINDS)]
    state = attrs.evolve(
        default_state(kind), checkpoint_generation=shape >> 4 & 3, current_token=count & 7, seq_id=place
    )
    if shape & 0xC0 == 0xC0:
        state = attrs.evolve(state, phase=shape & 7, flags=place)
    tokens = tuple(range(count >> 4))
    return Message(
        kind, state, place - 2, (count & 15) - 1, 1 + (shape & 1), 7 + (shape >> 1 & 1), tokens=tokens
    )


_REFUSED: Final = object()


def _tried(state: Callable[[], Any], call: Callable[[], Any]) -> Any:
    """The call's value; _REFUSED when it raised, after checking that it changed nothing."""
    before = state()
    try:
        return call()
    except ProtocolError as error:
        assert state() == before, f"changed by a call that raised {error}"
        return _REFUSED


class _Stage:
    """A connection from upstream and the session that its frames are for."""

    def __init__(self) -> None:
        self.connection = UpstreamConnection()
        self.session = Session()

    def _seen(self) -> tuple[object, ...]:
        c, s = self.connection, self.session
        windows = tuple((w.id, w.state) for w in s.windows.windows)
        return c.state, c.live, c.configured, s.state, s.length, s.epoch, s.stale_frames, windows

    def receive(self, message: Message) -> None:
        stale = self.session.is_stale(message)
        before = self._seen()
        event = _tried(self._seen, lambda: self.connection.receive(message, stale=stale))
        if event is _REFUSED:
            return
        assert not stale or self._seen() == before, "a stale frame changed something"
        position = authoritative_position(message)
        assert position is None or position >= 0
        with contextlib.suppress(RemoteProtocolError):
            assert len(execution_tokens(message)) == message.token_count
        if message.kind in DATA_KINDS:
            self._accept(message)
        elif event is UpstreamEvent.TRIM:
            length = self.session.length
            assert 0 <= self.session.trim(message) <= length
        elif event is UpstreamEvent.RETIRE_WINDOW:
            _tried(self._seen, lambda: self.session.windows.retire(message))
        elif event is UpstreamEvent.RESTORE:
            _tried(self._seen, lambda: self.session.restored(message, message.pos_start))

    def _accept(self, message: Message) -> None:
        length = self.session.length
        action = _tried(self._seen, lambda: self.session.accept(message))
        if action is _REFUSED:
            return
        assert self.session.windows.unresolved <= MAX_VERIFY_WINDOW_PIPELINE_DEPTH
        if action.verb is Verb.STALE:
            assert self.session.length == length
        else:
            assert 0 <= action.position <= length, "a gap or a negative position was accepted"
            assert (action.verb is Verb.RUN) == (action.position == length)
            assert self.session.length == action.position + action.count

    def resolve(self, window_id: int, predictions: int) -> None:
        """The oldest window's turn, or another id that is refused."""
        windows = self.session.windows
        oldest = next((w for w in windows.windows if w.state in (WindowState.OPEN, WindowState.STALE)), None)
        if window_id & 1 and oldest is not None:
            window_id = oldest.id
        state = _tried(self._seen, lambda: windows.resolve(window_id, predictions))
        if state is not _REFUSED:
            assert oldest is not None
            assert oldest.id == window_id
            assert (state is WindowState.COMMITTED) == (oldest in windows.windows)

    def stop(self) -> None:
        if _tried(self._seen, self.connection.stopped) is not _REFUSED:
            self.session.stop()
            assert self.session.length == self.session.windows.unresolved == 0

    def missed(self) -> None:
        _tried(self._seen, self.connection.restore_missed)


class _Driver:
    """A lane and its return stream."""

    def __init__(self) -> None:
        self.lane = Lane(3)
        self.returns = PredictionReturn(1, 7)

    def seen(self) -> tuple[object, ...]:
        lane, returns = self.lane, self.returns
        return lane.state, lane.credit.outstanding, lane.owed_predictions, returns.state, returns.owed

    def step(self, choice: int, message: Message) -> None:
        lane, returns = self.lane, self.returns
        calls: tuple[Callable[[], Any], ...] = (
            lane.connected,
            lane.lease,
            lane.credit.send,
            lane.credit.ack,
            lane.expect_prediction,
            lane.prediction,
            lane.stop,
            lane.stop_acknowledged,
            lane.release,
            lane.fail,
            lane.retire,
            lambda: returns.opened(message),
            lambda: returns.bind(message.request_id, message.session_id),
            lambda: returns.expect(message.kind),
            lambda: returns.receive(Reply(_REPLIES[message.token_count % 3])),
            returns.release,
        )
        done = _tried(self.seen, calls[choice % len(calls)]) is not _REFUSED
        assert 0 <= lane.credit.outstanding <= lane.credit.limit
        assert lane.owed_predictions >= 0
        if done and calls[choice % len(calls)] == lane.release:
            assert lane.owed_predictions == 0 == lane.credit.outstanding, "returned with owed replies"


def machines(data: bytes) -> None:
    """Byte 0 of each step chooses the machine and the call, the other four are the message."""
    stage, driver = _Stage(), _Driver()
    for start in range(0, min(len(data), MAX_STEPS * STEP_BYTES) - STEP_BYTES + 1, STEP_BYTES):
        choice, *rest = data[start : start + STEP_BYTES]
        message = _message(*rest)
        if choice < 128:
            stage.receive(message)
        elif choice < 144:
            stage.stop()
        elif choice < 148:
            stage.missed()
        elif choice < 160:
            stage.resolve(rest[0], rest[1] & 7)
        elif choice == 255:
            stage, driver = _Stage(), _Driver()
        else:
            driver.step(choice, message)
