"""What a stage takes from upstream: kinds it carries out, and what a data frame must be before it runs."""

from __future__ import annotations

from typing import Final

from skippy.protocol import Message, MessageKind, RemoteProtocolError

DATA: Final = frozenset(
    {
        MessageKind.PREFILL_EMBD,
        MessageKind.PREFILL_FINAL_EMBD,
        MessageKind.DECODE_EMBD,
        MessageKind.DECODE_READOUT,
        MessageKind.DECODE_REPLAY_EMBD,
        MessageKind.DECODE_REPLAY_FINAL_EMBD,
    }
)
RESTORES: Final = frozenset(
    {
        MessageKind.PROBE_PREFILL,
        MessageKind.RESTORE_PREFILL,
        MessageKind.TRY_RESTORE_PREFILL,
    }
)


def check_data(message: Message, stage_index: int, max_batch: int) -> None:
    """Refuse a data frame of another stage's neighbour, and one with more rows than an engine call takes.

    An activation that skipped a stage has the right size and would give wrong tokens without an error, so
    its source counts. The rows are checked before a buffer for their output is taken.

    Raises:
        RemoteProtocolError: says what came and what would be right.
    """
    source = message.state.source_stage_index
    if max(source, -1) != stage_index - 1:
        sender = f"stage {source}" if source >= 0 else "a driver, without an activation"
        wanted = f"stage {stage_index - 1}" if stage_index else "a driver"
        raise RemoteProtocolError(
            f"{message.kind.name} comes from {sender}; stage {stage_index} takes frames of {wanted}"
        )
    if message.token_count > max_batch:
        raise RemoteProtocolError(
            f"{message.kind.name} has {message.token_count} tokens; stage {stage_index} takes at most "
            f"{max_batch} at once (n_batch)"
        )
