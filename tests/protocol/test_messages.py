"""Messages as values."""

from __future__ import annotations

import attrs
from hypothesis import given

from skippy.protocol import Message

from .strategies import messages


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
