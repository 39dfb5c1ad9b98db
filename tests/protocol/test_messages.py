"""Messages as values."""

from __future__ import annotations

import attrs
from hypothesis import given

from skippy.protocol import Message, MessageKind, SamplingConfig, encode_message

from .strategies import message, messages


@given(messages())
def test_a_forwarded_message_differs_in_source_activation_and_metadata_only(message: Message) -> None:
    forwarded = message.forwarded(3, b"\0\0\0\0")
    expected = attrs.evolve(
        message,
        state=attrs.evolve(message.state, source_stage_index=3),
        chat_sampling_metadata=None,
        activation=b"\0\0\0\0",
        raw_bytes=b"",
    )
    # Messages compare by identity, so that no one compares megabytes by accident.
    assert attrs.astuple(forwarded, recurse=False) == attrs.astuple(expected, recurse=False)


def test_a_skipped_message_is_its_header_without_rows() -> None:
    place = {"pos_start": 7, "request_id": 1, "session_id": 2, "seq_id": 9, "decode_step": 3}
    full = message(
        MessageKind.VERIFY_WINDOW,
        token_count=2,
        tokens=(5, 6),
        positions=(7, 8),
        sampling=SamplingConfig(),
        chat_sampling_metadata="{}",
        activation=bytes(16),
        source_stage_index=0,
        **place,
    )
    bare = message(MessageKind.VERIFY_WINDOW, source_stage_index=1, **place)
    (frame,) = encode_message(full.skipped(1))
    assert frame == encode_message(bare)[0]
    assert len(frame) == 72
