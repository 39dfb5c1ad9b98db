from __future__ import annotations

import math
import struct

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    AnnexedReplyDecoder,
    ErrorKind,
    FailureCode,
    FinishHint,
    LocalProtocolError,
    PositionLogProbabilities,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyDecoder,
    RequestFailure,
    TokenLogProbability,
    encode_annex,
    encode_annexed_reply,
    encode_reply,
)
from skippy.protocol.annex import decode_annex

from .strategies import cuts, i32, receive_in_place, replies, u64

entries = st.builds(
    TokenLogProbability, i32, st.floats(width=32, allow_nan=False).filter(lambda v: v != math.inf)
)
positions = st.builds(PositionLogProbabilities, entries, st.lists(entries, max_size=4).map(tuple))
hints = st.sampled_from(FinishHint)
failures = st.builds(
    RequestFailure, u64, st.sampled_from(FailureCode), st.text(st.characters(codec="utf-8"), max_size=40)
)
annexes = (
    st.builds(ReplyAnnex, log_probabilities=st.lists(positions, min_size=1, max_size=3).map(tuple))
    | st.builds(ReplyAnnex, finish_hint=hints)
    | st.builds(ReplyAnnex, report=st.text(st.characters(codec="utf-8"), max_size=40))
    | st.builds(
        ReplyAnnex,
        finish_hint=hints,
        log_probabilities=st.lists(positions, min_size=1, max_size=3).map(tuple),
    )
)
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=4)

ONE = PositionLogProbabilities(TokenLogProbability(7, -0.5), (TokenLogProbability(9, -0.25),))
FAILURE = RequestFailure(5, FailureCode.SETTINGS_REFUSED, "é!")
LONGEST = ReplyAnnex(
    log_probabilities=(attrs.evolve(ONE, top=ONE.top * 64),) * 64, finish_hint=FinishHint.MUST_END
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Reply, ReplyAnnex | None]:
    reply = draw(replies)
    annex = draw(st.none() | annexes)
    if annex is None or annex.report is not None:
        return reply, annex
    if len(annex.log_probabilities) != len(reply.predicted_tokens):
        annex = attrs.evolve(annex, log_probabilities=(), finish_hint=annex.finish_hint or FinishHint.MAY_END)
    return reply, annex


@given(annexes | failures.map(lambda failure: ReplyAnnex(failure=failure)))
def test_round_trip(annex: ReplyAnnex) -> None:
    assert decode_annex(encode_annex(annex)[12:]) == annex


@given(st.lists(pairs(), max_size=4), st.none() | failures, sizes)
def test_annexes_arrive_with_their_replies(
    sent: list[tuple[Reply, ReplyAnnex | None]], failure: RequestFailure | None, pieces: list[int]
) -> None:
    data = b"".join(
        encode_reply(reply) if annex is None else encode_annexed_reply(reply, annex) for reply, annex in sent
    )
    if failure is not None:
        data += encode_annex(ReplyAnnex(failure=failure))
    decoder, got = AnnexedReplyDecoder(), []
    for piece in cuts(data, pieces):
        decoder.receive_data(piece)
        while (reply := decoder.next_reply()) is not None:
            got.append((reply, decoder.annex))
    decoder.receive_eof()
    assert got == sent
    assert decoder.failure == failure
    assert decoder.ended == (failure is not None)
    in_place = AnnexedReplyDecoder()
    assert receive_in_place(in_place, data, pieces) == [reply for reply, _ in sent]
    assert in_place.failure == failure


def test_frames_that_wait_at_the_end_keep_their_annexes() -> None:
    decoder = AnnexedReplyDecoder()
    first = ReplyAnnex(finish_hint=FinishHint.MAY_END)
    decoder.receive_data(encode_annexed_reply(Reply.predicted_token(1), first))
    decoder.receive_data(encode_reply(Reply.ack()))
    decoder.receive_eof()
    assert decoder.next_reply() == Reply.predicted_token(1)
    assert decoder.annex == first
    assert decoder.next_reply() == Reply.ack()
    assert decoder.annex is None


def test_bytes() -> None:
    annex = ReplyAnnex(log_probabilities=(ONE,), finish_hint=FinishHint.MUST_END)
    assert encode_annex(annex) == (
        bytes.fromhex("41585453 01000000 20000000 03000000")
        + struct.pack("<IifI", 1, 7, -0.5, 1)
        + struct.pack("<ifI", 9, -0.25, 2)
    )
    assert encode_annex(ReplyAnnex(failure=FAILURE)) == (
        struct.pack("<4IQ2I", 0x53545841, 1, 23, 4, 5, 2, 3) + "é!".encode()
    )


def test_the_largest_fits() -> None:
    data = encode_annex(LONGEST)
    assert len(data) == 12 + 4 + 4 + 64 * (12 + 64 * 8) + 4
    assert decode_annex(data[12:]) == LONGEST


def test_a_report_stands_before_any_reply() -> None:
    annex = ReplyAnnex(report="é" * 24_576)
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(encode_annexed_reply(Reply.ack(), annex))
    assert (decoder.next_reply(), decoder.annex) == (Reply.ack(), annex)
    assert encode_annex(ReplyAnnex(report="{}")) == struct.pack("<5I", 0x53545841, 1, 10, 8, 2) + b"{}"


def test_a_long_reason_is_cut_at_a_character() -> None:
    for count, kept in ((4096, 4096), (4097, 4096)):
        annex = decode_annex(encode_annex(ReplyAnnex(failure=attrs.evolve(FAILURE, reason="x" * count)))[12:])
        assert annex.failure == attrs.evolve(FAILURE, reason="x" * kept)
    annex = decode_annex(
        encode_annex(ReplyAnnex(failure=attrs.evolve(FAILURE, reason="x" + "é" * 2048)))[12:]
    )
    assert annex.failure == attrs.evolve(FAILURE, reason="x" + "é" * 2047)
    annex = decode_annex(encode_annex(ReplyAnnex(failure=attrs.evolve(FAILURE, reason="a\ud800b")))[12:])
    assert annex.failure == attrs.evolve(FAILURE, reason="a?b")


@pytest.mark.parametrize(
    ("annex", "text"),
    [
        (ReplyAnnex(), "at least one part"),
        (ReplyAnnex(finish_hint=FinishHint.MAY_END, failure=FAILURE), "carries nothing else"),
        (ReplyAnnex(finish_hint=FinishHint.MAY_END, report=""), "a report carries nothing else"),
        (ReplyAnnex(report="é" * 24_577), "a report of 49154 bytes; at most 49152 can travel"),
        (ReplyAnnex(log_probabilities=(ONE,) * 65), "65 tokens; at most 64"),
        (ReplyAnnex(log_probabilities=(attrs.evolve(ONE, top=ONE.top * 65),)), "65 likeliest tokens"),
        (ReplyAnnex(log_probabilities=(attrs.evolve(ONE, chosen=TokenLogProbability(1, math.nan)),)), "nan"),
        (ReplyAnnex(log_probabilities=(attrs.evolve(ONE, top=(TokenLogProbability(1, math.inf),)),)), "inf"),
        (ReplyAnnex(log_probabilities=(attrs.evolve(ONE, chosen=TokenLogProbability(2**31, 0.0)),)), "fit"),
        (ReplyAnnex(log_probabilities=(attrs.evolve(ONE, chosen=TokenLogProbability(1, -1e300)),)), "fit"),
        (ReplyAnnex(failure=attrs.evolve(FAILURE, request_id=-1)), "fit"),
    ],
)
def test_what_cannot_travel_is_our_own_error(annex: ReplyAnnex, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text) as caught:
        encode_annex(annex)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_an_annex_must_fit_its_reply() -> None:
    two = Reply.of_predicted_tokens((1, 2))
    annex = ReplyAnnex(log_probabilities=(ONE,))
    with pytest.raises(LocalProtocolError, match="of 1 tokens beside a reply with 2"):
        encode_annexed_reply(two, annex)
    with pytest.raises(LocalProtocolError, match="stands alone"):
        encode_annexed_reply(two, ReplyAnnex(failure=FAILURE))
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(encode_annex(annex) + encode_reply(two))
    with pytest.raises(RemoteProtocolError, match="of 1 tokens beside a reply with 2"):
        decoder.next_reply()


def framed(body: bytes) -> bytes:
    return struct.pack("<3I", 0x53545841, 1, len(body)) + body


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (words(0x53545841, 2), "annex version 2; this side speaks 1"),
        (words(0x53545841, 1, 65_537), "an annex of 65537 bytes; at most 65536"),
        (framed(b""), "ends inside a field, at byte 0"),
        (framed(words(0)), "annex flags 0x0"),
        (framed(words(16)), "annex flags 0x10; 1, 2, 4 and 8 have a meaning"),
        (framed(words(8)), "ends inside a field"),
        (framed(words(8, 49_153)), "a report of 49153 bytes; at most 49152 are allowed"),
        (framed(words(8, 1) + b"\xff"), "the report is not UTF-8 at byte 0"),
        (framed(words(10, 1)), "an annex with a report carries something else"),
        (framed(words(1 << 31)), "annex flags 0x80000000"),
        (framed(words(6, 1)), "carries something else"),
        (framed(words(1, 0)), "log-probabilities of 0 tokens; 1 to 64"),
        (framed(words(1, 65)), "log-probabilities of 65 tokens; 1 to 64"),
        (framed(words(1, 1, 7, 0, 65)), "65 likeliest tokens; at most 64"),
        (framed(words(1, 1, 7, 0x7FC00000, 0)), "nan is not a log-probability"),
        (framed(words(1, 1, 7, 0x7F800000, 0)), "inf is not a log-probability"),
        (framed(words(1, 1, 7, 0, 1, 8)), "ends inside a field"),
        (framed(words(1, 1, 7, 0, 0, 8)), "4 bytes too many in an annex"),
        (framed(words(2, 0)), "unknown finish hint 0"),
        (framed(words(2, 3)), "unknown finish hint 3"),
        (framed(words(4, 0, 0, 4, 0)), "unknown failure code 4"),
        (framed(words(4, 0, 0, 1, 4097)), "a reason of 4097 bytes; at most 4096"),
        (framed(words(4, 0, 0, 1, 1) + b"\xff"), "the reason is not UTF-8 at byte 0"),
        (framed(words(4, 0, 0, 1, 0) + b"x"), "1 bytes too many"),
        (framed(words(4, 0, 0, 1, 0)) + b"x", "data behind the reason of a failed request"),
        (framed(words(2, 1)) + framed(words(2, 1)), "unknown reply kind"),
        (words(9, 0, 0), "unknown reply kind 9"),
    ],
)
def test_wrong_bytes(data: bytes, text: str) -> None:
    for pieces in ([len(data)], [1]):
        decoder = AnnexedReplyDecoder()
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            receive_in_place(decoder, data, pieces)
        assert caught.value.kind is ErrorKind.INVALID_DATA
        with pytest.raises(RemoteProtocolError) as again:
            decoder.next_reply()
        assert again.value is caught.value


@pytest.mark.parametrize(
    "data", [words(9), words(0x53545841, 2), words(0x53545841, 1, 65_537)], ids=["kind", "version", "length"]
)
def test_a_wrong_word_is_refused_when_it_is_complete(data: bytes) -> None:
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(data[:-1])
    assert decoder.next_reply() is None
    assert decoder.annex is None
    decoder.receive_data(data[-1:])
    with pytest.raises(RemoteProtocolError):
        decoder.next_reply()


def test_the_limit_of_65536_bytes_is_inclusive() -> None:
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(framed(words(2, 1) + bytes(65_528)))
    with pytest.raises(RemoteProtocolError, match="65528 bytes too many in an annex"):
        decoder.next_reply()


def test_minus_infinity_and_a_rounding_above_zero_are_values() -> None:
    body = words(1, 1, 7, 0xFF800000, 1, 8, 0x33800000)
    assert decode_annex(body).log_probabilities == (
        PositionLogProbabilities(TokenLogProbability(7, -math.inf), (TokenLogProbability(8, 2.0**-24),)),
    )


def test_an_end_inside_or_right_behind_an_annex() -> None:
    annex = encode_annex(ReplyAnnex(finish_hint=FinishHint.MAY_END))
    whole = annex + encode_reply(Reply.ack())
    for end in (1, 4, 11, len(annex) - 1, len(annex), len(annex) + 4, len(whole) - 1):
        decoder = AnnexedReplyDecoder()
        decoder.receive_data(whole[:end])
        with pytest.raises(RemoteProtocolError) as caught:
            decoder.receive_eof()
        assert caught.value.kind is ErrorKind.UNEXPECTED_EOF, end


def test_a_plain_decoder_takes_no_annex() -> None:
    decoder = ReplyDecoder()
    assert not decoder.ended
    decoder.receive_data(encode_annex(ReplyAnnex(finish_hint=FinishHint.MAY_END)))
    with pytest.raises(RemoteProtocolError, match="unknown reply kind"):
        decoder.next_reply()


@given(st.binary(max_size=200))
def test_nothing_but_our_error(data: bytes) -> None:
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(framed(data) + encode_reply(Reply.ack()))
    try:
        while decoder.next_reply() is not None:
            pass
    except RemoteProtocolError:
        pass
