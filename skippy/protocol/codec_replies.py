"""Reply frames: bytes ↔ :class:`Reply`.

Layout and order of checks: ``docs/protocol.md``, section "Reply frame".
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import Final

from .errors import LocalProtocolError, RemoteProtocolError
from .incremental import Decoder, Step
from .kinds import (
    HEARTBEAT_MAGIC,
    MAX_STAGE_PREDICTED_TOKENS,
    REPLY_STATS_BYTES,
    REPLY_STATS_FIELDS,
    ReplyKind,
)
from .messages import EMPTY_STATS, NativeMtpDraft, Reply, ReplyStats
from .stats import clamped, stats_fields

_I32: Final = struct.Struct("<i")
_HEAD: Final = struct.Struct("<3i")
_PAIR: Final = struct.Struct("<2i")
_I64: Final = struct.Struct("<q")
_STATS: Final = struct.Struct(f"<{REPLY_STATS_FIELDS}q")
_NO_STATS: Final = bytes(REPLY_STATS_BYTES)
_KINDS: Final = {int(kind): kind for kind in ReplyKind}


class ReplyDecoder(Decoder[Reply]):
    """Incremental reader of reply frames. See :mod:`skippy.protocol.incremental` for the loop around it.

    Args:
        max_tokens: our own limit for predicted tokens, and separately draft tokens; at most 262144.
        heartbeats: as in the base class.
    """

    def __init__(self, *, max_tokens: int = MAX_STAGE_PREDICTED_TOKENS, heartbeats: bool = False) -> None:
        super().__init__(heartbeats=heartbeats)
        self._max_tokens = min(max_tokens, MAX_STAGE_PREDICTED_TOKENS)

    @property
    def ended(self) -> bool:
        """A frame said that nothing follows it; in generation 8 none does."""
        return False

    def next_reply(self) -> Reply | None:
        """The next whole reply, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the bytes break a rule, as soon as the field that breaks it is complete. The
                decoder is dead then: every further call raises the same error.
        """
        return self._next()

    def _frames(self) -> Generator[Reply | None, None, None]:
        while True:
            reply = yield from self._reply()
            self._between_frames = True
            yield reply

    def _reply(self) -> Step[Reply]:
        intake = self._intake
        while True:
            have = intake.end - intake.start
            if have < _HEAD.size:
                if have < 4 or (word := _I32.unpack_from(intake.buffer, intake.start)[0]) in _KINDS:
                    yield None
                    continue
            else:
                word, predicted, count = _HEAD.unpack_from(intake.buffer, intake.start)
                kind = _KINDS.get(word)
                if kind is not None:
                    break
            if not self._heartbeat_ahead(have):
                raise _unknown_kind(word)
            yield from self._heartbeat()
        intake.start += _HEAD.size
        self._between_frames = False
        return (yield from self._body(kind, predicted, count))

    def _body(self, kind: ReplyKind, predicted: int, count: int) -> Step[Reply]:
        intake = self._intake
        tokens = yield from self._tokens("predicted", count)
        window_id, marker = _PAIR.unpack_from(intake.buffer, (yield from intake.need(8)))
        if marker not in (0, 1):
            raise RemoteProtocolError(f"draft marker {marker}; only 0 and 1 have a meaning")
        draft = None
        if marker:
            (count,) = _I32.unpack_from(intake.buffer, (yield from intake.need(4)))
            draft_tokens = yield from self._tokens("draft", count)
            (compute_us,) = _I64.unpack_from(intake.buffer, (yield from intake.need(8)))
            draft = NativeMtpDraft(draft_tokens, compute_us)
        offset = yield from intake.need(REPLY_STATS_BYTES)
        stats = EMPTY_STATS
        if not intake.buffer.startswith(_NO_STATS, offset):
            stats = ReplyStats(*_STATS.unpack_from(intake.buffer, offset))
        return Reply(kind, predicted, tokens, window_id, draft, stats)

    def _tokens(self, what: str, count: int) -> Step[tuple[int, ...]]:
        if count < 0:
            raise RemoteProtocolError(f"{count} {what} tokens")
        if count > self._max_tokens:
            raise RemoteProtocolError(f"{count} {what} tokens; at most {self._max_tokens} are allowed")
        return (yield from self._intake.words(count)) if count else ()


def _unknown_kind(word: int) -> RemoteProtocolError:
    if word == HEARTBEAT_MAGIC:
        return RemoteProtocolError("a heartbeat where none may come, or none were agreed on this connection")
    return RemoteProtocolError(f"unknown reply kind {word}")


def encode_reply(reply: Reply) -> bytes:
    """Encode one reply. Statistics outside i64 are clamped: a sum that grew too large breaks no frame.

    Raises:
        LocalProtocolError: (InvalidInput) more than 262144 predicted or draft tokens, or a value that does
            not fit its field.
    """
    draft = reply.native_mtp_draft
    if len(reply.predicted_tokens) > MAX_STAGE_PREDICTED_TOKENS:
        raise LocalProtocolError(
            f"{len(reply.predicted_tokens)} predicted tokens; at most {MAX_STAGE_PREDICTED_TOKENS} can travel"
        )
    if draft is not None and len(draft.tokens) > MAX_STAGE_PREDICTED_TOKENS:
        raise LocalProtocolError(
            f"{len(draft.tokens)} draft tokens; at most {MAX_STAGE_PREDICTED_TOKENS} can travel"
        )
    count = len(reply.predicted_tokens)
    words = (reply.kind, reply.predicted, count, *reply.predicted_tokens, reply.window_id, draft is not None)
    try:
        head = struct.pack(f"<{len(words)}i", *words)
        if draft is not None:
            head += struct.pack(f"<i{len(draft.tokens)}i", len(draft.tokens), *draft.tokens)
            head += _I64.pack(draft.proposal_compute_us)
    except struct.error as error:
        raise LocalProtocolError(f"{reply.kind.name}: a value does not fit its field: {error}") from None
    if reply.stats is EMPTY_STATS:
        return head + _NO_STATS
    return head + _STATS.pack(*stats_fields(clamped(reply.stats)))
