from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    EMPTY_STATS,
    ErrorKind,
    LocalProtocolError,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyKind,
    ReplyStats,
    RequestEpoch,
    VerifyWindowRange,
    activation_bytes,
    authoritative_position,
    carries_activation,
    check_activation,
    execution_tokens,
    frame_flags_of,
    is_skipped,
    reply_kinds,
    requires_predicted_reply,
    stale_reply,
    state_flags_of,
    stats,
    verify_window,
)

from . import strategies
from .strategies import message

K = MessageKind


# --- tokens to execute


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (K.PREFILL_EMBD, {"token_count": 3, "tokens": (5, 6, 7), "current_token": 7}, (5, 6, 7)),
        (K.PREFILL_EMBD, {"token_count": 1, "tokens": (5,)}, (5,)),
        (K.DECODE_EMBD, {"token_count": 1, "current_token": 9}, (9,)),
        (K.DECODE_EMBD, {"token_count": 1, "tokens": [9], "current_token": 9}, (9,)),
        (K.DECODE_EMBD, {"token_count": 1, "tokens": (1, 2, 9), "current_token": 9}, (9,)),
        (K.DECODE_EMBD, {"token_count": 1, "tokens": (4,)}, (4,)),
        (K.DECODE_REPLAY_EMBD, {"token_count": 2, "tokens": (1, 2), "current_token": 2}, (1, 2)),
        (K.VERIFY_WINDOW, {"token_count": 1, "tokens": (3,), "current_token": 3}, (3,)),
        (K.PREFILL_EMBD, {"token_count": 0}, ()),
    ],
)
def test_tokens_to_execute(kind: MessageKind, fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert execution_tokens(message(kind, **fields)) == expected


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (
            K.PREFILL_EMBD,
            {"token_count": 3, "tokens": (5, 6), "current_token": 6},
            "3 but the token sideband has 2",
        ),
        (K.PREFILL_EMBD, {"token_count": 1}, "has 0 entries"),
        (K.DECODE_EMBD, {"token_count": 1}, "has 0 entries"),
        (K.DECODE_EMBD, {"token_count": 1, "tokens": (1, 2)}, "has 2 entries"),
        (K.DECODE_EMBD, {"token_count": 2, "current_token": 4}, "has 0 entries"),
        (K.DECODE_EMBD, {"token_count": 1, "tokens": (1, 2), "current_token": 3}, "ends with 2"),
        (K.VERIFY_WINDOW, {"token_count": 4, "tokens": (1,), "current_token": 1}, "has 1 entries"),
        (K.PREFILL_EMBD, {"token_count": -1}, "asks for -1 tokens"),
    ],
)
def test_a_mismatch_is_never_filled_up(kind: MessageKind, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        execution_tokens(message(kind, **fields))


# --- activations and replies


def test_who_carries_an_activation() -> None:
    without = {K.STOP, K.STATE_IMPORT, K.PROBE_PREFILL, K.RESTORE_PREFILL, K.TRY_RESTORE_PREFILL}
    for kind in K:
        assert carries_activation(kind, 0) == (kind not in without)
        assert not carries_activation(kind, -1)


def test_flags_of_an_activation_in_memory_and_in_a_state_header() -> None:
    pairs = {0: 0, 64: 1, 128: 2, 256: 4, 64 | 256: 5, 64 | 128 | 256: 7}
    for state, in_memory in pairs.items():
        assert frame_flags_of(state | 1 | 8 | 512) == in_memory
        assert state_flags_of(in_memory | 8) == state


def test_what_an_epoch_is_and_which_is_older() -> None:
    epoch = RequestEpoch.of(
        message(
            K.DECODE_EMBD, request_id=1, session_id=2, checkpoint_generation=3, prompt_token_count=4,
            decode_step=5,
        )
    )  # fmt: skip
    assert attrs.astuple(epoch) == (1, 2, 3, 4, 5)
    assert not epoch.is_stale_for(epoch)
    for newer in ({"checkpoint_generation": 4}, {"prompt_token_count": 5}, {"decode_step": 6}):
        assert epoch.is_stale_for(attrs.evolve(epoch, **newer))
        assert not attrs.evolve(epoch, **newer).is_stale_for(epoch)
    for other in ({"request_id": 9}, {"session_id": 9}):
        assert not epoch.is_stale_for(attrs.evolve(epoch, decode_step=6, **other))


def test_verify_windows_have_a_place_and_an_id() -> None:
    window = verify_window(message(K.VERIFY_WINDOW, seq_id=9, pos_start=7, token_count=3))
    assert window == VerifyWindowRange(window_id=9, base_position=7, token_count=3)
    assert verify_window(message(K.DECODE_EMBD, seq_id=9, pos_start=7, token_count=3)) is None


def test_activation_size_errors() -> None:
    for count, width in ((-1, 4), (4, -1)):
        with pytest.raises(LocalProtocolError, match="negative") as negative:
            activation_bytes(count, width, 0)
        assert negative.value.kind is ErrorKind.INVALID_DATA
    assert activation_bytes(0, 4, 0) == activation_bytes(4, 0, 0) == 0
    with pytest.raises(RemoteProtocolError, match="64 bits") as caught:
        activation_bytes(2**31 - 1, 2**31 - 1, 64, RemoteProtocolError)
    assert caught.value.kind is ErrorKind.INVALID_DATA
    assert activation_bytes(2**31 - 1, 2**31 - 1, 0) == (2**31 - 1) ** 2 * 4
    assert check_activation(bytes(48), 3, 2, 64) == 48
    with pytest.raises(LocalProtocolError, match="over the limit"):
        check_activation(b"", 1 << 20, 1 << 10, 0)


def test_what_answers_what() -> None:
    for kind in K:
        answers = reply_kinds(kind)
        if requires_predicted_reply(kind):
            assert ReplyKind.ACK not in answers
            assert len(answers) == 1
    assert reply_kinds(K.PREFILL_EMBD) == {ReplyKind.ACK}
    assert reply_kinds(K.STOP) == {ReplyKind.ACK}
    assert reply_kinds(K.VERIFY_WINDOW) == {ReplyKind.PREDICTED_TOKENS}
    assert reply_kinds(K.RETIRE_VERIFY_WINDOW) == frozenset()


def test_authoritative_position() -> None:
    assert authoritative_position(message(K.DECODE_EMBD, pos_start=0)) == 0
    assert authoritative_position(message(K.DECODE_EMBD, pos_start=-1)) is None
    assert authoritative_position(message(K.PREFILL_EMBD, pos_start=3)) is None


# --- stale frames


@pytest.mark.parametrize("kind", K)
def test_what_an_earlier_stage_skipped_is_a_data_frame_without_rows(kind: MessageKind) -> None:
    """Controls say 0 for other reasons, or have no rows anyway."""
    data = {1, 2, 4, 5, 6, 8, 9, 21}
    assert is_skipped(message(kind, token_count=0)) == (kind.value in data)
    assert not is_skipped(message(kind, token_count=1))


def test_a_stale_frame_is_answered_by_the_kind_that_is_due_with_nothing_in_it() -> None:
    assert stale_reply(message(K.VERIFY_WINDOW, seq_id=9)) == Reply(
        ReplyKind.PREDICTED_TOKENS, predicted=0, predicted_tokens=(), window_id=9
    )
    for kind in (K.DECODE_EMBD, K.PREFILL_FINAL_EMBD, K.DECODE_REPLAY_FINAL_EMBD):
        assert stale_reply(message(kind, seq_id=9)) == Reply(
            ReplyKind.PREDICTED_TOKEN, predicted=-1, predicted_tokens=(), window_id=0
        )
    assert stale_reply(message(K.PREFILL_EMBD)) == stale_reply(message(K.TRIM_SESSION)) == Reply.ack()


# --- statistics


@given(strategies.stats, strategies.stats)
def test_merged_statistics_always_travel(a: ReplyStats, b: ReplyStats) -> None:
    merged = stats.merge(a, b)
    for value in stats.stats_fields(merged):
        assert -(2**63) <= value < 2**63
    assert merged.kv_lookup_hits == max(-(2**63), min(2**63 - 1, a.kv_lookup_hits + b.kv_lookup_hits))
    assert merged.kv_hit_stage_mask == a.kv_hit_stage_mask | b.kv_hit_stage_mask
    assert merged.verify_window_max_tokens == max(a.verify_window_max_tokens, b.verify_window_max_tokens)


@given(strategies.stats)
def test_merging_nothing_into_something(a: ReplyStats) -> None:
    kept = attrs.asdict(stats.merge(a, EMPTY_STATS))
    for name, value in attrs.asdict(a).items():
        if "_max" not in name and "prefill_edge" not in name:
            assert kept[name] == value


big = st.integers(-(2**70), 2**70)


@given(strategies.stats, big, big, big, big)
def test_observations_always_travel(start: ReplyStats, a: int, b: int, c: int, d: int) -> None:
    seen = stats.observe_compute(stats.observe_edge_transport(start, a, b, c, d), a, b, c)
    assert stats.clamped(seen) is seen
    window = stats.observe_verify_window(start, a, b, c, d)
    assert stats.clamped(window) is window
    assert seen.prefill_edge_observation_count == min(start.prefill_edge_observation_count + 1, 2**63 - 1)


def test_ties_keep_what_was_there_and_negative_times_count_as_nothing() -> None:
    edge = stats.observe_edge_transport(EMPTY_STATS, 1, 10, 5, 100)
    later = stats.observe_edge_transport(EMPTY_STATS, 2, 5, 10, 200)
    assert stats.merge(edge, later).prefill_edge_stage_index == 1
    assert stats.merge(later, edge).prefill_edge_stage_index == 2
    backwards = stats.observe_edge_transport(EMPTY_STATS, 1, -5, 7, 100)
    assert (backwards.prefill_edge_write_us_max, backwards.prefill_edge_total_us_max) == (0, 7)


def test_a_sample_without_time_is_none() -> None:
    """Not even one of more tokens stands against the first real one."""
    start = ReplyStats(prefill_compute_token_count_at_slowest_rate=8)
    seen = stats.observe_compute(start, 3, 1, 4)
    assert seen.prefill_compute_us_at_slowest_rate == 1
    assert seen.prefill_compute_token_count_at_slowest_rate == 4
    assert seen.prefill_compute_stage_index == 3


def test_what_one_verify_window_adds() -> None:
    fields = (
        "compute_us", "forward_write_us", "downstream_wait_us", "total_us",
        "stage_count", "request_count", "token_count", "max_tokens",
    )  # fmt: skip

    def windows(*values: int) -> ReplyStats:
        return ReplyStats(**{f"verify_window_{name}": v for name, v in zip(fields, values, strict=True)})

    one = stats.observe_verify_window(EMPTY_STATS, 5, 7, 11, 4)
    assert one == windows(5, 7, 11, 23, 1, 1, 4, 4)
    assert stats.observe_verify_window(one, 1, 2, 3, 2) == windows(6, 9, 14, 29, 2, 2, 6, 4)
    assert stats.observe_verify_window(EMPTY_STATS, -1, -1, -1, -1) == windows(0, 0, 0, 0, 1, 1, 0, 0)
    most = 2**63 - 1
    assert stats.observe_verify_window(EMPTY_STATS, most, most + 1, 1, most + 1) == windows(
        most, most, 1, most, 1, 1, most, most
    )


def test_emptiness() -> None:
    assert stats.is_empty(EMPTY_STATS)
    assert stats.is_empty(ReplyStats(prefill_edge_total_us_max=5))
    assert not stats.is_empty(ReplyStats(verify_window_max_tokens=1))
    assert not stats.is_empty(stats.observe_compute(EMPTY_STATS, 0, 0, 0))


def test_small_helpers() -> None:
    assert [stats.stage_mask(i) for i in (-1, 0, 3, 62, 63)] == [0, 1, 8, 1 << 62, 0]
    values = [float("nan"), float("inf"), -1.0, 0.0, 0.0004, 0.0005, 1.2345, 1e300]
    assert [stats.us_of_ms(v) for v in values] == [0, 0, 0, 0, 0, 1, 1235, 2**63 - 1]
