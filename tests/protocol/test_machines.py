from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from skippy.protocol import (
    CreditWindow,
    ErrorKind,
    Lane,
    LaneState,
    LocalProtocolError,
    Machine,
    MessageKind,
    PredictionReturn,
    RemoteProtocolError,
    Reply,
    ReplyKind,
    ReturnState,
    SamplingConfig,
    UpstreamConnection,
    UpstreamEvent,
    UpstreamState,
    check_return_open,
    states,
)

from .strategies import message

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
K = MessageKind
TABLES: list[Mapping[Any, Mapping[Any, Any]]] = [
    states.HANDSHAKE,
    states.UPSTREAM,
    states.LANE,
    states.SESSION,
    states.RETURN,
    states.WINDOW,
]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: type(next(iter(t))).__name__)
def test_tables_are_whole(table: Mapping[Any, Mapping[Any, Any]]) -> None:
    state_type: type[enum.Enum] = type(next(iter(table)))
    assert set(table) == set(state_type)
    for row in table.values():
        assert all(isinstance(target, state_type) for target in row.values())


# --- upstream connection


def state_of(machine: Machine[S, E]) -> S:
    """The present state; the type checker does not know that calls in between change it."""
    return machine.state


def upstream(*kinds: MessageKind) -> UpstreamConnection:
    connection = UpstreamConnection()
    for kind in kinds:
        connection.receive(message(kind, request_id=1, session_id=2))
    return connection


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([], UpstreamState.IDLE),
        ([K.PREFILL_EMBD], UpstreamState.PREFILLING),
        ([K.CONFIGURE_GENERATION], UpstreamState.CONFIGURED),
        ([K.CONFIGURE_GENERATION, K.PREFILL_EMBD], UpstreamState.CONFIGURED),
        ([K.PREFILL_EMBD, K.CONFIGURE_GENERATION, K.PREFILL_EMBD], UpstreamState.CONFIGURED),
        ([K.PREFILL_EMBD, K.PREFILL_EMBD, K.CONFIGURE_GENERATION], UpstreamState.CONFIGURED),
        ([K.CONFIGURE_GENERATION, K.DECODE_EMBD], UpstreamState.DECODING),
        ([K.PREFILL_EMBD, K.DECODE_EMBD, K.DECODE_READOUT, K.DECODE_LIGHT_CTX], UpstreamState.DECODING),
        ([K.PREFILL_FINAL_EMBD, K.DECODE_EMBD], UpstreamState.DECODING),
        ([K.DECODE_REPLAY_EMBD, K.DECODE_REPLAY_FINAL_EMBD], UpstreamState.DECODING),
        ([K.PREFILL_EMBD, K.VERIFY_WINDOW, K.RETIRE_VERIFY_WINDOW], UpstreamState.DECODING),
        ([K.PROBE_PREFILL], UpstreamState.IDLE),
        ([K.TRY_RESTORE_PREFILL, K.PREFILL_EMBD, K.TRIM_SESSION], UpstreamState.PREFILLING),
        ([K.TRIM_SESSION], UpstreamState.IDLE),
        ([K.TRIM_SESSION, K.CONFIGURE_GENERATION, K.TRIM_SESSION], UpstreamState.CONFIGURED),
        ([K.STOP], UpstreamState.STOPPING),
        ([K.PREFILL_EMBD, K.DECODE_EMBD, K.STOP], UpstreamState.STOPPING),
    ],
)
def test_what_a_request_may_look_like(kinds: list[MessageKind], state: UpstreamState) -> None:
    connection = upstream(*kinds)
    assert state_of(connection) is state
    assert connection.configured == (K.CONFIGURE_GENERATION in kinds)
    if state is not UpstreamState.IDLE:
        assert connection.live == (1, 2)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([], K.DECODE_EMBD),
        ([], K.VERIFY_WINDOW),
        ([], K.RETIRE_VERIFY_WINDOW),
        ([], K.PREDICTION_RETURN_OPEN),
        ([], K.STATE_IMPORT),
        ([], K.STATE_EXPORT),
        ([K.PREFILL_EMBD], K.PREDICTION_RETURN_OPEN),
        ([K.PREFILL_EMBD], K.RETIRE_VERIFY_WINDOW),
        ([K.PREFILL_EMBD, K.DECODE_EMBD], K.PREFILL_EMBD),
        ([K.PREFILL_EMBD, K.DECODE_EMBD], K.CONFIGURE_GENERATION),
        ([K.PREFILL_FINAL_EMBD], K.CONFIGURE_GENERATION),
        ([K.PREFILL_EMBD, K.DECODE_EMBD], K.RESTORE_PREFILL),
        ([K.PREFILL_EMBD, K.STOP], K.STOP),
        ([K.PREFILL_EMBD, K.STOP], K.PREFILL_EMBD),
    ],
)
def test_kinds_that_do_not_fit_are_the_peers_error(before: list[MessageKind], kind: MessageKind) -> None:
    connection = upstream(*before)
    state = connection.state
    with pytest.raises(RemoteProtocolError, match="does not fit") as caught:
        connection.receive(message(kind, request_id=1, session_id=2))
    assert caught.value.kind is ErrorKind.INVALID_DATA
    assert state_of(connection) is state


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (K.PREFILL_EMBD, {"phase": 2}),
        (K.PREFILL_EMBD, {"flags": 1}),
        (K.PREFILL_FINAL_EMBD, {"flags": 0}),
        (K.DECODE_REPLAY_EMBD, {"flags": 2}),
    ],
)
def test_a_header_must_match_its_kind(kind: MessageKind, fields: dict[str, int]) -> None:
    connection = UpstreamConnection()
    with pytest.raises(RemoteProtocolError, match="do not match"):
        connection.receive(message(kind, **fields))
    assert state_of(connection) is UpstreamState.IDLE
    assert connection.live is None


def test_header_of_a_stop_is_not_judged() -> None:
    """As in the original: Stop and the controls are looked at before the header is."""
    assert UpstreamConnection().receive(message(K.STOP, phase=9, flags=3)) is UpstreamEvent.STOP


@pytest.mark.parametrize("ids", [{"request_id": 9}, {"session_id": 9}, {"request_id": 0, "session_id": 0}])
def test_one_request_at_a_time(ids: dict[str, int]) -> None:
    other = {"request_id": 1, "session_id": 2, **ids}
    for kind in (K.PREFILL_EMBD, K.DECODE_EMBD, K.STOP, K.CONFIGURE_GENERATION, K.PROBE_PREFILL):
        connection = upstream(K.PREFILL_EMBD)
        with pytest.raises(RemoteProtocolError, match="request 1 session 2 is live"):
            connection.receive(message(kind, **other))
    connection = upstream(K.CONFIGURE_GENERATION, K.PREFILL_EMBD, K.STOP)
    connection.stopped()
    assert connection.live is None
    assert not connection.configured
    connection.receive(message(K.PREFILL_EMBD, **other))
    assert connection.live == (other["request_id"], other["session_id"])


def test_the_same_ids_may_prefill_again_after_stop() -> None:
    connection = upstream(K.TRY_RESTORE_PREFILL, K.STOP)
    connection.stopped()
    connection.receive(message(K.PREFILL_EMBD, request_id=1, session_id=2))
    assert state_of(connection) is UpstreamState.PREFILLING


def test_a_missed_fused_restore_may_prefill() -> None:
    connection = upstream(K.TRY_RESTORE_PREFILL_DECODE)
    connection.restore_missed()
    connection.receive(message(K.PREFILL_EMBD, request_id=1, session_id=2))
    with pytest.raises(LocalProtocolError):
        connection.restore_missed()


def test_stopped_without_stop_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="stopped does not fit"):
        upstream(K.PREFILL_EMBD).stopped()


def test_end_of_stream_upstream() -> None:
    upstream().receive_eof()
    upstream(K.PROBE_PREFILL).receive_eof()
    done = upstream(K.PREFILL_EMBD, K.STOP)
    done.stopped()
    done.receive_eof()
    done.receive_eof()
    for kinds in ([K.PREFILL_EMBD], [K.CONFIGURE_GENERATION], [K.PREFILL_EMBD, K.STOP]):
        connection = upstream(*kinds)
        with pytest.raises(RemoteProtocolError, match="request 1 is live") as caught:
            connection.receive_eof()
        assert caught.value.kind is ErrorKind.UNEXPECTED_EOF
        assert state_of(connection) is UpstreamState.CLOSED
        with pytest.raises(RemoteProtocolError, match="is closed"):
            connection.receive(message(K.STOP))
        connection.close()


# --- credit


def test_credit() -> None:
    window = CreditWindow.open(2)
    assert (window.available, window.outstanding, window.drained) == (2, 0, True)
    window.send()
    window.send()
    with pytest.raises(LocalProtocolError, match="2 of 2"):
        window.send()
    window.ack()
    assert (window.available, window.outstanding, window.drained) == (1, 1, False)
    window.ack()
    with pytest.raises(RemoteProtocolError, match="Ack without"):
        window.ack()
    assert window.drained
    with pytest.raises(LocalProtocolError, match="at least 1"):
        CreditWindow.open(0)


# --- lane


def leased() -> Lane:
    lane = Lane(2)
    lane.connected()
    lane.lease()
    return lane


def test_a_lane_serves_one_request_after_the_other() -> None:
    lane = leased()
    for _ in range(2):
        lane.credit.send()
        lane.credit.ack()
        lane.expect_prediction()
        lane.stop()
        lane.stop_acknowledged()
        assert [lane.returnable] == [False]
        with pytest.raises(LocalProtocolError, match="1 predictions owed"):
            lane.release()
        lane.prediction()
        assert lane.returnable
        lane.release()
        assert state_of(lane) is LaneState.IDLE
        lane.lease()


def test_lane_refusals_that_are_our_own_error() -> None:
    fresh = Lane(1)
    suspect = leased()
    suspect.fail()
    unread = leased()
    unread.credit.send()
    waiting = leased()
    waiting.stop()
    calls: list[tuple[Callable[[], None], str]] = [
        (fresh.lease, "connecting: lease"),
        (fresh.expect_prediction, "connecting"),
        (leased().lease, "leased: lease"),
        (leased().connected, "leased: connected"),
        (leased().release, "leased: release"),
        (leased().retire, "leased: retire"),
        (suspect.lease, "suspect: lease"),
        (suspect.stop, "suspect: stop"),
        (suspect.release, "suspect: release"),
        (unread.stop, "1 unread Acks"),
        (waiting.release, "not acknowledged"),
        (waiting.expect_prediction, "stopping"),
        (waiting.stop, "stopping: stop"),
    ]
    for call, text in calls:
        with pytest.raises(LocalProtocolError, match=text) as caught:
            call()
        assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_lane_errors_of_the_peer() -> None:
    lane = leased()
    with pytest.raises(RemoteProtocolError, match="prediction without"):
        lane.prediction()
    with pytest.raises(RemoteProtocolError, match="Stop that was not sent"):
        lane.stop_acknowledged()
    lane.stop()
    lane.stop_acknowledged()
    with pytest.raises(RemoteProtocolError, match="Stop that was not sent"):
        lane.stop_acknowledged()


def test_a_failed_lane_can_only_be_retired() -> None:
    for lane in (Lane(1), leased()):
        lane.fail()
        lane.fail()
        assert state_of(lane) is LaneState.SUSPECT
        lane.retire()
        lane.retire()
        lane.fail()
        assert state_of(lane) is LaneState.RETIRED
        with pytest.raises(LocalProtocolError):
            lane.lease()


# --- prediction return


def bound_of(stream: PredictionReturn) -> tuple[int, int] | None:
    return stream.bound


def opening(**fields: Any) -> Any:
    return message(K.PREDICTION_RETURN_OPEN, **{"request_id": 1, "session_id": 2, **fields})


def opened() -> PredictionReturn:
    stream = PredictionReturn(1, 2)
    stream.opened(opening())
    return stream


def test_a_return_stream_outlives_requests() -> None:
    stream = PredictionReturn(1, 2)
    stream.expect(K.DECODE_EMBD)  # the frame may be on its way before the stream is there
    assert bound_of(stream) == (1, 2)
    stream.opened(opening())
    assert stream.receive(Reply.predicted_token(7)) is K.DECODE_EMBD
    stream.release()
    assert state_of(stream) is ReturnState.IDLE
    assert bound_of(stream) is None
    stream.bind(3, 4)
    assert bound_of(stream) == (3, 4)
    stream.expect(K.VERIFY_WINDOW)
    stream.expect(K.TRY_RESTORE_PREFILL_DECODE)
    assert stream.owed == 2
    assert stream.receive(Reply.of_predicted_tokens([])) is K.VERIFY_WINDOW
    assert stream.receive(Reply.ack()) is K.TRY_RESTORE_PREFILL_DECODE
    stream.release()
    stream.receive_eof()
    assert state_of(stream) is ReturnState.CLOSED


def test_replies_nobody_waits_for_are_the_peers_error() -> None:
    stream = opened()
    with pytest.raises(RemoteProtocolError, match="owes nothing"):
        stream.receive(Reply.predicted_token(1))
    stream.release()
    with pytest.raises(RemoteProtocolError, match="idle: reply"):
        stream.receive(Reply.predicted_token(1))
    waiting = PredictionReturn(1, 2)
    waiting.expect(K.DECODE_EMBD)
    with pytest.raises(RemoteProtocolError, match="opening: reply"):
        waiting.receive(Reply.predicted_token(1))


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        (K.DECODE_EMBD, ReplyKind.ACK),
        (K.DECODE_EMBD, ReplyKind.PREDICTED_TOKENS),
        (K.VERIFY_WINDOW, ReplyKind.PREDICTED_TOKEN),
    ],
)
def test_a_reply_must_answer_what_was_asked(kind: MessageKind, reply: ReplyKind) -> None:
    stream = opened()
    stream.expect(kind)
    with pytest.raises(RemoteProtocolError, match="does not answer"):
        stream.receive(Reply(reply))
    assert stream.owed == 1


def test_a_second_waiter_is_refused() -> None:
    stream = opened()
    with pytest.raises(LocalProtocolError, match="bound: bind"):
        stream.bind(3, 4)
    with pytest.raises(RemoteProtocolError, match="bound: opened"):
        stream.opened(opening())
    with pytest.raises(LocalProtocolError, match="opening: bind"):
        PredictionReturn(1, 2).bind(3, 4)


def test_other_refusals_of_a_return_stream() -> None:
    with pytest.raises(RemoteProtocolError, match="is waiting"):
        PredictionReturn(1, 2).opened(opening(session_id=3))
    stream = opened()
    for kind in (K.PREFILL_EMBD, K.STOP, K.RETIRE_VERIFY_WINDOW):
        with pytest.raises(LocalProtocolError, match="not answered by a prediction"):
            stream.expect(kind)
    stream.expect(K.DECODE_EMBD)
    with pytest.raises(LocalProtocolError, match="1 predictions owed"):
        stream.release()
    stream.close()
    stream.close()
    with pytest.raises(LocalProtocolError, match="closed: expect"):
        stream.expect(K.DECODE_EMBD)


def test_end_of_a_return_stream() -> None:
    for stream in (PredictionReturn(1, 2), opened()):
        with pytest.raises(RemoteProtocolError, match="ended") as caught:
            stream.receive_eof()
        assert caught.value.kind is ErrorKind.UNEXPECTED_EOF
        assert state_of(stream) is ReturnState.CLOSED
        stream.receive_eof()


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": (1,)},
        {"positions": (1,)},
        {"token_count": 1},
        {"activation": b"x"},
        {"chat_sampling_metadata": ""},
        {"sampling": SamplingConfig()},
    ],
    ids=lambda f: next(iter(f)),
)
def test_the_opening_message_is_bare(fields: dict[str, Any]) -> None:
    check_return_open(opening())
    with pytest.raises(RemoteProtocolError, match="more than its two ids"):
        check_return_open(opening(**fields))
    with pytest.raises(RemoteProtocolError, match="starts with"):
        check_return_open(message(K.STOP))
    with pytest.raises(RemoteProtocolError, match="header"):
        check_return_open(opening(phase=1))
