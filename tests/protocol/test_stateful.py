"""Rule-based machines: long random lives of the protocol's machines against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skippy.protocol import (
    CreditWindow,
    LocalProtocolError,
    Message,
    MessageKind,
    RemoteProtocolError,
    Session,
    UpstreamConnection,
    UpstreamState,
    Verb,
    states,
)
from skippy.protocol.machines import _UPSTREAM_EVENTS

from .strategies import message

K = MessageKind


class CreditMachine(RuleBasedStateMachine):
    """The window against two counters."""

    @initialize(limit=st.integers(1, 5))
    def open(self, limit: int) -> None:
        self.window = CreditWindow.open(limit)
        self.sent = self.acknowledged = 0

    @rule()
    def send(self) -> None:
        if self.sent - self.acknowledged < self.window.limit:
            self.window.send()
            self.sent += 1
        else:
            with pytest.raises(LocalProtocolError):
                self.window.send()

    @rule()
    def ack(self) -> None:
        if self.acknowledged < self.sent:
            self.window.ack()
            self.acknowledged += 1
        else:
            with pytest.raises(RemoteProtocolError):
                self.window.ack()

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "window"):
            assert self.window.outstanding == self.sent - self.acknowledged
            assert 0 <= self.window.available <= self.window.limit
            assert self.window.drained == (self.window.outstanding == 0)


class StageMachine(RuleBasedStateMachine):
    """A connection and its session, driven by a well-behaved driver that sometimes misbehaves.

    The model is what the driver believes: the ids, the length, the generation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connection = UpstreamConnection()
        self.session = Session()
        self.request = 0
        self.length = 0
        self.generation = 0
        self.decoding = False
        self.stale = 0
        self.windows = 0

    @property
    def live(self) -> bool:
        return self.connection.state in (
            UpstreamState.PREFILLING,
            UpstreamState.CONFIGURED,
            UpstreamState.DECODING,
        )

    def build(self, kind: MessageKind, **fields: Any) -> Message:
        ids = {"request_id": self.request, "session_id": self.request + 1}
        return message(kind, **{"checkpoint_generation": self.generation, **ids, **fields})

    def send(self, frame: Message) -> Verb:
        before = self.connection.state
        stale = self.session.is_stale(frame)
        self.connection.receive(frame, stale=stale)
        assert not stale or self.connection.state is before
        action = self.session.accept(frame)
        if action.verb is not Verb.STALE:
            self.length = action.position + action.count
        assert self.session.length == self.length
        return action.verb

    @precondition(lambda self: self.connection.state is UpstreamState.IDLE)
    @rule()
    def new_request(self) -> None:
        self.request += 1
        self.length = self.generation = self.stale = 0
        self.decoding = False
        self.connection.receive(self.build(K.CONFIGURE_GENERATION))

    @precondition(lambda self: self.live and not self.decoding)
    @rule(count=st.integers(1, 5))
    def prefill(self, count: int) -> None:
        before = self.length
        assert self.send(self.build(K.PREFILL_EMBD, pos_start=before, token_count=count)) is Verb.RUN
        assert self.length == before + count

    @precondition(lambda self: self.live)
    @rule(back=st.integers(0, 3), count=st.integers(1, 4))
    def verify(self, back: int, count: int) -> None:
        position = max(self.length - back, 0)
        expected = Verb.RUN if position == self.length else Verb.REWIND
        self.windows += 1
        window = self.build(K.VERIFY_WINDOW, pos_start=position, token_count=count, seq_id=self.windows)
        assert self.send(window) is expected
        self.session.windows.resolve(self.windows, count)
        assert self.length == position + count
        self.decoding = True

    @precondition(lambda self: self.live and self.length > 0)
    @rule(keep=st.integers(0, 8))
    def trim_and_replay(self, keep: int) -> None:
        keep = min(keep, self.length)
        trim = self.build(K.TRIM_SESSION, token_count=keep)
        self.connection.receive(trim)
        assert self.session.trim(trim) == keep
        self.length = keep
        self.generation += 1
        replay = self.build(K.DECODE_REPLAY_EMBD, pos_start=max(keep - 1, 0), token_count=2)
        assert self.send(replay) is (Verb.REWIND if keep > 0 else Verb.RUN)

    @precondition(lambda self: self.live and self.session.epoch is not None)
    @rule(
        kind=st.sampled_from([K.PREFILL_EMBD, K.PREFILL_FINAL_EMBD, K.DECODE_EMBD, K.DECODE_REPLAY_EMBD]),
        position=st.integers(0, 20),
    )
    def late_frame_of_an_older_generation(self, kind: MessageKind, position: int) -> None:
        """It fits wherever a request is live, also where its kind would not."""
        assert self.session.epoch is not None
        older = self.session.epoch.checkpoint_generation - 1
        late = self.build(kind, pos_start=position, token_count=1, checkpoint_generation=older)
        assert self.send(late) is Verb.STALE
        self.stale += 1

    @precondition(lambda self: not self.live)
    @rule()
    def stale_where_nothing_is_live(self) -> None:
        with pytest.raises(RemoteProtocolError, match="stale frame does not fit"):
            self.connection.receive(self.build(K.DECODE_EMBD), stale=True)

    @precondition(lambda self: self.live)
    @rule(ahead=st.integers(1, 9))
    def gap(self, ahead: int) -> None:
        with pytest.raises(RemoteProtocolError, match="gap"):
            self.session.accept(self.build(K.DECODE_EMBD, pos_start=self.length + ahead, token_count=1))

    @precondition(lambda self: self.live)
    @rule(kind=st.sampled_from([K.PREFILL_EMBD, K.DECODE_EMBD, K.STOP, K.TRIM_SESSION]))
    def another_request(self, kind: MessageKind) -> None:
        with pytest.raises(RemoteProtocolError):
            self.connection.receive(self.build(kind, request_id=self.request + 1))

    @precondition(lambda self: self.decoding and self.live)
    @rule(kind=st.sampled_from([K.PREFILL_EMBD, K.CONFIGURE_GENERATION, K.TRY_RESTORE_PREFILL]))
    def too_late(self, kind: MessageKind) -> None:
        with pytest.raises(RemoteProtocolError, match="decoding"):
            self.connection.receive(self.build(kind))

    @precondition(lambda self: self.live)
    @rule()
    def stop(self) -> None:
        self.connection.receive(self.build(K.STOP))
        with pytest.raises(RemoteProtocolError, match="stopping"):
            self.connection.receive(self.build(K.PREFILL_EMBD))
        self.session.stop()
        self.connection.stopped()
        self.length = self.stale = self.windows = 0
        self.decoding = False

    @rule(kind=st.sampled_from(MessageKind))
    def a_refused_kind_changes_nothing(self, kind: MessageKind) -> None:
        if _UPSTREAM_EVENTS[kind] in states.UPSTREAM[self.connection.state]:
            return
        before = (self.connection.state, self.connection.live, self.connection.configured)
        with pytest.raises(RemoteProtocolError, match="does not fit"):
            self.connection.receive(self.build(kind))
        assert (self.connection.state, self.connection.live, self.connection.configured) == before

    @invariant()
    def model_agrees(self) -> None:
        assert self.session.length == self.length
        assert self.session.stale_frames >= self.stale


TestCredit = CreditMachine.TestCase
TestStage = StageMachine.TestCase
TestCredit.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestStage.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
