from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    Float32NaN,
    LocalProtocolError,
    Message,
    MessageDecoder,
    ProtocolError,
    Reply,
    ReplyDecoder,
    SamplingConfig,
    bits_of_float,
    encode_message,
    encode_reply,
    estimated_wire_bytes,
    float_of_bits,
)
from skippy.protocol.float32 import pack_f32
from skippy.protocol.vectors import canonical_message, canonical_sampling

from .strategies import cuts, messages, receive_in_place, replies, u32

N_EMBD = 3
sizes = st.lists(st.integers(1, 200), min_size=1, max_size=6)


def without_block_flags(message: Message) -> dict[str, object]:
    """The writer sets flag bits 3 and 5 itself."""
    data = canonical_message(message)
    state = data["state"]
    data["state"] = (state.version, state.flags & ~40, state.seq_id, state.phase, state.decode_step)
    return data


@given(messages(N_EMBD))
def test_message_round_trip(message: Message) -> None:
    data = b"".join(encode_message(message))
    assert estimated_wire_bytes(message) == len(data)
    decoder = MessageDecoder(N_EMBD)
    decoder.receive_data(data)
    decoded = decoder.next_message()
    assert decoded is not None
    assert decoder.at_boundary
    assert without_block_flags(decoded) == without_block_flags(message)
    assert bool(decoded.state.flags & 8) == (message.sampling is not None)
    assert bool(decoded.state.flags & 32) == (message.chat_sampling_metadata is not None)
    assert b"".join(encode_message(decoded)) == data


@given(replies)
def test_reply_round_trip(reply: Reply) -> None:
    data = encode_reply(reply)
    decoder = ReplyDecoder()
    decoder.receive_data(data)
    assert decoder.next_reply() == reply
    assert decoder.at_boundary


@given(st.lists(messages(N_EMBD), max_size=5), sizes, st.booleans())
def test_a_stream_of_messages_in_any_pieces(
    sent: list[Message], pieces: list[int], own_buffers: bool
) -> None:
    data = b"".join(b"".join(encode_message(m)) for m in sent)
    if own_buffers:
        decoder = MessageDecoder(N_EMBD, allocate=lambda size: memoryview(bytearray(size)))
    else:
        decoder = MessageDecoder(N_EMBD)
    received = receive_in_place(decoder, data, pieces)
    decoder.receive_eof()
    assert b"".join(b"".join(encode_message(m)) for m in received if isinstance(m, Message)) == data
    assert len(received) == len(sent)


@given(st.lists(replies, max_size=5), sizes)
def test_a_stream_of_replies_in_any_pieces(sent: list[Reply], pieces: list[int]) -> None:
    data = b"".join(map(encode_reply, sent))
    decoder = ReplyDecoder()
    received = []
    for piece in cuts(data, pieces):
        decoder.receive_data(piece)
        while (reply := decoder.next_reply()) is not None:
            received.append(reply)
    decoder.receive_eof()
    assert received == sent


@given(messages(N_EMBD), st.data())
def test_damaged_messages_parse_or_raise_our_error(message: Message, data: st.DataObject) -> None:
    """At the same byte and with the same error, however the bytes come."""
    damaged = bytearray(b"".join(encode_message(message)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    def outcome(pieces: list[int]) -> tuple[object, ...]:
        decoder = MessageDecoder(N_EMBD, max_activation_bytes=1 << 16)
        frames: list[object] = []
        try:
            for piece in cuts(bytes(damaged), pieces):
                decoder.receive_data(piece)
                while (frame := decoder.next_message()) is not None:
                    frames.append(b"".join(map(bytes, encode_message(frame))))
            decoder.receive_eof()
        except ProtocolError as error:
            return (*frames, error.kind, str(error))
        return tuple(frames)

    whole = outcome([len(damaged)])
    assert outcome([1]) == whole
    assert outcome([7, 50]) == whole


@given(st.binary(max_size=600))
def test_any_bytes_parse_as_replies_or_raise_our_error(data: bytes) -> None:
    decoder = ReplyDecoder()
    decoder.receive_data(data)
    try:
        while decoder.next_reply() is not None:
            pass
        decoder.receive_eof()
    except ProtocolError:
        pass


@given(u32)
def test_every_f32_bit_pattern_survives(bits: int) -> None:
    value = float_of_bits(bits)
    assert bits_of_float(value) == bits
    assert pack_f32(["x"], [value]) == bits.to_bytes(4, "little")


@given(st.sampled_from([0x7FA00001, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]))
def test_nan_is_a_float_that_pickles_with_its_bits(bits: int) -> None:
    value = float_of_bits(bits)
    assert isinstance(value, Float32NaN)
    assert value != value
    assert pickle.loads(pickle.dumps(value)).bits == bits


def test_a_pattern_that_is_no_nan_is_refused() -> None:
    for bits in (0, 0x7F800000, 0xFF800000, 0x3F800000, -1, 1 << 32):
        with pytest.raises(ValueError, match="NaN"):
            Float32NaN(bits)


def test_out_of_range_float_is_named() -> None:
    with pytest.raises(LocalProtocolError, match="min_p"):
        pack_f32(("top_p", "min_p"), (1.0, 1e300))


def test_equal_but_different_zeros_are_not_mixed_up() -> None:
    """The last encoded and decoded blocks are remembered; 0.0 == -0.0 must not confuse them."""
    decoder = MessageDecoder(0)
    for zero in (0.0, -0.0, 0.0):
        from skippy.protocol import MessageKind

        from .strategies import message

        config = SamplingConfig(min_p=zero)
        decoder.receive_data(b"".join(encode_message(message(MessageKind.DECODE_EMBD, sampling=config))))
        decoded = decoder.next_message()
        assert decoded is not None
        assert canonical_sampling(decoded.sampling) == canonical_sampling(config)
