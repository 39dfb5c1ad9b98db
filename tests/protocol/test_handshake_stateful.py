"""Two peers shake hands over streams that are cut anywhere, whatever each of them was given."""

from __future__ import annotations

import attrs
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skippy.protocol import (
    DialerHandshake,
    HandshakeState,
    ListenerHandshake,
    MessageKind,
    RemoteProtocolError,
    encode_message,
)

from .admissions import LOADED, REQUEST
from .strategies import message

FRAME = b"".join(encode_message(message(MessageKind.STOP)))


class Handshakes(RuleBasedStateMachine):
    """Model: who may get in follows from the four settings alone."""

    @initialize(
        dialer_token=st.sampled_from([None, b"secret", b"other"]),
        listener_token=st.sampled_from([None, b"secret"]),
        asks=st.sampled_from(["plain", "right", "wrong"]),
        listens=st.sampled_from(["plain", "strict", "both"]),
    )
    def start(
        self, dialer_token: bytes | None, listener_token: bytes | None, asks: str, listens: str
    ) -> None:
        request = {"plain": None, "right": REQUEST, "wrong": attrs.evolve(REQUEST, activation_width=1)}[asks]
        self.dialer = DialerHandshake(dialer_token, request)
        self.listener = ListenerHandshake(
            listener_token, None if listens == "plain" else LOADED, allow_plain=listens == "both"
        )
        self.to_listener = self.to_dialer = b""
        self.tokens_fit = dialer_token == listener_token
        self.asks, self.listens, self.listener_asks = asks, listens, listener_token is not None
        self.sent_frame = False
        self.failed: set[object] = set()

    def flush(self) -> None:
        self.to_listener += self.dialer.data_to_send()
        self.to_dialer += self.listener.data_to_send()

    @rule(count=st.integers(1, 4000))
    def listener_receives(self, count: int) -> None:
        self.flush()
        piece, self.to_listener = self.to_listener[:count], self.to_listener[count:]
        self.feed(self.listener, piece)

    @rule(count=st.integers(1, 4000))
    def dialer_receives(self, count: int) -> None:
        self.flush()
        piece, self.to_dialer = self.to_dialer[:count], self.to_dialer[count:]
        self.feed(self.dialer, piece)

    def feed(self, side: DialerHandshake | ListenerHandshake, piece: bytes) -> None:
        if not piece or side.state in (HandshakeState.ADMITTED, HandshakeState.CLOSED):
            return
        try:
            side.receive_data(piece)
        except RemoteProtocolError:
            self.failed.add(side)
        self.flush()

    @precondition(lambda self: self.dialer.admitted and not self.sent_frame)
    @rule()
    def dialer_sends_a_frame(self) -> None:
        self.flush()
        self.to_listener += FRAME
        self.sent_frame = True

    @invariant()
    def a_listener_tells_only_who_shows_the_token(self) -> None:
        if self.listener_asks and not self.tokens_fit:
            assert self.to_dialer == b""

    @invariant()
    def who_gets_in(self) -> None:
        if self.listener.admitted and self.listens != "plain":
            assert self.tokens_fit
            assert self.asks == "right" or (self.asks == "plain" and self.listens == "both")
            assert (self.listener.request == REQUEST) == (self.asks == "right")
        if self.dialer.admitted and self.asks != "plain":
            assert self.asks == "right"
            assert self.dialer.answer is not None
            assert self.listener.admitted

    def teardown(self) -> None:
        """Deliver everything: both are in, or one has failed, as the settings say."""
        if not hasattr(self, "dialer"):
            return
        for _ in range(8):
            self.listener_receives(1 << 20)
            self.dialer_receives(1 << 20)
            if self.dialer.admitted and not self.sent_frame:
                self.dialer_sends_a_frame()
        fits = self.tokens_fit and (
            (self.asks == "right" and self.listens != "plain")
            or (self.asks == "plain" and self.listens != "strict")
        )
        if fits:
            assert self.listener.admitted
            assert self.dialer.admitted
            assert not self.failed
        elif self.asks != "plain" and self.listens == "plain":
            # A plain listener takes the packet for a frame, which its decoder then refuses.
            assert not self.dialer.admitted
        elif self.listens != "plain":
            assert not self.listener.admitted
            assert not self.dialer.admitted or self.asks == "plain"


TestHandshakes = Handshakes.TestCase
TestHandshakes.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
