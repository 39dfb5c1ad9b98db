"""Hypothesis strategies for everything that can travel, and small helpers to move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from hypothesis import strategies as st

from skippy.protocol import (
    Message,
    MessageDecoder,
    MessageKind,
    NativeMtpDraft,
    Reply,
    ReplyDecoder,
    ReplyKind,
    ReplyStats,
    SamplingConfig,
    StageState,
    activation_multiplier,
    carries_activation,
    default_state,
    float_of_bits,
)

i32 = st.integers(-(2**31), 2**31 - 1)
u32 = st.integers(0, 2**32 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = u32.map(float_of_bits)
"""Every bit pattern, signalling NaNs included."""
short_text = st.text(st.characters(codec="utf-8"), max_size=16)

samplings = st.builds(
    SamplingConfig,
    flags=u32,
    seed=u32,
    temperature=f32,
    top_p=f32,
    top_k=i32,
    min_p=f32,
    presence_penalty=f32,
    frequency_penalty=f32,
    repeat_penalty=f32,
    penalty_last_n=i32,
    logit_bias=st.lists(st.tuples(i32, f32), max_size=4).map(tuple),
    typical_p=f32,
    top_nsigma=f32,
    dynatemp_range=f32,
    dynatemp_exponent=f32,
    dry_multiplier=f32,
    dry_base=f32,
    dry_allowed_length=i32,
    dry_penalty_last_n=i32,
    dry_sequence_breakers=st.lists(short_text, max_size=8).map(tuple),
    xtc_probability=f32,
    xtc_threshold=f32,
    mirostat_mode=i32,
    mirostat_entropy=f32,
    mirostat_learning_rate=f32,
    samplers=st.lists(short_text, max_size=16).map(tuple),
    ignore_eos=st.booleans(),
)


@st.composite
def messages(draw: st.DrawFn, n_embd: int = 3) -> Message:
    """Any message that keeps framing: any header words, the payload that a reader takes."""
    kind = draw(st.sampled_from(MessageKind))
    state = StageState(14, *draw(st.tuples(i32, i32, u32.map(lambda v: v - 2**31), i32, i32, i32, i32)))
    source = draw(st.integers(-2, 2))
    state = attrs.evolve(state, source_stage_index=source)
    token_count = draw(st.integers(0, 5))
    ends_early = kind in (MessageKind.STOP, MessageKind.STATE_IMPORT)
    sideband = st.lists(i32, max_size=0 if ends_early else 6).map(tuple)
    activation = raw = b""
    if carries_activation(kind, source):
        size = token_count * activation_multiplier(state.flags) * n_embd * 4
        activation = draw(st.binary(min_size=size, max_size=size))
    if kind is MessageKind.STATE_IMPORT:
        raw = draw(st.binary(min_size=token_count, max_size=token_count))
    return Message(
        kind,
        state,
        draw(i32),
        token_count,
        draw(u64),
        draw(u64),
        draw(st.none() | samplings),
        draw(st.none() | short_text),
        draw(sideband),
        draw(sideband),
        activation,
        raw,
    )


stats = st.builds(ReplyStats, *[i64] * 27)
drafts = st.builds(NativeMtpDraft, st.lists(i32, max_size=4).map(tuple), i64)
replies = st.builds(
    Reply,
    st.sampled_from(ReplyKind),
    i32,
    st.lists(i32, max_size=6).map(tuple),
    i32,
    st.none() | drafts,
    stats | st.just(ReplyStats()),
)


def cuts(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """``data`` in pieces of these sizes, over and over."""
    pieces, start, index = [], 0, 0
    while start < len(data):
        size = sizes[index % len(sizes)]
        pieces.append(data[start : start + size])
        start, index = start + size, index + 1
    return pieces


def receive_in_place(
    decoder: MessageDecoder | ReplyDecoder, data: bytes, sizes: Sequence[int]
) -> list[object]:
    """Push ``data`` through get_buffer/buffer_updated, ``sizes[i]`` bytes at a time; returns the frames."""
    take: Callable[[], object | None]
    take = decoder.next_message if isinstance(decoder, MessageDecoder) else decoder.next_reply
    frames: list[object] = []
    start = index = 0
    while True:
        while (frame := take()) is not None:
            frames.append(frame)
        if start == len(data):
            return frames
        view = decoder.get_buffer()
        count = min(len(view), sizes[index % len(sizes)], len(data) - start)
        view[:count] = data[start : start + count]
        decoder.buffer_updated(count)
        start, index = start + count, index + 1


def message(kind: MessageKind, **fields: object) -> Message:
    """A message with the default header of its kind; header words may be given by name."""
    names = {a.name for a in attrs.fields(StageState)}
    words = {k: fields.pop(k) for k in list(fields) if k in names}
    state = attrs.evolve(default_state(kind), **words)  # type: ignore[arg-type]
    return Message(kind, state, **fields)  # type: ignore[arg-type]
