"""Questions about a cached prefix, and how the stages of a chain settle on the length that all of them have.

An extension: where both sides of a lane agreed to :data:`RESTORE_EXTENSION` at admission, a TryRestorePrefill
or a ProbePrefill may be answered with less than was asked for, and the ``predicted`` word of the Ack has the
length. To and from a peer that did not agree, it is all of the prefix or nothing. Sans-IO. Source:
``docs/protocol.md``, section "Cached prefixes".

On such a lane the state flag COMPUTED_TOGETHER of prefill and replay frames says that rows of the request, so
far, shared an engine call with rows of others, so that computing them again may give other bits.
"""

from __future__ import annotations

from typing import Final

import attrs

from .errors import RemoteProtocolError
from .kinds import LLAMA_TOKEN_NULL, MessageKind, StateFlag
from .messages import Message, Reply, ReplyStats
from .rules import default_state

RESTORE_EXTENSION: Final = "skippy.prefix-restore.v1"
"""The name under which it is agreed."""
_TOGETHER: Final = int(StateFlag.COMPUTED_TOGETHER)


def ask_for(message: Message, length: int, kind: MessageKind) -> Message:
    """The question of a stage that has ``length`` of the tokens asked for, to the next one."""
    tokens = message.tokens[:length]
    state = attrs.evolve(
        message.state,
        phase=default_state(kind).phase,
        prompt_token_count=length,
        current_token=tokens[-1] if length else LLAMA_TOKEN_NULL,
    )
    return attrs.evolve(message, kind=kind, state=state, token_count=length, tokens=tokens)


def is_hit(stats: ReplyStats) -> bool:
    """Whether an answer's statistics say that every stage asked had the prefix."""
    return stats.kv_lookup_hits > 0 and not stats.kv_lookup_misses and not stats.kv_lookup_errors


def settled_length(reply: Reply, asked: int, *, negotiated: bool) -> int:
    """How much of a prefix of ``asked`` tokens the answering stage and all behind it have; 0 for a miss.

    Raises:
        RemoteProtocolError: the answer claims a length that was not asked for.
    """
    if not is_hit(reply.stats):
        return 0
    if not negotiated:
        return asked
    if not 1 <= reply.predicted <= asked:
        raise RemoteProtocolError(
            f"Ack of a restore settles on {reply.predicted} tokens; 1 to {asked} were asked for"
        )
    return reply.predicted


def mark_together(message: Message) -> Message:
    """A data message whose rows, or those before it, were not computed alone; or a Stop behind such rows."""
    flags = message.state.flags | StateFlag.COMPUTED_TOGETHER
    return attrs.evolve(message, state=attrs.evolve(message.state, flags=int(flags)))


def is_together(message: Message) -> bool:
    """Whether the stage before says so."""
    return bool(message.state.flags & _TOGETHER)
