"""Rules of the wire that follow from a kind, a header or a count: pure functions, no bytes.

Source: ``docs/protocol.md``, sections "Message kinds", "State header", "Flag bits", "Activation".
"""

from __future__ import annotations

from typing import Final

from .errors import ErrorKind, LocalProtocolError, ProtocolError, RemoteProtocolError
from .kinds import (
    LLAMA_TOKEN_NULL,
    MAX_STAGE_DECODED_ACTIVATION_BYTES,
    MessageKind,
    ReplyKind,
    StateFlag,
)
from .messages import Buffer, Message, StageState

_PHASE: Final[dict[MessageKind, int]] = {
    MessageKind.PREFILL_EMBD: 1,
    MessageKind.DECODE_EMBD: 2,
    MessageKind.STOP: 2,
    MessageKind.PREFILL_FINAL_EMBD: 1,
    MessageKind.DECODE_REPLAY_EMBD: 3,
    MessageKind.DECODE_REPLAY_FINAL_EMBD: 3,
    MessageKind.STATE_IMPORT: 1,
    MessageKind.DECODE_READOUT: 2,
    MessageKind.DECODE_LIGHT_CTX: 4,
    MessageKind.STATE_EXPORT: 1,
    MessageKind.CONFIGURE_GENERATION: 1,
    MessageKind.PROBE_PREFILL: 1,
    MessageKind.RESTORE_PREFILL: 1,
    MessageKind.TRY_RESTORE_PREFILL: 1,
    MessageKind.TRY_RESTORE_PREFILL_DECODE: 1,
    MessageKind.TRIM_SESSION: 1,
    MessageKind.PREDICTION_RETURN_OPEN: 2,
    MessageKind.VERIFY_WINDOW: 2,
    MessageKind.RETIRE_VERIFY_WINDOW: 1,
}

PREFILL_KINDS: Final = frozenset({MessageKind.PREFILL_EMBD, MessageKind.PREFILL_FINAL_EMBD})
REPLAY_KINDS: Final = frozenset({MessageKind.DECODE_REPLAY_EMBD, MessageKind.DECODE_REPLAY_FINAL_EMBD})
FINAL_CHUNK_KINDS: Final = frozenset({MessageKind.PREFILL_FINAL_EMBD, MessageKind.DECODE_REPLAY_FINAL_EMBD})
POSITIONED_KINDS: Final = frozenset(
    {
        MessageKind.DECODE_EMBD,
        MessageKind.DECODE_READOUT,
        MessageKind.DECODE_LIGHT_CTX,
        MessageKind.VERIFY_WINDOW,
    }
)
"""Kinds whose ``pos_start`` is the committed length the session must have before they run."""
DATA_KINDS: Final = PREFILL_KINDS | REPLAY_KINDS | POSITIONED_KINDS
"""Kinds that bring rows to execute."""
PREDICTED_KINDS: Final = POSITIONED_KINDS | FINAL_CHUNK_KINDS
CACHE_CONTROL_KINDS: Final = frozenset(
    {
        MessageKind.PROBE_PREFILL,
        MessageKind.RESTORE_PREFILL,
        MessageKind.TRY_RESTORE_PREFILL,
        MessageKind.TRY_RESTORE_PREFILL_DECODE,
    }
)
ACTIVATIONLESS_KINDS: Final = CACHE_CONTROL_KINDS - {MessageKind.TRY_RESTORE_PREFILL_DECODE}
"""Kinds 15 to 17. (Stop and StateImport have no activation either: their frames end earlier.)"""
_ANY_STATE_KINDS: Final = frozenset(
    {
        MessageKind.STATE_IMPORT,
        MessageKind.STATE_EXPORT,
        MessageKind.CONFIGURE_GENERATION,
        MessageKind.TRIM_SESSION,
        MessageKind.RETIRE_VERIFY_WINDOW,
    }
)
_ONE_TOKEN_KINDS: Final = (POSITIONED_KINDS - {MessageKind.VERIFY_WINDOW}) | REPLAY_KINDS
_U64_MAX: Final = (1 << 64) - 1
# Plain ints: an operation on an IntFlag costs about a microsecond, and these run for every frame.
_SHAPE_FLAGS: Final = int(StateFlag.FINAL_CHUNK | StateFlag.LIGHT_CONTEXT)
_FOUR_ROWS: Final = int(StateFlag.GEMMA3N_ALTUP_SIDEBAND)
_TWO_ROWS: Final = int(StateFlag.RWKV7_V_FIRST_SIDEBAND | StateFlag.INKLING_MTP_EMBD_SIDEBAND)
_FRAME_FLAGS: Final = (
    (StateFlag.RWKV7_V_FIRST_SIDEBAND, 1),
    (StateFlag.GEMMA3N_ALTUP_SIDEBAND, 2),
    (StateFlag.INKLING_MTP_EMBD_SIDEBAND, 4),
)


def _default_flags(kind: MessageKind) -> int:
    if kind in FINAL_CHUNK_KINDS:
        return int(StateFlag.FINAL_CHUNK)
    return int(StateFlag.LIGHT_CONTEXT) if kind is MessageKind.DECODE_LIGHT_CTX else 0


_DEFAULT_STATE: Final = {k: StageState(phase=p, flags=_default_flags(k)) for k, p in _PHASE.items()}


def default_state(kind: MessageKind) -> StageState:
    """The header a fresh message of ``kind`` carries: its phase and flags, everything else neutral."""
    return _DEFAULT_STATE[kind]


def state_matches_kind(kind: MessageKind, state: StageState) -> bool:
    """Whether phase, FINAL_CHUNK and LIGHT_CONTEXT are those of ``kind``; other flag bits do not matter.

    Kinds 7, 13, 14, 19 and 22 match any header.
    """
    if kind in _ANY_STATE_KINDS:
        return True
    expected = _DEFAULT_STATE[kind]
    return state.phase == expected.phase and (state.flags & _SHAPE_FLAGS) == expected.flags


def requires_predicted_reply(kind: MessageKind) -> bool:
    """Whether the final stage answers ``kind`` with predicted tokens (kinds 2, 4, 6, 8, 9, 21)."""
    return kind in PREDICTED_KINDS


def reply_kinds(kind: MessageKind) -> frozenset[ReplyKind]:
    """The reply kinds that may answer a message of ``kind``; empty when it gets no reply."""
    if kind is MessageKind.VERIFY_WINDOW:
        return frozenset({ReplyKind.PREDICTED_TOKENS})
    if kind in PREDICTED_KINDS:
        return frozenset({ReplyKind.PREDICTED_TOKEN})
    if kind is MessageKind.TRY_RESTORE_PREFILL_DECODE:
        return frozenset({ReplyKind.PREDICTED_TOKEN, ReplyKind.ACK})
    if kind in (MessageKind.RETIRE_VERIFY_WINDOW, MessageKind.PREDICTION_RETURN_OPEN):
        return frozenset()
    return frozenset({ReplyKind.ACK})


def carries_activation(kind: MessageKind, source_stage_index: int) -> bool:
    """Whether a reader takes activation bytes after the sidebands of such a frame."""
    return (
        source_stage_index >= 0
        and kind not in ACTIVATIONLESS_KINDS
        and kind is not MessageKind.STOP
        and kind is not MessageKind.STATE_IMPORT
    )


def activation_multiplier(flags: int) -> int:
    """Rows of ``n_embd`` floats per token: 4 with Gemma3n AltUp, 2 with RWKV7 or Inkling, else 1."""
    if flags & _FOUR_ROWS:
        return 4
    return 2 if flags & _TWO_ROWS else 1


def activation_bytes(
    token_count: int, n_embd: int, flags: int, error: type[ProtocolError] = LocalProtocolError
) -> int:
    """Size of an activation: ``token_count * multiplier(flags) * n_embd * 4``.

    Raises:
        ProtocolError: (of class ``error``, InvalidData) a negative count or width, or 2**64 bytes or more.
    """
    if token_count < 0 or n_embd < 0:
        raise error(
            f"activation of {token_count} tokens x {n_embd} floats: neither may be negative",
            ErrorKind.INVALID_DATA,
        )
    size = token_count * activation_multiplier(flags) * n_embd * 4
    if size > _U64_MAX:
        raise error(f"activation of {size} bytes does not fit 64 bits", ErrorKind.INVALID_DATA)
    return size


def check_activation(payload: Buffer, token_count: int, n_embd: int, flags: int) -> int:
    """Check that ``payload`` has exactly the bytes a reader will take; return that number.

    Raises:
        LocalProtocolError: (InvalidData) negative dimensions, more than 512 MiB, or another length.
    """
    size = activation_bytes(token_count, n_embd, flags)
    if size > MAX_STAGE_DECODED_ACTIVATION_BYTES:
        raise LocalProtocolError(
            f"activation of {size} bytes is over the limit of {MAX_STAGE_DECODED_ACTIVATION_BYTES}",
            ErrorKind.INVALID_DATA,
        )
    actual = buffer_bytes(payload)
    if actual != size:
        raise LocalProtocolError(
            f"activation has {actual} bytes; {token_count} tokens of width {n_embd} take {size}",
            ErrorKind.INVALID_DATA,
        )
    return size


def frame_flags_of(state_flags: int) -> int:
    """In-memory activation frame flags of a state header's flags: 64 -> 1, 128 -> 2, 256 -> 4."""
    return sum(frame for state, frame in _FRAME_FLAGS if state_flags & state)


def state_flags_of(frame_flags: int) -> int:
    """Inverse of :func:`frame_flags_of`; other bits are dropped."""
    return sum(int(state) for state, frame in _FRAME_FLAGS if frame_flags & frame)


def buffer_bytes(data: Buffer) -> int:
    """Bytes in a buffer (``len`` of a memoryview counts items, which may be wider)."""
    return data.nbytes if isinstance(data, memoryview) else len(data)


def execution_tokens(message: Message) -> tuple[int, ...]:
    """The ``token_count`` token ids that a received message asks to execute.

    A one-token decode or replay executes the header's ``current_token``; a sideband, if there is one, must
    end with it (it may carry the whole sequence). Everything else executes its sideband, which must have
    exactly ``token_count`` entries: unlike the original, a mismatch is never filled up or cut.

    Raises:
        RemoteProtocolError: the counts do not agree, or the sideband contradicts ``current_token``.
    """
    count, tokens, current = message.token_count, message.tokens, message.state.current_token
    if count < 0:
        raise RemoteProtocolError(f"{message.kind.name} asks for {count} tokens")
    if count == 1 and current != LLAMA_TOKEN_NULL and message.kind in _ONE_TOKEN_KINDS:
        if len(tokens) > 0 and tokens[-1] != current:
            raise RemoteProtocolError(
                f"{message.kind.name}: current_token is {current} "
                f"but the token sideband ends with {tokens[-1]}"
            )
        return (current,)
    if len(tokens) != count:
        raise RemoteProtocolError(
            f"{message.kind.name}: token_count is {count} but the token sideband has {len(tokens)} entries"
        )
    return tuple(tokens)
