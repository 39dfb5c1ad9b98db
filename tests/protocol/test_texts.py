"""What the errors say, word for word: an operator reads them, and a wrong number in one misleads.

Also the small promises that only show at a limit. (Mutation testing asks for both: ``docs/fuzzing.md``.)
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from skippy.protocol import (
    READY_WORD,
    AdmissionAnswer,
    AnnexedReplyDecoder,
    CreditWindow,
    DialerHandshake,
    ErrorKind,
    FailureCode,
    FinishHint,
    Lane,
    ListenerHandshake,
    LocalProtocolError,
    Machine,
    MessageDecoder,
    MessageKind,
    PredictionReturn,
    ProtocolError,
    RemoteProtocolError,
    Reply,
    ReplyAnnex,
    ReplyKind,
    ReplyStats,
    RequestFailure,
    Session,
    SessionEvent,
    SessionState,
    UpstreamConnection,
    activation_bytes,
    admit,
    check_activation,
    check_answer,
    check_return_open,
    default_state,
    encode_admission,
    encode_annex,
    encode_annexed_reply,
    encode_message,
    encode_transport_auth,
    execution_tokens,
)
from skippy.protocol.annex import decode_annex
from skippy.protocol.rules import _default_flags, buffer_bytes
from skippy.protocol.states import SESSION

from .admissions import LOADED, REQUEST
from .strategies import message

K = MessageKind
Call = Callable[[], Any]


def leased(limit: int = 2) -> Lane:
    lane = Lane(limit)
    lane.connected()
    lane.lease()
    return lane


def sent(lane: Lane) -> Lane:
    lane.credit.send()
    return lane


def stopping(sent: int = 0, predictions: int = 0, acknowledged: bool = False) -> Lane:
    lane = leased()
    for _ in range(predictions):
        lane.expect_prediction()
    lane.stop()
    for _ in range(sent):
        lane.credit.send()
    if acknowledged:
        lane.stop_acknowledged()
    return lane


def connected(*frames: Any) -> UpstreamConnection:
    connection = UpstreamConnection()
    for frame in frames:
        connection.receive(frame)
    return connection


def bound() -> PredictionReturn:
    stream = PredictionReturn(1, 2)
    stream.opened(message(K.PREDICTION_RETURN_OPEN, request_id=1, session_id=2))
    return stream


def owing(*kinds: MessageKind) -> PredictionReturn:
    stream = bound()
    for kind in kinds:
        stream.expect(kind)
    return stream


def filled(length: int) -> Session:
    session = Session()
    session.accept(message(K.PREFILL_EMBD, token_count=length, request_id=1, session_id=2))
    return session


def spent() -> CreditWindow:
    window = CreditWindow.open(2)
    window.send()
    window.send()
    return window


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def annexed(data: bytes) -> Reply | None:
    decoder = AnnexedReplyDecoder()
    decoder.receive_data(data)
    return decoder.next_reply()


FAILURE = RequestFailure(7, FailureCode.FAILED, "no")
PREFILL = message(K.PREFILL_EMBD, token_count=1, request_id=3, session_id=4)
OPEN = message(K.PREDICTION_RETURN_OPEN, request_id=1, session_id=2)

MACHINES: list[tuple[Call, type[ProtocolError], str]] = [
    (lambda: UpstreamConnection().stopped(), LocalProtocolError,
     "upstream connection is idle: stopped does not fit"),
    (lambda: Lane(1).lease(), LocalProtocolError, "lane is connecting: lease does not fit"),
    (lambda: PredictionReturn(1, 2).release(), LocalProtocolError,
     "prediction return is opening: release does not fit"),
    (lambda: filled(1).restored(PREFILL, 1), LocalProtocolError, "session is live: restored does not fit"),
    (lambda: CreditWindow.open(0), LocalProtocolError, "a credit window needs a limit of at least 1, not 0"),
    (lambda: spent().send(), LocalProtocolError, "no credit: 2 of 2 frames are unacknowledged"),
    (lambda: CreditWindow.open(1).ack(), RemoteProtocolError, "Ack without a frame that asks for one"),
    (lambda: connected(PREFILL).receive(message(K.STOP, request_id=5, session_id=6)), RemoteProtocolError,
     "STOP for request 5 session 6 while request 3 session 4 is live on this connection"),
    (lambda: connected(PREFILL).receive(message(K.PREFILL_EMBD, phase=2, flags=9)), RemoteProtocolError,
     "header phase 2 and flags 0x9 do not match PREFILL_EMBD"),
    (lambda: connected(PREFILL).receive_eof(), RemoteProtocolError,
     "end of stream while request 3 is live"),
    (lambda: Lane(1).expect_prediction(), LocalProtocolError,
     "lane is connecting: no request may ask for a prediction"),
    (lambda: leased().prediction(), RemoteProtocolError, "prediction without a frame that asks for one"),
    (lambda: sent(leased()).stop(), LocalProtocolError,
     "Stop with 1 unread Acks: drain them first"),
    (lambda: leased().stop_acknowledged(), RemoteProtocolError, "Ack of a Stop that was not sent"),
    (lambda: stopping(acknowledged=True).stop_acknowledged(), RemoteProtocolError,
     "Ack of a Stop that was not sent"),
    (lambda: stopping(predictions=2).release(), LocalProtocolError,
     "lane cannot be returned: Stop not acknowledged, 0 Acks and 2 predictions owed"),
    (lambda: stopping(sent=1, predictions=1, acknowledged=True).release(), LocalProtocolError,
     "lane cannot be returned: Stop acknowledged, 1 Acks and 1 predictions owed"),
    (lambda: PredictionReturn(1, 2).opened(message(K.PREDICTION_RETURN_OPEN, request_id=8, session_id=9)),
     RemoteProtocolError, "return stream opened for (8, 9), but (1, 2) is waiting"),
    (lambda: bound().expect(K.STOP), LocalProtocolError, "STOP is not answered by a prediction"),
    (lambda: bound().receive(Reply.predicted_token(1)), RemoteProtocolError,
     "PREDICTED_TOKEN on a return stream that owes nothing"),
    (lambda: owing(K.DECODE_EMBD).receive(Reply(ReplyKind.PREDICTED_TOKENS)), RemoteProtocolError,
     "PREDICTED_TOKENS does not answer DECODE_EMBD"),
    (lambda: owing(K.DECODE_EMBD, K.DECODE_EMBD).release(), LocalProtocolError,
     "return stream released with 2 predictions owed"),
    (lambda: bound().receive_eof(), RemoteProtocolError,
     "return stream ended while a request was bound to it"),
    (lambda: check_return_open(message(K.STOP)), RemoteProtocolError,
     "a return stream starts with PREDICTION_RETURN_OPEN, not STOP"),
    (lambda: check_return_open(message(K.PREDICTION_RETURN_OPEN, phase=1)), RemoteProtocolError,
     "header of PREDICTION_RETURN_OPEN does not match its kind"),
    (lambda: check_return_open(message(K.PREDICTION_RETURN_OPEN, tokens=(1,))), RemoteProtocolError,
     "PREDICTION_RETURN_OPEN carries more than its two ids"),
    (lambda: filled(2).accept(message(K.STOP)), LocalProtocolError, "STOP carries no rows for a session"),
    (lambda: filled(2).accept(PREFILL), RemoteProtocolError,
     "PREFILL_EMBD for (3, 4) on the session of (1, 2)"),
    (lambda: Session().accept(message(K.DECODE_EMBD, token_count=-1)), RemoteProtocolError,
     "DECODE_EMBD with token_count -1"),
    (lambda: Session().accept(message(K.DECODE_EMBD, token_count=1, pos_start=-1)), RemoteProtocolError,
     "DECODE_EMBD without a position before any prefill or restore"),
    (lambda: filled(2).accept(
        message(K.DECODE_EMBD, token_count=1, pos_start=5, request_id=1, session_id=2)), RemoteProtocolError,
     "gap: DECODE_EMBD starts at position 5, the session holds 2"),
    (lambda: filled(2).accept(
        message(K.PREFILL_EMBD, token_count=1, pos_start=1, request_id=1, session_id=2)), RemoteProtocolError,
     "PREFILL_EMBD starts at position 1, but the session already holds 2"),
    (lambda: filled(2).trim(message(K.STOP)), LocalProtocolError, "STOP is not a trim"),
    (lambda: Session().restored(PREFILL, -1), LocalProtocolError, "restored length -1"),
]  # fmt: skip

RULES: list[tuple[Call, type[ProtocolError], str]] = [
    (lambda: activation_bytes(-1, 8, 0), LocalProtocolError,
     "activation of -1 tokens x 8 floats: neither may be negative"),
    (lambda: activation_bytes(2**62, 1, 0), LocalProtocolError,
     "activation of 18446744073709551616 bytes does not fit 64 bits"),
    (lambda: check_activation(b"", 2**20, 129, 0), LocalProtocolError,
     "activation of 541065216 bytes is over the limit of 536870912"),
    (lambda: check_activation(b"abc", 2, 3, 0), LocalProtocolError,
     "activation has 3 bytes; 2 tokens of width 3 take 24"),
    (lambda: execution_tokens(message(K.PREFILL_EMBD, token_count=-2)), RemoteProtocolError,
     "PREFILL_EMBD asks for -2 tokens"),
    (lambda: execution_tokens(message(K.DECODE_EMBD, token_count=1, current_token=9, tokens=(5, 6, 7))),
     RemoteProtocolError, "DECODE_EMBD: current_token is 9 but the token sideband ends with 7"),
    (lambda: execution_tokens(message(K.DECODE_EMBD, token_count=1, current_token=9, tokens=(5,))),
     RemoteProtocolError, "DECODE_EMBD: current_token is 9 but the token sideband ends with 5"),
    (lambda: execution_tokens(message(K.PREFILL_EMBD, token_count=3, tokens=(5, 6))), RemoteProtocolError,
     "PREFILL_EMBD: token_count is 3 but the token sideband has 2 entries"),
]  # fmt: skip

STRANGER = attrs.evolve(REQUEST, sender_index=9, sender_id="s" * 81, target_index=3)

HANDSHAKES: list[tuple[Call, type[ProtocolError], str]] = [
    (lambda: encode_transport_auth(b""), LocalProtocolError,
     "a transport token has 1 to 64 bytes, not 0"),
    (lambda: DialerHandshake(None).trailing_data, LocalProtocolError,
     "dialer handshake is await-ready: no frames yet"),
    (lambda: DialerHandshake(None).extensions, LocalProtocolError,
     "dialer handshake is await-ready: nothing is agreed yet"),
    (lambda: ListenerHandshake(b"t").trailing_data, LocalProtocolError,
     "listener handshake is await-auth: no frames yet"),
    (lambda: ListenerHandshake(None).receive_data(b"x"), LocalProtocolError,
     "listener handshake is admitted: it takes no more bytes"),
    (lambda: DialerHandshake(None).receive_eof(), RemoteProtocolError,
     "stream ended during the handshake"),
    (lambda: DialerHandshake(None).receive_data(b"HTTP/1.1"), RemoteProtocolError,
     "not a stage: the first bytes are 48545450, not the ready word 59445253"),
    (lambda: ListenerHandshake(b"t").receive_data(b"HTTP/1.1"), RemoteProtocolError,
     "no credentials: the connection starts with 48545450"),
    (lambda: ListenerHandshake(b"t").receive_data(b"ATKS\x00"), RemoteProtocolError,
     "transport token of 0 bytes; 1 to 64 are allowed"),
    (lambda: ListenerHandshake(b"t").receive_data(b"ATKS\x01u"), RemoteProtocolError,
     "wrong transport token"),
    (lambda: ListenerHandshake(None, LOADED).receive_data(b"ATKS\x01t"), RemoteProtocolError,
     "the peer shows a link token, but this side asks for none"),
    (lambda: ListenerHandshake(None, LOADED).receive_data(u32(1)), RemoteProtocolError,
     "older or incomplete peer: it sent no admission packet, but starts with 01000000"),
    (lambda: ListenerHandshake(None, LOADED).receive_data(encode_admission(STRANGER)), RemoteProtocolError,
     f"stage 9 ('{'s' * 80}') is not admitted: target_index: expected 1, found 3"),
    (lambda: encode_annex(ReplyAnnex()), LocalProtocolError, "an annex needs at least one part"),
    (lambda: encode_annex(ReplyAnnex(failure=FAILURE, finish_hint=FinishHint.MAY_END)), LocalProtocolError,
     "an annex with a failure carries nothing else"),
    (lambda: encode_annexed_reply(Reply.ack(), ReplyAnnex(failure=FAILURE)), LocalProtocolError,
     "an annex with a failure stands alone, before no reply"),
    (lambda: decode_annex(u32(6)), RemoteProtocolError, "an annex with a failure carries something else"),
    (lambda: annexed(encode_annex(ReplyAnnex(failure=FAILURE)) + b"x"), RemoteProtocolError,
     "data behind the reason of a failed request"),
    (lambda: decode_annex(u32(1) + u32(1) + bytes(8) + u32(65)), RemoteProtocolError,
     "65 likeliest tokens; at most 64 are allowed"),
    (lambda: check_answer(REQUEST, AdmissionAnswer(descriptor_sha256="x")), RemoteProtocolError,
     "its admission answer echoes another descriptor than the one sent"),
    (lambda: encode_admission(attrs.evolve(REQUEST, run_id="\ud800")), LocalProtocolError,
     "a text in the admission packet is not Unicode"),
    (lambda: encode_admission(attrs.evolve(REQUEST, batch_rows=0)), LocalProtocolError,
     "not an admission packet that a peer would take: "
     "admission request: field 'batch_rows' must be 1 to 4294967295"),
    (lambda: encode_admission(attrs.evolve(REQUEST, extensions=("b", "a"))), LocalProtocolError,
     "not an admission packet that a peer would take: "
     "admission: field 'extensions' must be names, strictly sorted"),
    (lambda: encode_admission(AdmissionAnswer()), LocalProtocolError,
     "not an admission packet that a peer would take: "
     "admission answer: field 'descriptor_sha256' is missing"),
    (lambda: encode_admission(attrs.evolve(REQUEST, descriptor_sha256="x")), LocalProtocolError,
     "not an admission packet that a peer would take: "
     "admission: field 'descriptor_sha256' is not the digest of 'descriptor'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), [*MACHINES, *RULES, *HANDSHAKES])
def test_what_it_says(call: Call, error: type[ProtocolError], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == text


@pytest.mark.parametrize(("error", "kind"), [
    (LocalProtocolError, ErrorKind.INVALID_INPUT), (RemoteProtocolError, ErrorKind.INVALID_DATA),
])  # fmt: skip
def test_who_erred_is_the_callers_to_say(error: type[ProtocolError], kind: ErrorKind) -> None:
    machine: Machine[SessionState, SessionEvent] = Machine("a thing", SESSION, SessionState.LIVE)
    step = machine._local if error is LocalProtocolError else machine._remote
    with pytest.raises(error, match="^a thing is live: restored does not fit$") as caught:
        step(SessionEvent.RESTORED)
    assert caught.value.kind is kind
    assert machine.state is SessionState.LIVE
    step(SessionEvent.STOP)
    assert machine.state is SessionState.NEW


def test_every_prediction_counts() -> None:
    lane = leased()
    lane.expect_prediction()
    lane.expect_prediction()
    assert lane.owed_predictions == 2
    lane.prediction()
    assert lane.owed_predictions == 1


def test_what_is_over_is_forgotten() -> None:
    connection = connected(message(K.CONFIGURE_GENERATION, request_id=3, session_id=4))
    assert connection.configured is True
    connection.receive(message(K.STOP, request_id=3, session_id=4))
    connection.stopped()
    assert connection.configured is False
    assert connection.live is None
    connection.receive(PREFILL)
    connection.close()
    assert connection.live is None


def test_a_restored_session_belongs_to_its_request() -> None:
    session = Session()
    session.restored(PREFILL, 0)
    assert (session.state, session.length) == (SessionState.LIVE, 0)
    with pytest.raises(RemoteProtocolError, match="on the session of"):
        session.accept(message(K.PREFILL_EMBD, token_count=1, request_id=1, session_id=2))
    assert session.accept(PREFILL).count == 1


def test_the_largest_activation_may_travel() -> None:
    with mmap.mmap(-1, 512 << 20) as pages:  # never touched
        view = memoryview(pages)
        assert buffer_bytes(view) == 512 << 20
        assert check_activation(view, 1024, 128 * 1024, 0) == 512 << 20
        view.release()


def test_received_bytes_are_counted_once() -> None:
    decoder = MessageDecoder(0)
    decoder.get_buffer()
    decoder.buffer_updated(1)
    with pytest.raises(LocalProtocolError) as caught:
        decoder.buffer_updated(1)
    assert str(caught.value) == "1 bytes were not received into get_buffer(); at 0 call receive_eof()"


def test_what_a_decoder_says_to_its_owner() -> None:
    stop = b"".join(encode_message(message(K.STOP)))
    decoder = MessageDecoder(0)
    view = decoder.get_buffer()
    view[:] = (stop * 300)[: len(view)]
    decoder.buffer_updated(len(view))
    with pytest.raises(LocalProtocolError) as caught:
        decoder.get_buffer()
    assert str(caught.value) == "the decoder is full of whole frames: take them before receiving more"
    decoder = MessageDecoder(0)
    decoder.receive_data(stop)
    decoder.receive_eof()
    with pytest.raises(LocalProtocolError) as caught:
        decoder.take_trailing_data()
    assert str(caught.value) == "only between frames can the rest of the stream be handed over"
    decoder = MessageDecoder(0)
    decoder.receive_data(stop[:-1])
    with pytest.raises(RemoteProtocolError, match="^stream ended inside a frame$"):
        decoder.receive_eof()


def test_an_end_during_the_handshake_is_for_good() -> None:
    side = DialerHandshake(None)
    with pytest.raises(RemoteProtocolError) as ended:
        side.receive_eof()
    for again in (side.receive_eof, lambda: side.receive_data(b"x")):
        with pytest.raises(RemoteProtocolError) as caught:
            again()
        assert caught.value is ended.value


def test_the_rest_of_the_stream_comes_as_it_was() -> None:
    stop = b"".join(encode_message(message(K.STOP)))
    decoder = MessageDecoder(0)
    for piece in (stop, b"ab", b"cd", b"ef"):
        decoder.receive_data(piece)
    assert decoder.next_message() is not None
    assert decoder.take_trailing_data() == b"abcdef"


def test_a_plain_peer_is_known_by_its_first_word() -> None:
    listener = ListenerHandshake(None, LOADED, allow_plain=True)
    assert not listener.receive_data(u32(1)[:3])
    assert listener.receive_data(u32(1)[3:])
    assert listener.trailing_data == u32(1)
    assert listener.extensions == ()


def test_a_listener_that_answers_before_it_is_asked_is_understood() -> None:
    dialer = DialerHandshake(b"t", REQUEST)
    assert dialer.answer is None
    assert dialer.receive_data(READY_WORD + encode_admission(admit(REQUEST, LOADED)) + b"frames")
    assert dialer.trailing_data == b"frames"
    assert dialer.data_to_send() == encode_transport_auth(b"t") + encode_admission(REQUEST)


@pytest.mark.parametrize("shown", [b"x", b"XXXX", b"None", bytes(64)])
def test_an_empty_token_matches_nothing(shown: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="^wrong transport token$"):
        ListenerHandshake(b"").receive_data(encode_transport_auth(shown))


def test_flags_that_come_with_a_kind() -> None:
    flags = {K.PREFILL_FINAL_EMBD: 1, K.DECODE_REPLAY_FINAL_EMBD: 1, K.DECODE_LIGHT_CTX: 2}
    for kind in K:
        assert _default_flags(kind) == default_state(kind).flags == flags.get(kind, 0)


def test_replies_in_short() -> None:
    assert Reply.predicted_token(5) == Reply(ReplyKind.PREDICTED_TOKEN, 5, (5,))
    assert Reply.ack() == Reply(ReplyKind.ACK, 0, ())
    some = ReplyStats(kv_lookup_hits=1)
    assert Reply.of_predicted_tokens([4, 5]) == Reply(ReplyKind.PREDICTED_TOKENS, 4, (4, 5), 0)
    assert Reply.of_predicted_tokens([4], 9, some) == Reply(
        ReplyKind.PREDICTED_TOKENS, 4, (4,), 9, stats=some
    )
    assert Reply.ack(some) == Reply(ReplyKind.ACK, stats=some)
    assert Reply.predicted_token(4, some) == Reply(ReplyKind.PREDICTED_TOKEN, 4, (4,), stats=some)
