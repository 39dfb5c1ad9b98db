"""Heartbeats: their bytes, and how they come out of each stream without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    AnnexedReplyDecoder,
    ErrorKind,
    FinishHint,
    LocalProtocolError,
    Message,
    MessageDecoder,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    default_state,
    encode_annex,
    encode_annexed_reply,
    encode_heartbeat,
    encode_message,
    encode_reply,
)
from skippy.protocol.kinds import HEARTBEAT_MAGIC

from .strategies import receive_in_place

BEAT = encode_heartbeat(10_000)
TOKEN = encode_reply(Reply.predicted_token(7))
HINTED = encode_annexed_reply(Reply.predicted_token(8), ReplyAnnex(finish_hint=FinishHint.MAY_END))
KINDS = (MessageKind.STOP, MessageKind.TRIM_SESSION, MessageKind.DECODE_EMBD)
timeouts = st.integers(1_000, 3_600_000)
sizes = st.lists(st.integers(1, 90), min_size=1, max_size=4)


def frame(kind: MessageKind) -> bytes:
    return b"".join(encode_message(Message(kind, default_state(kind), request_id=1, session_id=2)))


def decoders(heartbeats: bool = True) -> list[MessageDecoder | ReplyDecoder]:
    return [
        MessageDecoder(0, heartbeats=heartbeats),
        ReplyDecoder(heartbeats=heartbeats),
        AnnexedReplyDecoder(heartbeats=heartbeats),
    ]


def test_the_golden_frame() -> None:
    assert encode_heartbeat(10_000).hex() == "42485453" + "10270000"
    assert HEARTBEAT_MAGIC not in list(MessageKind)


@pytest.mark.parametrize("timeout_ms", [-1, 0, 999, 3_600_001, 1 << 40])
def test_no_other_timeouts_can_be_sent(timeout_ms: int) -> None:
    with pytest.raises(LocalProtocolError, match="1000 to 3600000") as caught:
        encode_heartbeat(timeout_ms)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@given(st.lists(st.sampled_from(KINDS) | timeouts, max_size=8), sizes)
def test_they_come_out_of_a_stream_of_messages(sent: list[MessageKind | int], pieces: list[int]) -> None:
    data = b"".join(frame(s) if isinstance(s, MessageKind) else encode_heartbeat(s) for s in sent)
    decoder = MessageDecoder(0, heartbeats=True)
    got = [m.kind for m in receive_in_place(decoder, data, pieces) if isinstance(m, Message)]
    assert got == [s for s in sent if isinstance(s, MessageKind)]
    check_counts(decoder, data, sent)


@given(st.lists(st.sampled_from([TOKEN, HINTED]) | timeouts, max_size=8), sizes)
def test_they_come_out_of_a_stream_of_annexed_replies(sent: list[bytes | int], pieces: list[int]) -> None:
    data = b"".join(s if isinstance(s, bytes) else encode_heartbeat(s) for s in sent)
    decoder = AnnexedReplyDecoder(heartbeats=True)
    got = [r.predicted for r in receive_in_place(decoder, data, pieces) if isinstance(r, Reply)]
    assert got == [7 if s == TOKEN else 8 for s in sent if isinstance(s, bytes)]
    check_counts(decoder, data, sent)


@given(st.lists(st.just(TOKEN) | timeouts, max_size=8), sizes)
def test_they_come_out_of_a_stream_of_replies(sent: list[bytes | int], pieces: list[int]) -> None:
    data = b"".join(s if isinstance(s, bytes) else encode_heartbeat(s) for s in sent)
    decoder = ReplyDecoder(heartbeats=True)
    assert len(receive_in_place(decoder, data, pieces)) == sent.count(TOKEN)
    check_counts(decoder, data, sent)


def check_counts(decoder: MessageDecoder | ReplyDecoder, data: bytes, sent: object) -> None:
    assert isinstance(sent, list)
    beats = [s for s in sent if isinstance(s, int) and not isinstance(s, MessageKind)]
    assert decoder.at_boundary
    assert decoder.bytes_received == len(data)
    assert decoder.frames_read == len(sent)
    assert decoder.peer_timeout_ms == (beats[-1] if beats else None)
    decoder.receive_eof()


@pytest.mark.parametrize("size", range(1, 8))
def test_a_part_of_one_is_inside_a_frame(size: int) -> None:
    for decoder in decoders():
        assert not receive_in_place(decoder, BEAT[:size], [size])
        assert not decoder.at_boundary
        assert decoder.frames_read == 0
        with pytest.raises(RemoteProtocolError) as caught:
            decoder.receive_eof()
        assert caught.value.kind is ErrorKind.UNEXPECTED_EOF


@pytest.mark.parametrize("size", [4, 8, 80, 300])
def test_they_are_refused_where_they_were_not_agreed(size: int) -> None:
    data = (BEAT * 40)[:size]
    for decoder in decoders(heartbeats=False):
        with pytest.raises(RemoteProtocolError, match="a heartbeat"):
            receive_in_place(decoder, data, [size])


def test_none_may_come_between_an_annex_and_its_reply() -> None:
    decoder = AnnexedReplyDecoder(heartbeats=True)
    with pytest.raises(RemoteProtocolError, match="a heartbeat where none may come"):
        receive_in_place(
            decoder, encode_annex(ReplyAnnex(finish_hint=FinishHint.MAY_END)) + BEAT + TOKEN, [99]
        )


@pytest.mark.parametrize("timeout_ms", [0, 999, 3_600_001, 0xFFFFFFFF])
def test_a_timeout_that_nobody_can_have_is_refused(timeout_ms: int) -> None:
    data = BEAT[:4] + timeout_ms.to_bytes(4, "little")
    for decoder in decoders():
        with pytest.raises(RemoteProtocolError, match=f"peer timeout of {timeout_ms} ms; 1000 to 3600000"):
            receive_in_place(decoder, data, [8])
