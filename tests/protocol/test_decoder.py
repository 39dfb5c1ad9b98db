"""What the decoders promise about memory, buffers, ends and errors."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from skippy.protocol import (
    ErrorKind,
    LocalProtocolError,
    MessageDecoder,
    MessageKind,
    RemoteProtocolError,
    Reply,
    ReplyDecoder,
    ReplyKind,
    SamplingConfig,
    encode_message,
    encode_reply,
)
from skippy.protocol.incremental import INTERNAL_BUFFER_BYTES

from .strategies import message, receive_in_place

MIB = 1 << 20


def header(
    kind: int, token_count: int, tokens: int = 0, positions: int = 0, source: int = 0, flags: int = 0
) -> bytes:
    phase = 2 if kind == 2 else 1
    return struct.pack(
        "<14i2Q", kind, 0, token_count, tokens, positions, 14, 0, phase, flags, 0, 0, 0, 0, source, 1, 2
    )


def test_an_activation_is_received_in_the_given_buffer() -> None:
    given: list[memoryview] = []

    def allocate(size: int) -> memoryview:
        given.append(memoryview(bytearray(size)))
        return given[-1]

    payload = bytes(range(256)) * 1024  # 256 KiB
    frame = message(
        MessageKind.PREFILL_EMBD,
        token_count=64,
        tokens=tuple(range(64)),
        activation=payload,
        source_stage_index=0,
    )
    data = b"".join(encode_message(frame))
    decoder = MessageDecoder(1024, allocate=allocate)
    in_place = 0
    start = 0
    while (decoded := decoder.next_message()) is None:
        view = decoder.get_buffer()
        count = min(len(view), 60_000, len(data) - start)
        if given and view.obj is given[0].obj:
            in_place += count
        view[:count] = data[start : start + count]
        decoder.buffer_updated(count)
        start += count
    assert decoded.activation is given[0]
    assert bytes(decoded.activation) == payload
    assert len(given) == 1
    assert in_place >= len(payload) - INTERNAL_BUFFER_BYTES


def test_a_view_over_floats_may_be_given() -> None:
    floats = memoryview(bytearray(8)).cast("f")
    decoder = MessageDecoder(2, allocate=lambda size: floats)  # type: ignore[arg-type, return-value]
    decoder.receive_data(header(2, 1) + struct.pack("<2f", 1.5, -2.0))
    decoded = decoder.next_message()
    assert decoded is not None
    assert decoded.activation is floats
    assert list(floats) == [1.5, -2.0]


@pytest.mark.parametrize(
    "wrong",
    [memoryview(bytearray(7)), memoryview(bytes(8)), memoryview(bytearray(16))[::2]],
    ids=["size", "read-only", "gaps"],
)
def test_a_buffer_of_the_wrong_kind_is_our_own_error(wrong: memoryview) -> None:
    decoder = MessageDecoder(2, allocate=lambda size: wrong)
    decoder.receive_data(header(2, 1))
    with pytest.raises(LocalProtocolError, match="allocate"):
        decoder.next_message()


def test_an_allocator_that_raises_kills_the_decoder() -> None:
    def allocate(size: int) -> memoryview:
        raise MemoryError("no room")

    decoder = MessageDecoder(2, allocate=allocate)
    decoder.receive_data(header(2, 1))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            decoder.next_message()


def test_a_sampling_block_from_before_is_not_taken_for_one_that_has_not_arrived() -> None:
    """Both start at the same place in the buffer, where the first one still lies when the second is due."""
    first, second = (SamplingConfig(seed=seed, samplers=(), dry_sequence_breakers=()) for seed in (1, 2))
    decoder = MessageDecoder(0)
    decoder.receive_data(encode_message(message(MessageKind.STOP, sampling=first))[0])
    assert decoder.next_message().sampling.seed == 1  # type: ignore[union-attr]
    data = encode_message(message(MessageKind.STOP, sampling=second))[0]
    for piece in (data[:72], data[72:80]):
        decoder.receive_data(piece)
        assert decoder.next_message() is None
    decoder.receive_data(data[80:])
    assert decoder.next_message().sampling.seed == 2  # type: ignore[union-attr]


def test_a_sampling_block_that_comes_again_is_the_same_value() -> None:
    sent = [
        message(
            MessageKind.PREFILL_EMBD,
            token_count=2,
            tokens=(5, token),
            sampling=SamplingConfig(seed=seed),
            chat_sampling_metadata="{}",
        )
        for token, seed in ((6, 1), (7, 1), (8, 2), (9, 1))
    ]
    decoder = MessageDecoder(0)
    decoder.receive_data(b"".join(encode_message(one)[0] for one in sent))
    got = [decoder.next_message() for _ in sent]
    assert [one.tokens for one in got] == [(5, 6), (5, 7), (5, 8), (5, 9)]  # type: ignore[union-attr]
    blocks = [one.sampling for one in got]  # type: ignore[union-attr]
    assert [block.seed for block in blocks] == [1, 1, 2, 1]  # type: ignore[union-attr]
    assert blocks[0] is blocks[1]


def test_nothing_is_received_into_a_buffer_that_was_not_asked_for() -> None:
    decoder = ReplyDecoder()
    with pytest.raises(LocalProtocolError, match="^1 bytes were not received into get_buffer"):
        decoder.buffer_updated(1)
    decoder.get_buffer()[0] = 3
    decoder.buffer_updated(1)
    with pytest.raises(LocalProtocolError, match="were not received into"):
        decoder.buffer_updated(1)


def test_memory_for_a_large_field_grows_with_what_has_come() -> None:
    decoder = MessageDecoder(1024)
    decoder.receive_data(header(2, 4096))
    came = 0
    while (got := decoder.next_message()) is None:
        view = decoder.get_buffer()
        assert len(view) <= max(256 * 1024, came)
        came += len(view)
        decoder.buffer_updated(len(view))
    assert len(got.activation) == came == 16 * MIB


def test_allocate_is_called_only_when_the_size_is_allowed() -> None:
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(size))

    decoder = MessageDecoder(1024, max_activation_bytes=4096, allocate=allocate)
    decoder.receive_data(header(2, 2))
    with pytest.raises(RemoteProtocolError, match="8192 bytes is over the limit of 4096"):
        decoder.next_message()
    decoder = MessageDecoder(2**20, allocate=allocate)
    decoder.receive_data(header(2, 129))
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        decoder.next_message()
    decoder = MessageDecoder(1024, allocate=allocate)
    decoder.receive_data(header(2, 0))
    empty = decoder.next_message()
    assert empty is not None
    assert empty.activation == b""
    assert asked == []
    decoder = MessageDecoder(1024, max_activation_bytes=4096, allocate=allocate)
    decoder.receive_data(header(2, 1))
    assert decoder.next_message() is None
    assert asked == [4096]


@pytest.mark.parametrize(
    ("n_embd", "frame"),
    [
        (1024, header(2, 131072)),
        (0, header(7, 512 * MIB)),
        (0, header(2, 0, tokens=MIB)),
        (0, header(2, 0, positions=MIB)),
        (0, header(2, 0, flags=32) + struct.pack("<I", 8 * MIB)),
    ],
    ids=["activation", "state import", "tokens", "positions", "chat metadata"],
)
def test_an_announced_size_costs_nothing_until_it_arrives(n_embd: int, frame: bytes) -> None:
    decoder = MessageDecoder(n_embd)
    tracemalloc.start()
    try:
        decoder.receive_data(frame)
        assert decoder.next_message() is None
        for _ in range(4):
            decoder.receive_data(bytes(100_000))
            assert decoder.next_message() is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB


def test_own_limit_for_state_import() -> None:
    decoder = MessageDecoder(0, max_state_import_bytes=0)
    decoder.receive_data(header(7, 1))
    with pytest.raises(RemoteProtocolError, match="limit of 0"):
        decoder.next_message()


def test_own_limit_for_reply_tokens() -> None:
    decoder = ReplyDecoder(max_tokens=2)
    decoder.receive_data(encode_reply(Reply.of_predicted_tokens([1, 2])))
    decoder.receive_data(encode_reply(Reply.of_predicted_tokens([1, 2, 3])))
    assert decoder.next_reply() == Reply.of_predicted_tokens([1, 2])
    with pytest.raises(RemoteProtocolError, match="3 predicted tokens"):
        decoder.next_reply()


def test_large_fields_through_the_small_buffer() -> None:
    tokens = tuple(range(-50_000, 50_000))
    frame = message(
        MessageKind.TRY_RESTORE_PREFILL_DECODE,
        token_count=1,
        tokens=tokens,
        positions=tokens[::-1],
        chat_sampling_metadata="é" * 100_000,
        sampling=SamplingConfig(),
    )
    data = b"".join(encode_message(frame))
    (decoded,) = receive_in_place(MessageDecoder(8), data, [100_000, 3, 5000])
    assert decoded.tokens == tokens  # type: ignore[attr-defined]
    assert decoded.positions == tokens[::-1]  # type: ignore[attr-defined]
    assert decoded.chat_sampling_metadata == "é" * 100_000  # type: ignore[attr-defined]
    many = tuple(range(100_000))
    reply = Reply(ReplyKind.PREDICTED_TOKENS, predicted_tokens=many)
    assert receive_in_place(ReplyDecoder(), encode_reply(reply), [9999]) == [reply]


def test_limits_are_inclusive() -> None:
    tokens = (7,) * MIB
    data = b"".join(encode_message(message(MessageKind.VERIFY_WINDOW, tokens=tokens)))
    decoder = MessageDecoder(0)
    decoder.receive_data(data)
    decoded = decoder.next_message()
    assert decoded is not None
    assert len(decoded.tokens) == MIB


def test_get_buffer_is_never_empty_and_bounded() -> None:
    decoder = MessageDecoder(0)
    stop = b"".join(encode_message(message(MessageKind.STOP)))
    data = stop * 1000
    frames = receive_in_place(decoder, data, [INTERNAL_BUFFER_BYTES, 1, 71, 73])
    assert len(frames) == 1000
    assert len(decoder.get_buffer()) <= INTERNAL_BUFFER_BYTES


def test_receiving_into_a_decoder_full_of_frames_is_our_own_error() -> None:
    decoder = MessageDecoder(0)
    stop = b"".join(encode_message(message(MessageKind.STOP)))
    full = (stop * 300)[:INTERNAL_BUFFER_BYTES]
    decoder.get_buffer()[:] = full
    decoder.buffer_updated(len(full))
    with pytest.raises(LocalProtocolError, match="take them"):
        decoder.get_buffer()
    taken = 0
    while decoder.next_message() is not None:
        taken += 1
    assert taken == INTERNAL_BUFFER_BYTES // 72
    assert decoder.get_buffer()


@pytest.mark.parametrize("count", [0, -1, INTERNAL_BUFFER_BYTES + 1])
def test_wrong_counts_are_our_own_error(count: int) -> None:
    decoder = MessageDecoder(0)
    decoder.get_buffer()
    with pytest.raises(LocalProtocolError, match="receive_eof"):
        decoder.buffer_updated(count)


def is_at_boundary(decoder: MessageDecoder) -> bool:
    return decoder.at_boundary


def test_end_of_stream() -> None:
    stop = b"".join(encode_message(message(MessageKind.STOP)))
    decoder = MessageDecoder(0)
    assert is_at_boundary(decoder)
    decoder.receive_eof()
    decoder.receive_data(stop + stop)
    assert not is_at_boundary(decoder)
    decoder.receive_eof()
    assert decoder.next_message() is not None
    assert not is_at_boundary(decoder)
    assert decoder.next_message() is not None
    assert decoder.next_message() is None
    assert is_at_boundary(decoder)

    decoder.receive_data(stop + stop[:1])
    with pytest.raises(RemoteProtocolError) as caught:
        decoder.receive_eof()
    assert caught.value.kind is ErrorKind.UNEXPECTED_EOF
    assert decoder.next_message() is not None  # what was whole is still there
    with pytest.raises(RemoteProtocolError):
        decoder.next_message()


def test_whole_frames_come_out_before_the_error() -> None:
    stop = b"".join(encode_message(message(MessageKind.STOP)))
    decoder = MessageDecoder(0)
    decoder.receive_data(stop + b"\xff\xff\xff\xff")
    assert decoder.next_message() is not None
    with pytest.raises(RemoteProtocolError, match="unknown message kind -1"):
        decoder.next_message()


def test_a_stream_that_changes_format_loses_nothing() -> None:
    opening = message(MessageKind.PREDICTION_RETURN_OPEN, request_id=1, session_id=2)
    reply = encode_reply(Reply.predicted_token(5))
    decoder = MessageDecoder(0)
    decoder.receive_data(b"".join(encode_message(opening)) + reply[:100])
    assert decoder.next_message() is not None
    replies = ReplyDecoder()
    replies.receive_data(decoder.take_trailing_data())
    replies.receive_data(reply[100:])
    assert replies.next_reply() == Reply.predicted_token(5)
    assert decoder.at_boundary

    decoder.receive_data(header(2, 0, tokens=1))
    assert decoder.next_message() is None
    with pytest.raises(LocalProtocolError, match="between frames"):
        decoder.take_trailing_data()
