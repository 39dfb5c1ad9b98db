"""What a stage takes from upstream: what a frame must be before anything is done for it."""

from __future__ import annotations

from typing import Final

from skippy.protocol import POSITIONED_KINDS, Message, MessageKind, RemoteProtocolError, Wave, unpack_wave

ONE_TOKEN: Final = POSITIONED_KINDS - {MessageKind.VERIFY_WINDOW}
"""Frames of one token that are answered with the next one."""

MAX_WINDOW_TOKENS: Final = 64
"""Each token of a verify window takes a row of logits, and engines keep that memory: up to 1 MB a row."""


def check_data(message: Message, stage_index: int, max_batch: int) -> None:
    """Refuse a data frame of another stage's neighbour, and one that the engine cannot take as it is.

    An activation that skipped a stage has the right size and would give wrong tokens without an error, so
    its source counts. The rows are checked before a buffer for their output is taken.

    Raises:
        RemoteProtocolError: says what came and what would be right.
    """
    check_source(message, stage_index)
    if message.token_count > max_batch:
        raise RemoteProtocolError(
            f"{message.kind.name} has {message.token_count} tokens; stage {stage_index} takes at most "
            f"{max_batch} at once (n_batch)"
        )
    if message.token_count > MAX_WINDOW_TOKENS and message.kind is MessageKind.VERIFY_WINDOW:
        raise RemoteProtocolError(
            f"{message.kind.name} has {message.token_count} tokens; at most {MAX_WINDOW_TOKENS} are verified "
            "at once"
        )
    if len(message.positions):
        raise RemoteProtocolError(
            f"{message.kind.name} brings {len(message.positions)} positions of its own; rows are placed one "
            "after the other from pos_start on"
        )
    if message.token_count == 0:
        check_skipped(message)


def wave_of(message: Message) -> Wave | None:
    """The decode wave of a frame from a peer that agreed to waves; None for one that runs on its own.

    Raises:
        RemoteProtocolError: a one-token frame whose word names no wave.
    """
    if message.kind not in ONE_TOKEN or message.token_count == 0:
        return None
    return unpack_wave(message.state.seq_id)


def check_source(message: Message, stage_index: int) -> None:
    """RemoteProtocolError for a frame that does not come from the stage before, or from a driver."""
    source = message.state.source_stage_index
    if max(source, -1) != stage_index - 1:
        sender = f"stage {source}" if source >= 0 else "a driver, without an activation"
        wanted = f"stage {stage_index - 1}" if stage_index else "a driver"
        raise RemoteProtocolError(
            f"{message.kind.name} comes from {sender}; stage {stage_index} takes frames of {wanted}"
        )


def check_skipped(message: Message) -> None:
    """RemoteProtocolError for a frame without rows that brings tokens all the same."""
    if len(message.tokens):
        raise RemoteProtocolError(
            f"{message.kind.name}: token_count is 0 but the token sideband has {len(message.tokens)} entries"
        )


def check_restore(message: Message, stage_index: int) -> None:
    """Refuse a question about a prefix whose counts disagree.

    The sideband is the prefix; that of TryRestorePrefillDecode also has the token to decode, the one that
    ``token_count`` counts.

    Raises:
        RemoteProtocolError: says what came and what would be right.
    """
    count, tokens = message.token_count, len(message.tokens)
    if message.kind is not MessageKind.TRY_RESTORE_PREFILL_DECODE:
        if count != tokens:
            raise RemoteProtocolError(
                f"{message.kind.name}: token_count is {count} but the token sideband has {tokens} entries"
            )
        return
    check_source(message, stage_index)
    if count == 0:
        check_skipped(message)
    elif count != 1 or tokens < 2:
        raise RemoteProtocolError(
            f"{message.kind.name}: token_count is {count} and the token sideband has {tokens} entries; it "
            "decodes 1 token, the last of at least 2"
        )


def sequence_of(settings: Message) -> int | None:
    """The native sequence of the stage before, from the ConfigureGeneration of a peer that agreed to waves.

    A wish: who computes the rows of a wave in the same order of sequences on every stage, computes them side
    by side on every stage.
    """
    return settings.state.seq_id - 1 if settings.state.seq_id > 0 else None
