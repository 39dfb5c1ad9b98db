from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    Buffer,
    ErrorKind,
    LocalProtocolError,
    Message,
    MessageKind,
    NativeMtpDraft,
    Reply,
    ReplyDecoder,
    ReplyKind,
    ReplyStats,
    SamplingConfig,
    default_state,
    encode_forwarded,
    encode_frame,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
)
from skippy.protocol.codec_sampling import encode_sampling
from skippy.protocol.rules import DATA_KINDS

from .strategies import message, messages

K = MessageKind


def test_the_activation_goes_out_by_reference() -> None:
    payload = bytearray(b"12345678")
    frame = message(K.DECODE_EMBD, token_count=1, tokens=(4,), activation=payload, source_stage_index=0)
    header, body = encode_frame(frame, 2)
    assert isinstance(header, bytes)
    assert len(header) == 76
    assert body is payload
    raw = memoryview(b"state")
    assert encode_message(message(K.STATE_IMPORT, token_count=5, raw_bytes=raw))[1] is raw
    assert len(encode_message(message(K.STOP))) == 1


def test_views_over_wider_items_are_counted_in_bytes() -> None:
    floats = memoryview(bytearray(16)).cast("f")
    frame = message(K.DECODE_EMBD, token_count=2, activation=floats, source_stage_index=0)
    _, body = encode_frame(frame, 2)
    assert isinstance(body, memoryview)
    assert (body.format, len(body)) == ("B", 16)
    assert body.obj is floats.obj
    assert estimated_wire_bytes(frame) == 72 + 16


def test_a_view_with_gaps_is_refused() -> None:
    gaps = memoryview(bytearray(16)).cast("f")[::2]
    with pytest.raises(LocalProtocolError, match="contiguous"):
        encode_message(message(K.DECODE_EMBD, token_count=1, activation=gaps, source_stage_index=0))


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (K.STOP, {"tokens": (1,)}, "STOP must not carry tokens"),
        (K.STOP, {"positions": (1,)}, "STOP must not carry"),
        (K.STOP, {"activation": b"1234", "source_stage_index": 0}, "STOP from source stage 0"),
        (K.DECODE_EMBD, {"activation": b"12345678", "token_count": 1}, "source stage -1 must not carry"),
        (K.PROBE_PREFILL, {"activation": b"1", "source_stage_index": 0}, "PROBE_PREFILL"),
        (K.RESTORE_PREFILL, {"activation": b"1", "source_stage_index": 0}, "no reader takes it"),
        (K.TRY_RESTORE_PREFILL, {"activation": b"1", "source_stage_index": 0}, "no reader takes it"),
        (
            K.DECODE_EMBD,
            {"token_count": 1, "source_stage_index": 0},
            "has 0 bytes; 1 tokens of width 2 take 8",
        ),
        (
            K.DECODE_EMBD,
            {"token_count": 1, "source_stage_index": 0, "activation": bytes(8), "flags": 64},
            "take 16",
        ),
        (K.DECODE_EMBD, {"raw_bytes": b"x"}, "raw bytes"),
        (K.STATE_IMPORT, {"tokens": (1,)}, "STATE_IMPORT must not carry"),
        (K.STATE_IMPORT, {"activation": b"x"}, "must not carry an activation"),
        (K.DECODE_EMBD, {"version": 13}, "version 13"),
        (K.DECODE_EMBD, {"phase": 1}, "do not match DECODE_EMBD"),
        (K.PREFILL_EMBD, {"flags": 1}, "do not match"),
        (K.TRIM_SESSION, {"token_count": -1}, "negative"),
        (K.DECODE_EMBD, {"sampling": SamplingConfig(samplers=("a",) * 17)}, "samplers has 17"),
        (K.DECODE_EMBD, {"sampling": SamplingConfig(logit_bias=((1, 0.0),) * 257)}, "logit_bias has 257"),
        (
            K.DECODE_EMBD,
            {"sampling": SamplingConfig(dry_sequence_breakers=("a",) * 9)},
            "dry_sequence_breakers has 9",
        ),
    ],
)
def test_what_would_break_framing_is_our_own_error(
    kind: MessageKind, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        encode_frame(message(kind, **fields), 2)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pos_start": 2**31}, "pos_start"),
        ({"token_count": -(2**31) - 1}, "token_count"),
        ({"request_id": -1}, "request_id"),
        ({"session_id": 2**64}, "session_id"),
        ({"seq_id": 2**31}, "seq_id"),
        ({"tokens": (2**31,)}, "token does not fit"),
        ({"positions": (-(2**31) - 1,)}, "position does not fit"),
        ({"chat_sampling_metadata": "\ud800"}, "UTF-8"),
        ({"sampling": SamplingConfig(samplers=("\ud800",))}, "samplers"),
        ({"sampling": SamplingConfig(top_k=2**31)}, "top_k"),
        ({"sampling": SamplingConfig(seed=-1)}, "seed"),
        ({"sampling": SamplingConfig(temperature=1e39)}, "temperature"),
        ({"sampling": SamplingConfig(logit_bias=((2**31, 0.0),))}, "logit bias token"),
    ],
)
def test_values_that_do_not_fit_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text) as caught:
        encode_message(message(K.DECODE_EMBD, **fields))
    assert caught.value.kind is ErrorKind.INVALID_INPUT


def test_a_long_sampling_string_is_invalid_data() -> None:
    fits = message(K.CONFIGURE_GENERATION, sampling=SamplingConfig(samplers=("é" * 32,)))
    assert encode_frame(fits, 0)
    with pytest.raises(LocalProtocolError, match="66 bytes") as caught:
        encode_message(message(K.CONFIGURE_GENERATION, sampling=SamplingConfig(samplers=("é" * 33,))))
    assert caught.value.kind is ErrorKind.INVALID_DATA


def test_statistics_that_grew_too_large_are_clamped() -> None:
    reply = Reply.ack(ReplyStats(kv_lookup_hits=2**63, kv_lookup_misses=-(2**63) - 5, kv_lookup_errors=7))
    decoder = ReplyDecoder()
    decoder.receive_data(encode_reply(reply))
    decoded = decoder.next_reply()
    assert decoded is not None
    assert decoded.stats == ReplyStats(
        kv_lookup_hits=2**63 - 1, kv_lookup_misses=-(2**63), kv_lookup_errors=7
    )


def test_reply_values_that_do_not_fit() -> None:
    for reply in (
        Reply.predicted_token(2**31),
        Reply(ReplyKind.ACK, window_id=2**31),
        Reply(ReplyKind.ACK, native_mtp_draft=NativeMtpDraft((), 2**63)),
    ):
        with pytest.raises(LocalProtocolError, match="does not fit"):
            encode_reply(reply)


def test_many_sampling_blocks_in_turn() -> None:
    """Encodings are remembered; more blocks than are kept must not be confused."""
    configs = [SamplingConfig(seed=i) for i in range(200)]
    expected: dict[int, Buffer] = {}
    for _ in range(2):
        for config in configs:
            data = encode_message(message(K.DECODE_EMBD, sampling=config))[0]
            assert int.from_bytes(data[76:80], "little") == config.seed
            assert expected.setdefault(config.seed, data) == data
    assert encode_sampling(configs[-1]) is encode_sampling(configs[-1])


@given(messages().filter(lambda sent: sent.kind in DATA_KINDS), st.integers(0, 70))
def test_forwarding_encodes_what_the_forwarded_message_would(sent: Message, index: int) -> None:
    sent = attrs.evolve(sent, token_count=2, state=attrs.evolve(default_state(sent.kind), seq_id=5))
    activation = bytes(range(24))
    buffers = encode_forwarded(sent, index, activation, 3)
    assert [*buffers] == encode_frame(sent.forwarded(index, activation), 3)


def test_forwarding_leaves_chat_metadata_behind_and_its_flag() -> None:
    sent = message(K.DECODE_EMBD, token_count=1, chat_sampling_metadata="{}", flags=8 | 32 | 64)
    header, _ = encode_forwarded(sent, 1, bytes(16), 2)
    assert len(header) == 72
    assert int.from_bytes(header[32:36], "little") == 64


def test_the_size_of_a_state_import() -> None:
    sent = message(K.STATE_IMPORT, token_count=5, raw_bytes=b"state")
    assert estimated_wire_bytes(sent) == 72 + 5 == len(b"".join(encode_message(sent)))


def test_forwarding_refuses_an_activation_of_another_size() -> None:
    with pytest.raises(LocalProtocolError, match="23 bytes"):
        encode_forwarded(message(MessageKind.DECODE_EMBD, token_count=2), 1, bytes(23), 3)
