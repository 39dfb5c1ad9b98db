"""Frames of decode steps in a row: the few bytes that change say the same as the codec does."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    PREDICTION_BYTES,
    STEP_HEADER_BYTES,
    Message,
    MessageDecoder,
    MessageKind,
    Reply,
    ReplyStats,
    SamplingConfig,
    StepHeader,
    default_state,
    encode_message,
    encode_prediction,
    encode_reply,
    predicted_token,
)

K = MessageKind
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
COUNTS = st.integers(0, (1 << 31) - 3)
IDS = st.integers(0, (1 << 64) - 1)


@st.composite
def steps(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from([K.DECODE_EMBD, K.DECODE_LIGHT_CTX, K.DECODE_READOUT]))
    token = draw(I32)
    state = attrs.evolve(
        default_state(kind),
        seq_id=draw(I32),
        checkpoint_generation=draw(I32),
        prompt_token_count=draw(I32),
        decode_step=draw(COUNTS),
        current_token=token,
        source_stage_index=draw(st.integers(0, 9)),
    )
    return Message(kind, state, draw(COUNTS), 1, draw(IDS), draw(IDS), tokens=(token,))


def following(step: Message, token: int, seq_id: int) -> Message:
    state = attrs.evolve(
        step.state, seq_id=seq_id, decode_step=step.state.decode_step + 1, current_token=token
    )
    return attrs.evolve(step, state=state, pos_start=step.pos_start + 1, tokens=(token,))


def header_of(message: Message) -> memoryview:
    return memoryview(bytes(encode_message(message)[0]))


@given(steps(), I32, I32)
def test_the_next_step_is_taken_and_nothing_is_lost(step: Message, token: int, seq_id: int) -> None:
    header = StepHeader.of(step)
    assert header is not None
    header.move_on(0)
    assert header.takes(header_of(following(step, token, seq_id)))
    assert (header.token, header.seq_id) == (token, seq_id)
    assert not header.takes(header_of(step))
    assert header.takes(header_of(following(step, 3, 4)))  # as often as one likes


@given(steps(), I32)
def test_what_moves_on_is_what_the_codec_would_send(step: Message, token: int) -> None:
    encoded = bytearray(encode_message(step)[0])
    assert StepHeader.fits(encoded)
    StepHeader(encoded).move_on(token)
    assert encoded == header_of(following(step, token, step.state.seq_id))


CHANGES = [
    lambda m: attrs.evolve(m, kind=K.DECODE_READOUT if m.kind is not K.DECODE_READOUT else K.DECODE_EMBD),
    lambda m: attrs.evolve(m, pos_start=m.pos_start + 1),
    lambda m: attrs.evolve(m, request_id=m.request_id ^ 1),
    lambda m: attrs.evolve(m, session_id=m.session_id ^ 1),
    lambda m: attrs.evolve(m, tokens=(m.tokens[0] ^ 1,)),
    *(
        lambda m, name=name: attrs.evolve(
            m, state=attrs.evolve(m.state, **{name: getattr(m.state, name) ^ 1})
        )
        for name in (
            "version",
            "phase",
            "flags",
            "checkpoint_generation",
            "prompt_token_count",
            "decode_step",
            "current_token",
            "source_stage_index",
        )
    ),
]
"""Everything in which a frame can differ from the next step, but for its token and seq_id."""


@pytest.mark.parametrize("change", CHANGES)
@given(step=steps(), token=I32)
def test_any_other_difference_is_seen(change: object, step: Message, token: int) -> None:
    assert callable(change)
    header = StepHeader.of(step)
    assert header is not None
    header.move_on(0)
    raw = header_of(change(following(step, token, 1)))
    assert len(raw) == STEP_HEADER_BYTES
    assert not header.takes(raw)


SETTINGS = SamplingConfig(flags=1, temperature=0.5)
STEP = Message(K.DECODE_EMBD, default_state(K.DECODE_EMBD), 7, 1, 1, 2, tokens=(5,))


@pytest.mark.parametrize(
    "message",
    [
        attrs.evolve(STEP, state=attrs.evolve(STEP.state, decode_step=0)),  # names another token
        attrs.evolve(STEP, tokens=()),
        attrs.evolve(STEP, kind=K.PREFILL_EMBD),
        attrs.evolve(STEP, token_count=2, tokens=(5, 5)),
        attrs.evolve(STEP, state=attrs.evolve(STEP.state, decode_step=-1, current_token=5)),
        attrs.evolve(STEP, pos_start=-1, state=attrs.evolve(STEP.state, decode_step=0, current_token=5)),
        attrs.evolve(STEP, sampling=SETTINGS, state=attrs.evolve(STEP.state, decode_step=0, current_token=5)),
        attrs.evolve(STEP, positions=(7,), state=attrs.evolve(STEP.state, decode_step=0, current_token=5)),
    ],
)
def test_what_is_no_plain_step_has_no_next(message: Message) -> None:
    assert StepHeader.of(message) is None


def test_a_position_that_does_not_fit_is_not_sent() -> None:
    last = (1 << 31) - 1
    step = attrs.evolve(
        STEP, pos_start=last, state=attrs.evolve(STEP.state, decode_step=last, current_token=5)
    )
    header = bytearray(encode_message(step)[0])
    StepHeader(header).move_on(6)
    decoder = MessageDecoder(0)
    decoder.receive_data(header)
    moved = decoder.next_message()
    assert moved is not None
    assert (moved.pos_start, moved.state.decode_step) == (last, last)


@given(I32)
def test_a_prediction_is_what_the_codec_sends(token: int) -> None:
    reply = encode_reply(Reply.predicted_token(token))
    assert encode_prediction(token) == reply
    assert len(reply) == PREDICTION_BYTES
    assert predicted_token(memoryview(reply)) == token


@given(st.integers(0, PREDICTION_BYTES - 1), st.integers(1, 255), I32)
def test_any_other_reply_is_no_prediction(offset: int, change: int, token: int) -> None:
    reply = bytearray(encode_reply(Reply.predicted_token(token)))
    reply[offset] ^= change
    assert predicted_token(reply) is None


def test_statistics_make_it_another_reply() -> None:
    reply = encode_reply(Reply.predicted_token(5, ReplyStats(kv_lookup_misses=1)))
    assert len(reply) == PREDICTION_BYTES
    assert predicted_token(reply) is None
