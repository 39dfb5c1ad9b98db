"""The handshake with admission behind the ready word."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    READY_WORD,
    AdmissionAnswer,
    DialerHandshake,
    HandshakeState,
    ListenerHandshake,
    LocalProtocolError,
    MessageKind,
    Refusal,
    RemoteProtocolError,
    admit,
    encode_admission,
    encode_message,
    encode_transport_auth,
)
from skippy.protocol.admission import decode_answer

from .admissions import DESCRIPTOR, LOADED, REQUEST
from .strategies import cuts, message

ASKED = attrs.evolve(REQUEST, extensions=("annex", "new"))
sizes = st.lists(st.integers(1, 2000), min_size=1, max_size=4)
FRAME = b"".join(encode_message(message(MessageKind.STOP)))


@given(st.none() | st.binary(min_size=1, max_size=64), st.binary(max_size=50), st.binary(max_size=50), sizes)
def test_both_sides_agree_and_nothing_behind_is_lost(
    token: bytes | None, from_dialer: bytes, from_listener: bytes, pieces: list[int]
) -> None:
    dialer, listener = DialerHandshake(token, ASKED), ListenerHandshake(token, LOADED)
    for piece in cuts(dialer.data_to_send(), pieces):
        listener.receive_data(piece)
    assert listener.authenticated
    assert listener.awaits_admission
    for piece in cuts(listener.data_to_send(), pieces):
        assert not dialer.receive_data(piece)
    assert dialer.awaits_admission
    rest = b""
    for piece in cuts(dialer.data_to_send() + from_dialer, pieces):
        if listener.admitted:
            rest += piece
        elif listener.receive_data(piece):
            rest = listener.trailing_data
    assert rest == from_dialer
    assert listener.request == ASKED
    assert listener.extensions == ("annex",)
    rest = b""
    for piece in cuts(listener.data_to_send() + from_listener, pieces):
        if dialer.admitted:
            rest += piece
        elif dialer.receive_data(piece):
            rest = dialer.trailing_data
    assert rest == from_listener
    assert dialer.answer == admit(ASKED, LOADED)
    assert dialer.extensions == ("annex",)
    assert listener.data_to_send() == dialer.data_to_send() == b""


def test_everything_at_once() -> None:
    """A dialer that does not wait for the ready word is served all the same."""
    listener = ListenerHandshake(b"secret", LOADED)
    data = encode_transport_auth(b"secret") + encode_admission(ASKED) + b"frames"
    assert listener.receive_data(data)
    assert listener.trailing_data == b"frames"
    sent = listener.data_to_send()
    assert sent == READY_WORD + encode_admission(admit(ASKED, LOADED))
    dialer = DialerHandshake(b"secret", ASKED)
    assert dialer.answer is None
    assert dialer.receive_data(sent + b"frames")
    assert dialer.trailing_data == b"frames"
    assert dialer.data_to_send() + b"frames" == data  # what was owed before is not forgotten


def test_the_dialer_reads_no_byte_that_is_not_the_handshakes() -> None:
    dialer = DialerHandshake(None, ASKED)
    data = READY_WORD + encode_admission(admit(ASKED, LOADED)) + b"frames"
    taken = 0
    while not dialer.admitted:
        count = dialer.bytes_wanted
        assert count > 0
        dialer.receive_data(data[taken : taken + count])
        taken += count
    assert data[taken:] == b"frames"
    assert dialer.trailing_data == b""


def test_strangers_learn_nothing_before_the_token() -> None:
    listener = ListenerHandshake(b"secret", LOADED)
    with pytest.raises(RemoteProtocolError, match="no credentials"):
        listener.receive_data(encode_admission(ASKED))
    assert not listener.authenticated
    assert listener.data_to_send() == b""
    listener = ListenerHandshake(b"secret", LOADED)
    with pytest.raises(RemoteProtocolError, match="wrong transport token"):
        listener.receive_data(encode_transport_auth(b"secreT") + encode_admission(ASKED))
    assert listener.data_to_send() == b""


def test_a_refusal_says_why_on_both_sides() -> None:
    wrong = attrs.evolve(ASKED, activation_width=1)
    listener, dialer = ListenerHandshake(None, LOADED), DialerHandshake(None, wrong)
    assert not dialer.receive_data(listener.data_to_send())
    with pytest.raises(RemoteProtocolError) as ours:
        listener.receive_data(dialer.data_to_send())
    assert str(ours.value) == ("stage 0 ('first') is not admitted: activation_width: expected 576, found 1")
    assert listener.state is HandshakeState.CLOSED
    answer = listener.data_to_send()
    assert decode_answer(answer[12:]) == AdmissionAnswer(refusal=Refusal("activation_width", "576", "1"))
    with pytest.raises(RemoteProtocolError) as theirs:
        dialer.receive_data(answer)
    assert str(theirs.value) == "it refuses this stage: activation_width: expected 576, found 1"
    assert dialer.state is HandshakeState.CLOSED
    for side in (listener, dialer):
        with pytest.raises(LocalProtocolError, match="nothing is agreed"):
            _ = side.extensions
    with pytest.raises(RemoteProtocolError, match=f"^stage 0 \\('{'n' * 80}'\\) is not admitted: "):
        ListenerHandshake(None, LOADED).receive_data(
            encode_admission(attrs.evolve(wrong, sender_id="n" * 81))
        )


def test_a_listener_that_cannot_serve_refuses_what_would_fit() -> None:
    listener = ListenerHandshake(None, LOADED)
    listener.refuse("downstream", "a next stage", "none " * 100)
    with pytest.raises(RemoteProtocolError, match="downstream: expected a next stage, found none"):
        listener.receive_data(encode_admission(ASKED))
    answer = decode_answer(listener.data_to_send()[len(READY_WORD) + 12 :])
    assert answer == AdmissionAnswer(
        refusal=Refusal("downstream", "a next stage", ("none " * 100)[:399] + "…")
    )


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        (b"SPTS\x02\0\0\0", "admission version 2; this side speaks 1"),
        (b"SPTS\x01\0\0\0\x01\0\x01\0", "an admission packet of 65537 bytes; at most 65536 are allowed"),
        (b"SPTS\x01\0\0\0\x02\0\0\0{}", "admission request: field 'descriptor' is missing"),
        (b"SPTS\x01\0\0\0\x00\0\0\0", "admission request is not JSON: Expecting value at character 0"),
    ],
)
def test_a_packet_that_breaks_a_rule_is_answered_and_ends_the_connection(packet: bytes, text: str) -> None:
    listener = ListenerHandshake(None, LOADED)
    assert listener.data_to_send() == READY_WORD
    assert not listener.receive_data(packet[:-1])
    with pytest.raises(RemoteProtocolError) as caught:
        listener.receive_data(packet[-1:])
    assert str(caught.value) == text
    answer = decode_answer(listener.data_to_send()[12:])
    assert answer.refusal == Refusal("packet", "a sound admission request", text)
    with pytest.raises(RemoteProtocolError):
        listener.receive_data(b"x")


def test_a_peer_that_starts_with_a_frame_is_refused_unless_it_may() -> None:
    strict = ListenerHandshake(None, LOADED)
    strict.data_to_send()
    assert not strict.receive_data(FRAME[:3])
    with pytest.raises(RemoteProtocolError) as caught:
        strict.receive_data(FRAME[3:4])
    assert str(caught.value) == (
        "older or incomplete peer: it sent no admission packet, but starts with 03000000"
    )
    assert strict.data_to_send() == b""
    plain = ListenerHandshake(None, LOADED, allow_plain=True)
    assert not plain.receive_data(FRAME[:3])
    assert plain.receive_data(FRAME[3:])
    assert plain.trailing_data == FRAME
    assert plain.data_to_send() == READY_WORD
    assert plain.request is None
    assert plain.extensions == ()


def test_a_listener_that_allows_plain_peers_still_admits_the_others() -> None:
    listener = ListenerHandshake(None, LOADED, allow_plain=True)
    assert listener.receive_data(encode_admission(ASKED))
    assert listener.extensions == ("annex",)
    with pytest.raises(RemoteProtocolError, match="not admitted"):
        ListenerHandshake(None, LOADED, allow_plain=True).receive_data(
            encode_admission(attrs.evolve(ASKED, run_id="x"))
        )


def test_a_token_that_nobody_asks_for_is_called_by_its_name() -> None:
    for allow_plain in (False, True):
        listener = ListenerHandshake(None, LOADED, allow_plain=allow_plain)
        with pytest.raises(
            RemoteProtocolError, match="^the peer shows a link token, but this side asks for none$"
        ):
            listener.receive_data(encode_transport_auth(b"secret"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x01\0\0\0", "no admission packet: it starts with 01000000"),
        (READY_WORD, "no admission packet: it starts with 59445253"),
        (
            encode_admission(
                AdmissionAnswer(descriptor=DESCRIPTOR, descriptor_sha256=DESCRIPTOR.digest, extensions=("x",))
            ),
            "'x', which was not offered",
        ),
    ],
)
def test_an_answer_that_is_none_ends_the_dialer(data: bytes, text: str) -> None:
    dialer = DialerHandshake(None, ASKED)
    dialer.receive_data(READY_WORD)
    with pytest.raises(RemoteProtocolError, match=text):
        dialer.receive_data(data)
    assert dialer.state is HandshakeState.CLOSED


def test_an_end_while_admission_is_awaited() -> None:
    dialer = DialerHandshake(None, ASKED)
    dialer.receive_data(READY_WORD)
    assert dialer.awaits_admission
    for side in (dialer, ListenerHandshake(None, LOADED)):
        with pytest.raises(RemoteProtocolError, match="ended during the handshake"):
            side.receive_eof()


def test_a_request_that_cannot_be_sent_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="sorted"):
        DialerHandshake(None, attrs.evolve(REQUEST, extensions=("b", "a")))


@given(st.binary(max_size=80), st.booleans())
def test_a_listener_raises_nothing_but_our_error(data: bytes, allow_plain: bool) -> None:
    for head in (b"", b"SPTS", b"SPTS\x01\0\0\0", b"SPTS\x01\0\0\0\x04\0\0\0"):
        listener = ListenerHandshake(None, LOADED, allow_plain=allow_plain)
        try:
            if listener.receive_data(head + data):
                assert allow_plain
                assert listener.trailing_data == head + data
        except RemoteProtocolError:
            assert listener.state is HandshakeState.CLOSED
