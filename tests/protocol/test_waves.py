"""Decode waves: the word that names one, and its place in an encoded frame."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    DATA_KINDS,
    ErrorKind,
    LocalProtocolError,
    Message,
    MessageKind,
    RemoteProtocolError,
    Wave,
    default_state,
    encode_forwarded,
    encode_frame,
    pack_wave,
    set_seq_id,
    unpack_wave,
)
from tests.protocol.strategies import i32, messages

GOLDEN = [
    (None, 0),
    (Wave(0, 1), 1),
    (Wave(0, 255), 0xFF),
    (Wave(1, 4), 0x104),
    (Wave(0x123456, 0x78), 0x12345678),
    (Wave(2**23 - 1, 255), 2**31 - 1),
]


@pytest.mark.parametrize(("wave", "word"), GOLDEN)
def test_words(wave: Wave | None, word: int) -> None:
    assert pack_wave(wave) == word
    assert unpack_wave(word) == wave


@given(st.builds(Wave, st.integers(0, 2**23 - 1), st.integers(1, 255)))
def test_every_wave_has_a_word_of_its_own(wave: Wave) -> None:
    word = pack_wave(wave)
    assert 0 < word < 2**31
    assert unpack_wave(word) == wave


@given(i32)
def test_every_word_is_a_wave_or_refused(word: int) -> None:
    if word < 0 or (word and word & 0xFF == 0):
        with pytest.raises(RemoteProtocolError) as caught:
            unpack_wave(word)
        assert caught.value.kind is ErrorKind.INVALID_DATA
    else:
        assert pack_wave(unpack_wave(word)) == word


@pytest.mark.parametrize(
    ("wave", "text"),
    [
        (Wave(-1, 1), "decode wave -1; they are 0 to 8388607"),
        (Wave(2**23, 1), "decode wave 8388608; they are 0 to 8388607"),
        (Wave(3, 0), "a decode wave of 0 rows; it has 1 to 255, or the frame has no wave"),
        (Wave(3, 256), "a decode wave of 256 rows; it has 1 to 255, or the frame has no wave"),
    ],
)
def test_waves_that_cannot_travel(wave: Wave, text: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        pack_wave(wave)
    assert str(caught.value) == text
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (-1, "decode wave word -1 in seq_id; none is negative"),
        (-(2**31), "decode wave word -2147483648 in seq_id; none is negative"),
        (0x700, "decode wave 7 has 0 rows; a frame of no wave has the word 0 in seq_id"),
    ],
)
def test_words_that_name_no_wave(word: int, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_wave(word)
    assert str(caught.value) == text


@given(messages().filter(lambda sent: sent.kind in DATA_KINDS), i32, i32)
def test_a_changed_word_is_as_if_encoded_with_it(sent: Message, before: int, after: int) -> None:
    """Whatever the frame carries besides, and nothing else of it changes."""
    state = attrs.evolve(default_state(sent.kind), source_stage_index=3)
    sent = attrs.evolve(sent, token_count=2, state=state)

    def with_word(word: int) -> Message:
        return attrs.evolve(sent, state=attrs.evolve(state, seq_id=word))

    header, activation = encode_forwarded(with_word(before), 4, bytes(24), 3)
    size = len(header)
    set_seq_id(header, after)
    assert [header, activation] == encode_frame(with_word(after).forwarded(4, bytes(24)), 3)
    assert len(header) == size


@pytest.mark.parametrize("word", [2**31, -(2**31) - 1])
def test_a_word_that_does_not_fit_changes_nothing(word: int) -> None:
    kind = MessageKind.DECODE_EMBD
    sent = Message(kind, default_state(kind), token_count=1)
    header, _ = encode_forwarded(sent, 1, bytes(8), 2)
    before = bytes(header)
    with pytest.raises(LocalProtocolError, match=f"seq_id: {word} does not fit its i32"):
        set_seq_id(header, word)
    assert header == before
