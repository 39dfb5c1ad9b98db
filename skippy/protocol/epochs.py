"""Request epochs: which of two frames of one request is the newer one.

Source: ``docs/protocol.md``, section "Epochs and positions".
"""

from __future__ import annotations

from typing import Final

import attrs

from .kinds import MessageKind
from .messages import Message
from .rules import DATA_KINDS, POSITIONED_KINDS

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


def verify_window(message: Message) -> VerifyWindowRange | None:
    """The window of a VerifyWindow message; None for every other kind."""
    if message.kind is not MessageKind.VERIFY_WINDOW:
        return None
    return VerifyWindowRange(message.state.seq_id, message.pos_start, message.token_count)
