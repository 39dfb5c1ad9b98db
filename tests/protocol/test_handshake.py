from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    READY_WORD,
    DialerHandshake,
    ErrorKind,
    HandshakeState,
    ListenerHandshake,
    LocalProtocolError,
    RemoteProtocolError,
    encode_transport_auth,
)

from .strategies import cuts

sizes = st.lists(st.integers(1, 80), min_size=1, max_size=4)


@given(st.none() | st.binary(min_size=1, max_size=64), st.binary(max_size=50), st.binary(max_size=50), sizes)
def test_both_sides_meet_and_nothing_behind_is_lost(
    token: bytes | None, from_dialer: bytes, from_listener: bytes, pieces: list[int]
) -> None:
    dialer, listener = DialerHandshake(token), ListenerHandshake(token)
    rest = from_dialer
    if token is not None:
        rest = b""
        for piece in cuts(dialer.data_to_send() + from_dialer, pieces):
            if listener.admitted:
                rest += piece
            elif listener.receive_data(piece):
                rest = listener.trailing_data
    assert listener.admitted
    assert rest == from_dialer
    ready = listener.data_to_send()
    assert ready == READY_WORD
    assert listener.data_to_send() == b""
    rest = b""
    for piece in cuts(ready + from_listener, pieces):
        if dialer.admitted:
            rest += piece
        elif dialer.receive_data(piece):
            rest = dialer.trailing_data
    assert dialer.admitted
    assert rest == from_listener


def test_without_a_token_the_dialer_sends_nothing_and_the_listener_reads_nothing() -> None:
    assert DialerHandshake(None).data_to_send() == b""
    listener = ListenerHandshake(None)
    assert listener.admitted
    assert listener.trailing_data == b""
    assert listener.data_to_send() == READY_WORD


def test_the_ready_word_on_the_wire() -> None:
    assert bytes.fromhex("59445253") == READY_WORD
    assert encode_transport_auth(b"ab") == bytes.fromhex("41544b53026162")


@pytest.mark.parametrize("token", [b"", b"x" * 65])
def test_a_token_of_the_wrong_length_is_our_own_error(token: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="1 to 64") as caught:
        DialerHandshake(token)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(
    ("make", "data", "fails_at", "text"),
    [
        (lambda: DialerHandshake(None), b"HTTP/1.1", 4, "not a stage"),
        (lambda: DialerHandshake(None), bytes(4), 4, "not a stage"),
        (lambda: ListenerHandshake(b"secret"), b"GET / HT", 4, "no credentials"),
        (lambda: ListenerHandshake(b"secret"), READY_WORD, 4, "no credentials"),
        (lambda: ListenerHandshake(b"secret"), b"ATKS\x00secret", 5, "token of 0 bytes"),
        (lambda: ListenerHandshake(b"secret"), b"ATKS\x41" + bytes(65), 5, "token of 65 bytes"),
        (lambda: ListenerHandshake(b"secret"), b"ATKS\x06secreT", 11, "wrong"),
        (lambda: ListenerHandshake(b"secret"), b"ATKS\x05secre", 10, "wrong"),
        (lambda: ListenerHandshake(b"secret"), b"ATKS\x07secret!", 12, "wrong"),
        (lambda: ListenerHandshake(b""), b"ATKS\x01x", 6, "wrong"),
    ],
)
def test_wrong_bytes_fail_at_once_and_for_good(
    make: Callable[[], DialerHandshake | ListenerHandshake], data: bytes, fails_at: int, text: str
) -> None:
    side = make()
    assert not side.receive_data(data[: fails_at - 1])
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        side.receive_data(data[fails_at - 1 : fails_at])
    assert caught.value.kind is ErrorKind.INVALID_DATA
    assert side.state is HandshakeState.CLOSED
    assert side.data_to_send() == b""
    for again in (lambda: side.receive_data(b"x"), side.receive_eof):
        with pytest.raises(RemoteProtocolError) as second:
            again()
        assert second.value is caught.value
    with pytest.raises(RemoteProtocolError, match=text):
        make().receive_data(data)


def test_an_end_before_admission() -> None:
    for side, data in (
        (DialerHandshake(None), b"YD"),
        (ListenerHandshake(b"x"), b""),
        (ListenerHandshake(b"x"), b"ATKS\x01"),
    ):
        assert not side.receive_data(data)
        with pytest.raises(RemoteProtocolError) as caught:
            side.receive_eof()
        assert caught.value.kind is ErrorKind.UNEXPECTED_EOF
        for again in (partial(side.receive_data, READY_WORD), side.receive_eof):
            with pytest.raises(RemoteProtocolError) as second:
                again()
            assert second.value is caught.value


def test_frames_before_and_handshake_bytes_after_admission_are_our_own_errors() -> None:
    dialer = DialerHandshake(None)
    with pytest.raises(LocalProtocolError, match="no frames yet"):
        _ = dialer.trailing_data
    assert dialer.receive_data(READY_WORD + b"more")
    assert dialer.trailing_data == b"more"
    dialer.receive_eof()
    with pytest.raises(LocalProtocolError, match="no more bytes"):
        dialer.receive_data(b"x")
