from __future__ import annotations

from typing import Any

import pytest

from skippy.protocol import (
    Action,
    LocalProtocolError,
    Message,
    MessageKind,
    RemoteProtocolError,
    RequestEpoch,
    Session,
    SessionState,
    Verb,
)

from .strategies import message

K = MessageKind


def data(kind: MessageKind, position: int, count: int = 1, generation: int = 0, **fields: Any) -> Message:
    return message(
        kind,
        pos_start=position,
        token_count=count,
        checkpoint_generation=generation,
        **{"request_id": 1, "session_id": 2, **fields},
    )


def session_of(length: int, generation: int = 0) -> Session:
    session = Session()
    assert session.accept(data(K.PREFILL_EMBD, 0, length, generation)) == Action(Verb.RUN, 0, length)
    return session


def test_prefill_and_decode_follow_each_other() -> None:
    session = Session()
    assert (session.state, session.length, session.epoch) == (SessionState.NEW, 0, None)
    assert session.accept(data(K.PREFILL_EMBD, 0, 4)) == Action(Verb.RUN, 0, 4)
    assert session.accept(data(K.PREFILL_EMBD, 4, 3)) == Action(Verb.RUN, 4, 3)
    step = data(K.DECODE_EMBD, 7, decode_step=0, prompt_token_count=8)
    assert session.accept(step) == Action(Verb.RUN, 7, 1)
    assert session.state is SessionState.LIVE
    assert session.length == 8
    assert session.epoch == RequestEpoch.of(step)
    assert session.accept(data(K.VERIFY_WINDOW, 8, 4)) == Action(Verb.RUN, 8, 4)


def test_a_prompt_of_one_token_decodes_at_position_0() -> None:
    assert Session().accept(data(K.DECODE_EMBD, 0)) == Action(Verb.RUN, 0, 1)


def test_a_negative_position_means_the_end() -> None:
    session = session_of(4)
    assert session.accept(data(K.PREFILL_EMBD, -1, 2)) == Action(Verb.RUN, 4, 2)
    assert session.accept(data(K.DECODE_EMBD, -1)) == Action(Verb.RUN, 6, 1)


@pytest.mark.parametrize("kind", [K.DECODE_EMBD, K.DECODE_READOUT, K.DECODE_LIGHT_CTX, K.VERIFY_WINDOW])
def test_a_position_below_the_length_is_a_rewind(kind: MessageKind) -> None:
    session = session_of(8)
    session.accept(data(K.VERIFY_WINDOW, 8, 4, decode_step=5))
    earlier = data(kind, 9, 2, decode_step=3, seq_id=1)
    assert session.accept(earlier) == Action(Verb.REWIND, 9, 2)
    assert session.length == 11
    assert session.epoch == RequestEpoch.of(earlier), "within a generation a rewind lowers the epoch"
    assert session.stale_frames == 0


@pytest.mark.parametrize(
    "kind", [K.PREFILL_EMBD, K.PREFILL_FINAL_EMBD, K.DECODE_REPLAY_EMBD, K.DECODE_REPLAY_FINAL_EMBD]
)
def test_chunks_rewind_only_in_a_higher_generation(kind: MessageKind) -> None:
    session = session_of(8)
    with pytest.raises(RemoteProtocolError, match="already holds 8"):
        session.accept(data(kind, 4, 2))
    assert session.length == 8
    assert session.accept(data(kind, 4, 2, generation=1)) == Action(Verb.REWIND, 4, 2)
    assert session.length == 6


@pytest.mark.parametrize("kind", [K.PREFILL_EMBD, K.DECODE_EMBD, K.VERIFY_WINDOW, K.DECODE_REPLAY_EMBD])
def test_a_gap_fails_the_request(kind: MessageKind) -> None:
    for session, length in ((Session(), 0), (session_of(5), 5)):
        with pytest.raises(RemoteProtocolError, match=f"position {length + 1}, the session holds {length}"):
            session.accept(data(kind, length + 1))
        assert session.length == length


def test_decode_without_position_before_any_prefill() -> None:
    with pytest.raises(RemoteProtocolError, match="before any prefill"):
        Session().accept(data(K.DECODE_EMBD, -1))


def test_stale_frames_are_counted_and_change_nothing() -> None:
    session = session_of(8, generation=2)
    for frame in (
        data(K.DECODE_EMBD, 8, generation=1, decode_step=99),
        data(K.PREFILL_EMBD, 100, 4, generation=1),
        data(K.DECODE_EMBD, 3, 0, generation=7),  # found stale by an earlier stage and emptied
    ):
        assert session.accept(frame) == Action(Verb.STALE, 0, 0)
    assert session.stale_frames == 3
    assert session.length == 8
    assert session.epoch is not None
    assert session.epoch.checkpoint_generation == 2


def test_only_kinds_with_an_epoch_are_compared() -> None:
    session = session_of(8, generation=2)
    assert session.is_stale(data(K.TRY_RESTORE_PREFILL_DECODE, 8, generation=1))
    for kind in (K.STOP, K.TRIM_SESSION, K.CONFIGURE_GENERATION, K.PROBE_PREFILL):
        assert not session.is_stale(data(kind, 0, generation=1))
    assert not session.is_stale(data(K.DECODE_EMBD, 8, generation=1, session_id=3)), "another flow"


def test_another_requests_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="on the session of"):
        session_of(3).accept(data(K.DECODE_EMBD, 3, request_id=9))


def test_not_a_data_kind_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="no rows"):
        Session().accept(data(K.STOP, 0))
    with pytest.raises(LocalProtocolError, match="not a trim"):
        Session().trim(data(K.STOP, 0))


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="token_count -1"):
        Session().accept(data(K.PREFILL_EMBD, 0, -1))


def test_trim() -> None:
    session = session_of(8)
    assert session.trim(data(K.TRIM_SESSION, 0, 5)) == 5
    assert session.trim(data(K.TRIM_SESSION, 0, 7)) == 5
    assert session.accept(data(K.DECODE_EMBD, 5)) == Action(Verb.RUN, 5, 1)
    assert session.trim(data(K.TRIM_SESSION, 0, -3)) == 0
    assert session.state is SessionState.LIVE
    assert Session().trim(data(K.TRIM_SESSION, 0, 5)) == 0


def test_restore_then_go_on() -> None:
    session = Session()
    session.restored(data(K.TRY_RESTORE_PREFILL, 0, 6), 6)
    assert session.accept(data(K.PREFILL_EMBD, 6, 2)) == Action(Verb.RUN, 6, 2)
    with pytest.raises(LocalProtocolError, match="restored does not fit"):
        session.restored(data(K.TRY_RESTORE_PREFILL, 0, 6), 6)
    with pytest.raises(LocalProtocolError, match="-1"):
        Session().restored(data(K.TRY_RESTORE_PREFILL, 0, 6), -1)


@pytest.mark.parametrize("kind", [K.PREFILL_EMBD, K.DECODE_REPLAY_EMBD])
def test_what_was_restored_rewinds_in_a_higher_generation(kind: MessageKind) -> None:
    """No row has run behind it, so there is no epoch yet."""
    session = Session()
    session.restored(data(K.TRY_RESTORE_PREFILL, 0, 6), 6)
    with pytest.raises(RemoteProtocolError, match="already holds 6"):
        session.accept(data(kind, 5, 2))
    assert session.accept(data(kind, 5, 2, generation=1)) == Action(Verb.REWIND, 5, 2)
    assert session.length == 7


def test_stop_makes_it_new_for_the_same_or_other_ids() -> None:
    session = session_of(8, generation=5)
    session.stop()
    session.stop()
    assert (session.state, session.length, session.epoch) == (SessionState.NEW, 0, None)
    assert session.accept(data(K.PREFILL_EMBD, 0, 2, request_id=7)) == Action(Verb.RUN, 0, 2)
