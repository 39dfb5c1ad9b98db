"""What the codec's errors say, word for word, and what it does exactly at its limits."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from skippy.protocol import (
    ErrorKind,
    LocalProtocolError,
    MessageDecoder,
    MessageKind,
    NativeMtpDraft,
    ProtocolError,
    RemoteProtocolError,
    Reply,
    ReplyDecoder,
    ReplyKind,
    ReplyStats,
    SamplingConfig,
    StageState,
    encode_forwarded,
    encode_frame,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
    stats,
)
from skippy.protocol.float32 import Float32NaN, float_of_bits

from .strategies import message, receive_in_place

K = MessageKind
MIB = 1 << 20
Call = Callable[[], Any]


def header(
    kind: int = 1, token_count: int = 0, tokens: int = 0, positions: int = 0, version: int = 14,
    flags: int = 0, source: int = 0,
) -> bytes:  # fmt: skip
    words = (kind, 0, token_count, tokens, positions, version, 0, 1, flags, 0, 0, 0, 0, source)
    return struct.pack("<14i2Q", *words, 1, 2)


SAMPLING_HEAD = struct.pack("<II2fi4fi", 1, 2, 1, 1, 0, 0, 0, 0, 1, -1)
SAMPLING_MIDDLE = struct.pack("<6fii", 1, -1, 0, 1, 0, 1.75, 2, 64)
SAMPLING_TAIL = struct.pack("<2fi2f", 0, 0.1, 0, 5, 0.1)
BREAKERS = header(flags=8) + SAMPLING_HEAD + struct.pack("<I", 0) + SAMPLING_MIDDLE
SAMPLERS = BREAKERS + struct.pack("<I", 0) + SAMPLING_TAIL


def read(data: bytes, n_embd: int = 0, **limits: Any) -> Call:
    def call() -> Any:
        decoder = MessageDecoder(n_embd, **limits)
        decoder.receive_data(data)
        return decoder.next_message()

    return call


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


READER: list[tuple[Call, str]] = [
    (read(u32(0)), "unknown message kind 0"),
    (read(u32(0x534B5441)), "the peer shows a link token, but this side asks for none"),
    (read(header(version=13)), "state version 13, but only 14 is understood"),
    (read(header(version=15)[:56]), "state version 15, but only 14 is understood"),
    (read(header(token_count=-1)), "negative count: token_count -1, 0 tokens, 0 positions"),
    (read(header(tokens=-2)), "negative count: token_count 0, -2 tokens, 0 positions"),
    (read(header(positions=-3)), "negative count: token_count 0, 0 tokens, -3 positions"),
    (read(header(tokens=MIB + 1)), "sideband of 1048577 tokens; at most 1048576 are allowed"),
    (read(header(positions=MIB + 1)), "sideband of 1048577 positions; at most 1048576 are allowed"),
    (read(header(7, 512 * MIB + 1)), "state import of 536870913 bytes is over the limit of 536870912"),
    (read(header(7, 11), max_state_import_bytes=10), "state import of 11 bytes is over the limit of 10"),
    (read(header(1, 3), 2, max_activation_bytes=20), "activation of 24 bytes is over the limit of 20"),
    (read(header(1, 3), -1), "activation of 3 tokens x -1 floats: neither may be negative"),
    (read(header(flags=32) + u32(8 * MIB + 1)),
     "chat sampling metadata of 8388609 bytes; at most 8388608 are allowed"),
    (read(header(flags=32) + u32(3) + b"ab\xff"), "chat sampling metadata is not UTF-8 at byte 2"),
    (read(header(flags=8) + SAMPLING_HEAD + u32(257)), "257 logit bias entries; at most 256 are allowed"),
    (read(BREAKERS + u32(9)), "9 DRY sequence breaker strings; at most 8 are allowed"),
    (read(BREAKERS + u32(1) + u32(65)), "DRY sequence breaker string of 65 bytes; at most 64 are allowed"),
    (read(BREAKERS + u32(1) + u32(1) + b"\xff"), "DRY sequence breaker string is not UTF-8 at byte 0"),
    (read(SAMPLERS + u32(17)), "17 sampler strings; at most 16 are allowed"),
    (read(SAMPLERS + u32(1) + u32(65)), "sampler string of 65 bytes; at most 64 are allowed"),
    (read(SAMPLERS + u32(1) + u32(2) + b"a\x80"), "sampler string is not UTF-8 at byte 1"),
]  # fmt: skip


def read_reply(*words: int, **limits: int) -> Call:
    def call() -> Any:
        decoder = ReplyDecoder(**limits)
        decoder.receive_data(struct.pack(f"<{len(words)}i", *words))
        return decoder.next_reply()

    return call


REPLY_READER: list[tuple[Call, str]] = [
    (read_reply(0), "unknown reply kind 0"),
    (read_reply(4, 0, 0), "unknown reply kind 4"),
    (read_reply(2, 0, -1), "-1 predicted tokens"),
    (read_reply(2, 0, 262_145), "262145 predicted tokens; at most 262144 are allowed"),
    (read_reply(2, 0, 5, max_tokens=4), "5 predicted tokens; at most 4 are allowed"),
    (read_reply(2, 0, 0, 0, 2), "draft marker 2; only 0 and 1 have a meaning"),
    (read_reply(2, 0, 0, 0, -1), "draft marker -1; only 0 and 1 have a meaning"),
    (read_reply(2, 0, 0, 0, 1, -1), "-1 draft tokens"),
    (read_reply(2, 0, 0, 0, 1, 262_145), "262145 draft tokens; at most 262144 are allowed"),
]


@pytest.mark.parametrize(("call", "text"), [*READER, *REPLY_READER])
def test_what_the_readers_say(call: Call, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        call()
    assert str(caught.value) == text
    assert caught.value.kind is ErrorKind.INVALID_DATA


def frame(kind: MessageKind = K.PREFILL_EMBD, n_embd: int = 2, **fields: Any) -> Call:
    return lambda: encode_frame(message(kind, **fields), n_embd)


def written(kind: MessageKind = K.PREFILL_EMBD, **fields: Any) -> Call:
    return lambda: encode_message(message(kind, **fields))


def sampled(**fields: Any) -> Call:
    return written(sampling=SamplingConfig(**fields))


WRITER: list[tuple[Call, str]] = [
    (written(tokens=(0,) * (MIB + 1)), "1048577 tokens; at most 1048576 can travel"),
    (written(positions=(0,) * (MIB + 1)), "1048577 positions; at most 1048576 can travel"),
    (written(K.STATE_IMPORT, token_count=2, raw_bytes=b"abc"),
     "state import: token_count is 2 but there are 3 bytes"),
    (written(pos_start=2**31), "pos_start: 2147483648 does not fit its i32"),
    (written(token_count=-(2**31) - 1), "token_count: -2147483649 does not fit its i32"),
    (written(seq_id=2**31), "seq_id: 2147483648 does not fit its i32"),
    (written(source_stage_index=2**31), "source_stage_index: 2147483648 does not fit its i32"),
    (written(request_id=-1), "request_id: -1 does not fit its u64"),
    (written(session_id=2**64), "session_id: 18446744073709551616 does not fit its u64"),
    (written(pos_start=1.5), "pos_start: 1.5 does not fit its i32"),
    (written(tokens=(2**31,)), "a token does not fit its i32"),
    (written(positions=(2**31,)), "a position does not fit its i32"),
    (lambda: encode_forwarded(message(K.PREFILL_EMBD, positions=(2**31,)), 1, b"", 2),
     "a position does not fit its i32"),
    (lambda: encode_forwarded(message(K.PREFILL_EMBD, tokens=(2**31,)), 1, b"", 2),
     "a token does not fit its i32"),
    (written(chat_sampling_metadata="\ud800"),
     "chat sampling metadata cannot be encoded as UTF-8: surrogates not allowed"),
    (written(chat_sampling_metadata="a" * (8 * MIB + 1)),
     "chat sampling metadata of 8388609 bytes; at most 8388608 can travel"),
    (written(activation=memoryview(bytearray(16)).cast("i")[::2]), "the payload is not contiguous"),
    (frame(version=13), "state version 13; 14 is what we speak"),
    (frame(phase=2, flags=1), "phase 2 and flags 0x1 do not match PREFILL_EMBD"),
    (frame(token_count=-1), "token_count -1 is negative"),
    (frame(K.STOP, tokens=(1,)), "STOP must not carry tokens or positions: no reader takes them"),
    (frame(K.STATE_IMPORT, positions=(1,)),
     "STATE_IMPORT must not carry tokens or positions: no reader takes them"),
    (frame(raw_bytes=b"x"), "PREFILL_EMBD must not carry raw bytes: they would not be sent"),
    (frame(activation=b"abcd"),
     "PREFILL_EMBD from source stage -1 must not carry an activation: no reader takes it"),
    (frame(source_stage_index=0, token_count=1, activation=b"abcd"),
     "activation has 4 bytes; 1 tokens of width 2 take 8"),
    (frame(sampling=SamplingConfig(logit_bias=((1, 0.0),) * 257)),
     "sampling logit_bias has 257 entries; at most 256 can travel"),
    (frame(sampling=SamplingConfig(dry_sequence_breakers=("a",) * 9)),
     "sampling dry_sequence_breakers has 9 entries; at most 8 can travel"),
    (frame(sampling=SamplingConfig(samplers=("a",) * 17)),
     "sampling samplers has 17 entries; at most 16 can travel"),
    (sampled(flags=-1), "sampling flags=-1, seed=0: not within the 32 bits of the field"),
    (sampled(seed=2**32), "sampling flags=0, seed=4294967296: not within the 32 bits of the field"),
    (sampled(top_k=2**31), "sampling top_k=2147483648: not within the 32 bits of the field"),
    (sampled(penalty_last_n=2**31),
     "sampling penalty_last_n=2147483648, logit bias count=0: not within the 32 bits of the field"),
    (sampled(logit_bias=((2**31, 0.0),)),
     "sampling logit bias token=2147483648: not within the 32 bits of the field"),
    (sampled(logit_bias=((1, 1e39),)), "logit bias: 1e+39 is not an f32"),
    (sampled(dry_allowed_length=2**31), "sampling dry_allowed_length=2147483648, dry_penalty_last_n=64: "
     "not within the 32 bits of the field"),
    (sampled(dry_penalty_last_n=2**31), "sampling dry_allowed_length=2, dry_penalty_last_n=2147483648: "
     "not within the 32 bits of the field"),
    (sampled(mirostat_mode=2**31), "sampling mirostat_mode=2147483648: not within the 32 bits of the field"),
    (sampled(samplers=("\udfff",)), "sampling samplers: '\\udfff' cannot be encoded as UTF-8"),
    (sampled(dry_sequence_breakers=("\udfff",)),
     "sampling dry_sequence_breakers: '\\udfff' cannot be encoded as UTF-8"),
    *(
        (sampled(**{name: value}), f"{name}: {value!r} is not an f32")
        for name in (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty",
            "typical_p", "top_nsigma", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base",
            "xtc_probability", "xtc_threshold", "mirostat_entropy", "mirostat_learning_rate",
        )
        for value in (1e39, "warm")
    ),
]  # fmt: skip


def reply(**fields: Any) -> Call:
    return lambda: encode_reply(Reply(ReplyKind.PREDICTED_TOKEN, **fields))


REPLY_WRITER: list[tuple[Call, str]] = [
    (reply(predicted_tokens=(0,) * 262_145), "262145 predicted tokens; at most 262144 can travel"),
    (
        reply(native_mtp_draft=NativeMtpDraft((0,) * 262_145)),
        "262145 draft tokens; at most 262144 can travel",
    ),
]


@pytest.mark.parametrize(("call", "text"), [*WRITER, *REPLY_WRITER])
def test_what_the_writers_say(call: Call, text: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        call()
    assert str(caught.value) == text
    error: ProtocolError = caught.value
    assert error.kind is (ErrorKind.INVALID_DATA if "activation has" in text else ErrorKind.INVALID_INPUT)


@pytest.mark.parametrize("name", ["samplers", "dry_sequence_breakers"])
def test_a_long_string_is_measured_in_bytes(name: str) -> None:
    fits, too_long = "é" * 32, "é" * 32 + "a"
    assert encode_message(message(K.STOP, sampling=SamplingConfig(**{name: (fits,)})))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError) as caught:
        encode_message(message(K.STOP, sampling=SamplingConfig(**{name: (too_long,)})))  # type: ignore[arg-type]
    assert str(caught.value) == f"sampling {name}: a string of 65 bytes; at most 64 are allowed"
    assert caught.value.kind is ErrorKind.INVALID_DATA


def test_a_reply_word_that_does_not_fit_names_its_kind() -> None:
    with pytest.raises(LocalProtocolError, match="^PREDICTED_TOKEN: a value does not fit its field: "):
        encode_reply(Reply.predicted_token(2**31))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 4096, 4097, 5000, 16_384, 20_000])
def test_token_lists_of_every_size_class(count: int) -> None:
    tokens = tuple(range(count))
    given = Reply(ReplyKind.PREDICTED_TOKENS, 3, tokens, 5, NativeMtpDraft(tokens[::-1], 6))
    for sizes in ([100_000], [999]):
        assert receive_in_place(ReplyDecoder(), encode_reply(given), sizes) == [given]
        sent = message(K.VERIFY_WINDOW, tokens=tokens, positions=tokens[::-1])
        (got,) = receive_in_place(MessageDecoder(0), b"".join(encode_message(sent)), sizes)
        assert (got.tokens, got.positions) == (tokens, tokens[::-1])  # type: ignore[attr-defined]
    text = "x" * count
    sent = message(K.STOP, chat_sampling_metadata=text)
    for sizes in ([100_000], [999]):
        (got,) = receive_in_place(MessageDecoder(0), b"".join(encode_message(sent)), sizes)
        assert got.chat_sampling_metadata == text  # type: ignore[attr-defined]


def test_the_limits_themselves_may_travel() -> None:
    most = (7,) * 262_144
    full = Reply(ReplyKind.PREDICTED_TOKENS, predicted_tokens=most, native_mtp_draft=NativeMtpDraft(most))
    decoder = ReplyDecoder()
    decoder.receive_data(encode_reply(full))
    assert decoder.next_reply() == full
    sampling = SamplingConfig(
        logit_bias=tuple((i, 0.5) for i in range(256)),
        dry_sequence_breakers=("a" * 64,) * 8,
        samplers=("b" * 64,) * 16,
        xtc_threshold=0.5,
        mirostat_learning_rate=0.25,
    )
    sent = message(
        K.VERIFY_WINDOW,
        positions=(1,) * MIB,
        tokens=(2,) * MIB,
        sampling=sampling,
        chat_sampling_metadata="c" * (8 * MIB),
    )
    data = b"".join(encode_frame(sent, 0))
    assert len(data) == estimated_wire_bytes(sent)
    frames = MessageDecoder(0)
    frames.receive_data(data)
    got = frames.next_message()
    assert got is not None
    assert (got.sampling, got.chat_sampling_metadata) == (sampling, sent.chat_sampling_metadata)
    assert (len(got.tokens), len(got.positions)) == (MIB, MIB)


def test_surplus_list_entries_are_dropped_and_not_counted() -> None:
    sampling = SamplingConfig(
        logit_bias=((1, 0.5),) * 300,
        dry_sequence_breakers=("é",) * 12,
        samplers=("s",) * 20,
        xtc_threshold=0.5,
        mirostat_learning_rate=0.25,
    )
    sent = message(K.STOP, sampling=sampling)
    data = b"".join(encode_message(sent))
    assert len(data) == estimated_wire_bytes(sent) == 72 + 108 + 256 * 8 + 8 * 6 + 16 * 5
    decoder = MessageDecoder(0)
    decoder.receive_data(data)
    got = decoder.next_message()
    assert got is not None
    assert got.sampling == attrs.evolve(
        sampling, logit_bias=((1, 0.5),) * 256, dry_sequence_breakers=("é",) * 8, samplers=("s",) * 16
    )


def test_limits_of_our_own_are_inclusive_and_never_above_the_formats() -> None:
    assert read(header(7, 3) + b"abc", max_state_import_bytes=3)().raw_bytes == b"abc"
    assert bytes(read(header(1, 1) + b"abcd", 1, max_activation_bytes=4)().activation) == b"abcd"
    for call in (
        read(header(7, 512 * MIB + 1), max_state_import_bytes=MIB * MIB),
        read(header(1, 1), 128 * MIB + 1, max_activation_bytes=MIB * MIB),
        read_reply(2, 0, 262_145, max_tokens=MIB),
    ):
        with pytest.raises(RemoteProtocolError, match="262144|536870912"):
            call()
    assert read(header(7, 512 * MIB))() is None
    assert read(header(1, 1), 128 * MIB)() is None


def test_nan_bits() -> None:
    for bits in (0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001):
        value = float_of_bits(bits)
        assert isinstance(value, Float32NaN)
        assert repr(value) == f"Float32NaN({bits:#010x})"
    for bits, text in ((0x7F800000, "0x7f800000"), (0, "0x0"), (-1, "-0x1"), (1 << 32, "0x100000000")):
        with pytest.raises(ValueError, match=f"^{text} is not the bit pattern of an f32 NaN$"):
            Float32NaN(bits)


def test_an_untouched_reply_shares_the_empty_statistics() -> None:
    decoder = ReplyDecoder()
    decoder.receive_data(encode_reply(Reply.predicted_token(5)))
    got = decoder.next_reply()
    assert got is not None
    assert got.stats is Reply.ack().stats


def test_the_defaults_of_a_message() -> None:
    sent = message(K.PREFILL_EMBD)
    assert sent.state == StageState(14, 0, 1, 0, 0, 0, -1, -1, -1)
    assert Reply.of_predicted_tokens([]).predicted == 0
    assert Reply.of_predicted_tokens([4, 5], 9) == Reply(ReplyKind.PREDICTED_TOKENS, 4, (4, 5), 9)
    assert Reply.predicted_token(4, ReplyStats(kv_lookup_hits=2)).stats.kv_lookup_hits == 2


def test_statistics_at_their_limits() -> None:
    top, low = stats.I64_MAX, stats.I64_MIN
    assert (top, low) == (2**63 - 1, -(2**63))
    at_limits = ReplyStats(kv_lookup_hits=top, kv_lookup_misses=low)
    assert stats.clamped(at_limits) is at_limits
    beyond = ReplyStats(kv_lookup_hits=top + 1, kv_lookup_misses=low - 1, kv_lookup_errors=3)
    assert stats.clamped(beyond) == ReplyStats(kv_lookup_hits=top, kv_lookup_misses=low, kv_lookup_errors=3)
    assert stats.clamped(ReplyStats(kv_lookup_hits=top + 1)) == ReplyStats(kv_lookup_hits=top)
    assert stats.clamped(ReplyStats(kv_lookup_hits=low - 1)) == ReplyStats(kv_lookup_hits=low)
    assert [stats.stage_mask(i) for i in (-1, 0, 1, 62, 63)] == [0, 1, 2, 1 << 62, 0]
    values = {0.0: 0, -1.0: 0, 0.0004: 0, 0.0005: 1, 0.0015: 2, 1.0: 1000, 1e300: top, 2.0**63 / 1000: top}
    for milliseconds, us in values.items():
        assert stats.us_of_ms(milliseconds) == us
    for nothing in (float("nan"), float("inf"), float("-inf")):
        assert stats.us_of_ms(nothing) == 0


def test_which_edge_and_which_chunk_are_remembered() -> None:
    seen = stats.observe_edge_transport(ReplyStats(), 2, 10, 5, 100)
    seen = stats.observe_edge_transport(seen, 3, 5, 10, 200)  # as slow: the first one stays
    assert (seen.prefill_edge_write_us_max, seen.prefill_edge_wait_us_max) == (10, 10)
    assert (seen.prefill_edge_total_us_max, seen.prefill_edge_stage_index) == (15, 2)
    assert (seen.prefill_edge_activation_bytes_max, seen.prefill_edge_observation_count) == (100, 2)
    seen = stats.observe_edge_transport(seen, 4, 16, -7, 300)
    assert (seen.prefill_edge_total_us_max, seen.prefill_edge_stage_index) == (16, 4)
    assert (seen.prefill_edge_wait_us_max, seen.prefill_edge_activation_bytes_max) == (10, 300)
    seen = stats.observe_compute(ReplyStats(), 1, 50, 8)
    assert stats.observe_compute(seen, 2, 50, 8) == attrs.evolve(seen, prefill_compute_observation_count=2)
    slower = stats.observe_compute(seen, 2, 51, 8)
    assert (slower.prefill_compute_stage_index, slower.prefill_compute_us_at_slowest_rate) == (2, 51)
    larger = stats.observe_compute(slower, 3, 1, 9)
    assert (larger.prefill_compute_stage_index, larger.prefill_compute_token_count_at_slowest_rate) == (3, 9)
    assert stats.observe_compute(ReplyStats(), 1, 1, 0).prefill_compute_token_count_at_slowest_rate == 1
    assert stats.observe_compute(ReplyStats(), 1, 0, 4) == ReplyStats(prefill_compute_observation_count=1)
    assert stats.observe_compute(ReplyStats(), 1, 1, 1).prefill_compute_us_at_slowest_rate == 1


def test_the_smallest_chunks_are_samples_too() -> None:
    quick = stats.observe_compute(ReplyStats(), 1, 1, 8)
    assert stats.observe_compute(quick, 2, 5, 4).prefill_compute_stage_index == 1
    short = stats.observe_compute(ReplyStats(), 1, 5, 1)
    assert stats.observe_compute(short, 2, 3, 1).prefill_compute_stage_index == 1
    empty = ReplyStats(
        prefill_compute_us_at_slowest_rate=5,
        prefill_compute_stage_index=3,
        prefill_compute_token_count_at_slowest_rate=0,
    )
    assert stats.merge(ReplyStats(), empty) == ReplyStats()


def test_the_largest_state_may_travel() -> None:
    pages = mmap.mmap(-1, 512 * MIB + 1)  # never touched
    whole = memoryview(pages)
    header_bytes, payload = encode_message(
        message(K.STATE_IMPORT, token_count=512 * MIB, raw_bytes=whole[: 512 * MIB])
    )
    assert (len(header_bytes), len(payload)) == (72, 512 * MIB)
    with pytest.raises(LocalProtocolError) as caught:
        encode_message(message(K.STATE_IMPORT, token_count=512 * MIB + 1, raw_bytes=whole))
    assert str(caught.value) == "state import of 536870913 bytes is over the limit of 536870912"
