"""Request epochs: which of two frames of one request is the newer one.

Source: ``docs/protocol.md``, section "Epochs and positions".
"""

from __future__ import annotations

from typing import Final

import attrs

from .kinds import LLAMA_TOKEN_NULL, MessageKind, ReplyKind
from .messages import Message, Reply
from .rules import DATA_KINDS, POSITIONED_KINDS, PREDICTED_KINDS

EPOCH_KINDS: Final = DATA_KINDS | {MessageKind.TRY_RESTORE_PREFILL_DECODE}
"""Kinds whose header carries a usable epoch; controls do not."""


@attrs.frozen(slots=True)
class RequestEpoch:
    """Where in its request a frame stands. The first two fields name the flow."""

    request_id: int
    session_id: int
    checkpoint_generation: int
    prompt_token_count: int
    decode_step: int

    @classmethod
    def of(cls, message: Message) -> RequestEpoch:
        state = message.state
        return cls(
            message.request_id,
            message.session_id,
            state.checkpoint_generation,
            state.prompt_token_count,
            state.decode_step,
        )

    def same_flow(self, other: RequestEpoch) -> bool:
        """Whether both belong to one request and session."""
        return self.request_id == other.request_id and self.session_id == other.session_id

    def is_stale_for(self, other: RequestEpoch) -> bool:
        """Whether this epoch is strictly older than ``other``; never true across flows."""
        return self.same_flow(other) and self._order() < other._order()

    def _order(self) -> tuple[int, int, int]:
        return (self.checkpoint_generation, self.prompt_token_count, self.decode_step)


@attrs.frozen(slots=True)
class VerifyWindowRange:
    """The window a VerifyWindow message asks for: its id and the positions ``[base, base + token_count)``."""

    window_id: int
    base_position: int
    token_count: int


def authoritative_position(message: Message) -> int | None:
    """The committed length a session must have before ``message`` runs, or None where it says nothing.

    Only kinds 2, 8, 9 and 21 with a non-negative ``pos_start`` have one.
    """
    return message.pos_start if message.kind in POSITIONED_KINDS and message.pos_start >= 0 else None


def is_skipped(message: Message) -> bool:
    """Whether an earlier stage found ``message`` stale and passed on its header alone."""
    return message.token_count == 0 and message.kind in DATA_KINDS


def stale_reply(message: Message) -> Reply:
    """What the final stage answers to a stale frame: a reply of the kind that is due, with nothing in it.

    No token where one is due, no tokens for a verify window, else an Ack.
    """
    if message.kind is MessageKind.VERIFY_WINDOW:
        return Reply.of_predicted_tokens((), message.state.seq_id)
    if message.kind in PREDICTED_KINDS:
        return Reply(ReplyKind.PREDICTED_TOKEN, LLAMA_TOKEN_NULL)
    return Reply.ack()


def verify_window(message: Message) -> VerifyWindowRange | None:
    """The window of a VerifyWindow message; None for every other kind."""
    if message.kind is not MessageKind.VERIFY_WINDOW:
        return None
    return VerifyWindowRange(message.state.seq_id, message.pos_start, message.token_count)
