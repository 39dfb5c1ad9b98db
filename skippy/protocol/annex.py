"""The reply annex: what a generation-8 reply has no room for, in a frame of its own in front of it.

An extension: it travels only where both sides agreed to :data:`ANNEX_EXTENSION` at admission, never to a
plain peer. It carries log-probabilities, what a grammar says about the end, the reason of a failed request,
and what stages tell of themselves. Sans-IO. Source: ``docs/protocol.md``, section "Reply annex".
"""

from __future__ import annotations

import enum
import math
import struct
from collections import deque
from collections.abc import Generator
from typing import Final

import attrs

from .codec_replies import ReplyDecoder, encode_reply
from .errors import LocalProtocolError, RemoteProtocolError
from .incremental import Step, decode_utf8
from .kinds import (
    ANNEX_MAGIC,
    ANNEX_VERSION,
    HEARTBEAT_MAGIC,
    MAX_ANNEX_BYTES,
    MAX_ANNEX_POSITIONS,
    MAX_ANNEX_REASON_BYTES,
    MAX_ANNEX_REPORT_BYTES,
    MAX_ANNEX_TOP_TOKENS,
)
from .messages import Reply

ANNEX_EXTENSION: Final = "skippy.reply-annex.v1"
"""The name under which it is agreed."""

_I32: Final = struct.Struct("<i")
_U32: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<3I")
_PAIR: Final = struct.Struct("<if")
_POSITION: Final = struct.Struct("<ifI")
_FAILURE: Final = struct.Struct("<QII")


class AnnexFlag(enum.IntFlag):
    """Which parts a body has, in this order; other bits are refused."""

    LOG_PROBABILITIES = 1
    FINISH_HINT = 2
    FAILURE = 4
    REPORT = 8


class FinishHint(enum.IntEnum):
    """What the request's grammar says after this reply's tokens."""

    MAY_END = 1
    """The text so far is complete; it may go on."""
    MUST_END = 2
    """The text is complete and nothing may follow."""


class FailureCode(enum.IntEnum):
    """Whose fault it is that a request, or its lane, has failed."""

    FAILED = 1
    """The stage's or the engine's."""
    SETTINGS_REFUSED = 2
    """The client's: a sampling setting that the engine does not accept."""
    LANE_LOST = 3
    """A link's, or that of the stage behind it: nothing is wrong with the request."""


@attrs.frozen(slots=True)
class TokenLogProbability:
    """A token id and its natural log-probability, an f32."""

    token: int
    log_probability: float


@attrs.frozen(slots=True)
class PositionLogProbabilities:
    """One predicted token: the chosen one, and the most likely ones, likeliest first."""

    chosen: TokenLogProbability
    top: tuple[TokenLogProbability, ...] = ()


@attrs.frozen(slots=True)
class RequestFailure:
    """Why a request failed. It is the last frame on its connection."""

    request_id: int
    code: FailureCode
    reason: str


@attrs.frozen(slots=True, kw_only=True)
class ReplyAnnex:
    """Beside a reply: log-probabilities of each predicted token and a finish hint, or a report.

    Or, before no reply, a failure.
    """

    log_probabilities: tuple[PositionLogProbabilities, ...] = ()
    finish_hint: FinishHint | None = None
    failure: RequestFailure | None = None
    report: str | None = None


def encode_annex(annex: ReplyAnnex) -> bytes:
    """One annex frame. A reason longer than 4096 bytes is cut at a character.

    Raises:
        LocalProtocolError: (InvalidInput) nothing in it, a failure beside something else, over a limit, or a
            value that does not fit its field.
    """
    flags, body = AnnexFlag(0), b""
    try:
        if annex.log_probabilities:
            flags |= AnnexFlag.LOG_PROBABILITIES
            body += _encode_positions(annex.log_probabilities)
        if annex.finish_hint is not None:
            flags |= AnnexFlag.FINISH_HINT
            body += _U32.pack(annex.finish_hint)
        if annex.failure is not None:
            if flags:
                raise LocalProtocolError("an annex with a failure carries nothing else")
            flags |= AnnexFlag.FAILURE
            body += _encode_failure(annex.failure)
        if annex.report is not None:
            if flags:
                raise LocalProtocolError("an annex with a report carries nothing else")
            flags |= AnnexFlag.REPORT
            body += _encode_report(annex.report)
    except (struct.error, OverflowError) as error:
        raise LocalProtocolError(f"annex: a value does not fit its field: {error}") from None
    if not flags:
        raise LocalProtocolError("an annex needs at least one part")
    body = _U32.pack(flags) + body
    # The limits of the parts keep it far below MAX_ANNEX_BYTES.
    return _HEAD.pack(ANNEX_MAGIC, ANNEX_VERSION, len(body)) + body


def encode_annexed_reply(reply: Reply, annex: ReplyAnnex) -> bytes:
    """An annex and the reply it belongs to, in the order they travel.

    Raises:
        LocalProtocolError: as :func:`encode_annex` and :func:`~skippy.protocol.encode_reply`, or the two do
            not fit each other.
    """
    fault = _misfit(annex, reply)
    if fault is not None:
        raise LocalProtocolError(fault)
    return encode_annex(annex) + encode_reply(reply)


def _misfit(annex: ReplyAnnex, reply: Reply) -> str | None:
    if annex.failure is not None:
        return "an annex with a failure stands alone, before no reply"
    count = len(annex.log_probabilities)
    if count not in (0, len(reply.predicted_tokens)):
        return f"log-probabilities of {count} tokens beside a reply with {len(reply.predicted_tokens)}"
    return None


def _encode_positions(positions: tuple[PositionLogProbabilities, ...]) -> bytes:
    if len(positions) > MAX_ANNEX_POSITIONS:
        raise LocalProtocolError(
            f"log-probabilities of {len(positions)} tokens; at most {MAX_ANNEX_POSITIONS} can travel"
        )
    parts = [_U32.pack(len(positions))]
    for position in positions:
        if len(position.top) > MAX_ANNEX_TOP_TOKENS:
            raise LocalProtocolError(
                f"{len(position.top)} likeliest tokens; at most {MAX_ANNEX_TOP_TOKENS} can travel"
            )
        for entry in (position.chosen, *position.top):
            if _bad(entry.log_probability):
                raise LocalProtocolError(f"{entry.log_probability} is not a log-probability")
        parts.append(
            _POSITION.pack(position.chosen.token, position.chosen.log_probability, len(position.top))
        )
        parts += [_PAIR.pack(entry.token, entry.log_probability) for entry in position.top]
    return b"".join(parts)


def _bad(log_probability: float) -> bool:
    """NaN and positive infinity; a value slightly above 0 is rounding."""
    return math.isnan(log_probability) or log_probability == math.inf


def _encode_failure(failure: RequestFailure) -> bytes:
    # Cut inside a character, the rest of it is dropped; a lone surrogate becomes a question mark.
    text = failure.reason.encode(errors="replace")[:MAX_ANNEX_REASON_BYTES]
    text = text.decode(errors="ignore").encode()
    return _FAILURE.pack(failure.request_id, failure.code, len(text)) + text


def _encode_report(report: str) -> bytes:
    text = report.encode()
    if len(text) > MAX_ANNEX_REPORT_BYTES:
        raise LocalProtocolError(
            f"a report of {len(text)} bytes; at most {MAX_ANNEX_REPORT_BYTES} can travel"
        )
    return _U32.pack(len(text)) + text


class _Body:
    """Takes fields from the front of a body that has arrived whole."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def take(self, count: int) -> bytes:
        end = self._offset + count
        if end > len(self._data):
            raise RemoteProtocolError(f"an annex ends inside a field, at byte {len(self._data)}")
        piece, self._offset = self._data[self._offset : end], end
        return piece

    def end(self) -> None:
        if self._offset != len(self._data):
            raise RemoteProtocolError(f"{len(self._data) - self._offset} bytes too many in an annex")


def decode_annex(data: bytes) -> ReplyAnnex:
    """The body of an annex frame, behind its head of 12 bytes. RemoteProtocolError says what is wrong."""
    body = _Body(data)
    (flags,) = body.unpack(_U32)
    if not flags or flags & ~sum(AnnexFlag):
        raise RemoteProtocolError(f"annex flags {flags:#x}; 1, 2, 4 and 8 have a meaning")
    for alone in (AnnexFlag.FAILURE, AnnexFlag.REPORT):
        if flags & alone and flags != alone:
            raise RemoteProtocolError(f"an annex with a {str(alone.name).lower()} carries something else")
    positions: tuple[PositionLogProbabilities, ...] = ()
    hint = failure = report = None
    if flags & AnnexFlag.LOG_PROBABILITIES:
        positions = _decode_positions(body)
    if flags & AnnexFlag.FINISH_HINT:
        (word,) = body.unpack(_U32)
        if word not in FinishHint.__members__.values():
            raise RemoteProtocolError(f"unknown finish hint {word}")
        hint = FinishHint(word)
    if flags & AnnexFlag.FAILURE:
        failure = _decode_failure(body)
    if flags & AnnexFlag.REPORT:
        report = _decode_report(body)
    body.end()
    return ReplyAnnex(log_probabilities=positions, finish_hint=hint, failure=failure, report=report)


def _decode_positions(body: _Body) -> tuple[PositionLogProbabilities, ...]:
    (count,) = body.unpack(_U32)
    if not 1 <= count <= MAX_ANNEX_POSITIONS:
        raise RemoteProtocolError(
            f"log-probabilities of {count} tokens; 1 to {MAX_ANNEX_POSITIONS} are allowed"
        )
    positions = []
    for _ in range(count):
        token, value, top_count = body.unpack(_POSITION)
        if top_count > MAX_ANNEX_TOP_TOKENS:
            raise RemoteProtocolError(
                f"{top_count} likeliest tokens; at most {MAX_ANNEX_TOP_TOKENS} are allowed"
            )
        chosen = _entry(token, value)
        positions.append(
            PositionLogProbabilities(chosen, tuple(_entry(*body.unpack(_PAIR)) for _ in range(top_count)))
        )
    return tuple(positions)


def _entry(token: int, log_probability: float) -> TokenLogProbability:
    if _bad(log_probability):
        raise RemoteProtocolError(f"{log_probability} is not a log-probability")
    return TokenLogProbability(token, log_probability)


def _decode_failure(body: _Body) -> RequestFailure:
    request_id, code, size = body.unpack(_FAILURE)
    if code not in FailureCode.__members__.values():
        raise RemoteProtocolError(f"unknown failure code {code}")
    if size > MAX_ANNEX_REASON_BYTES:
        raise RemoteProtocolError(f"a reason of {size} bytes; at most {MAX_ANNEX_REASON_BYTES} are allowed")
    return RequestFailure(request_id, FailureCode(code), decode_utf8(body.take(size), "the reason"))


def _decode_report(body: _Body) -> str:
    (size,) = body.unpack(_U32)
    if size > MAX_ANNEX_REPORT_BYTES:
        raise RemoteProtocolError(f"a report of {size} bytes; at most {MAX_ANNEX_REPORT_BYTES} are allowed")
    return decode_utf8(body.take(size), "the report")


class AnnexedReplyDecoder(ReplyDecoder):
    """A :class:`~skippy.protocol.ReplyDecoder` for a connection on which the annex was agreed.

    Attributes:
        annex: what came with the reply that ``next_reply`` returned last; None when nothing did.
        failure: why the request failed; nothing comes after it but the end of the stream.
    """

    def __init__(self, *, heartbeats: bool = False) -> None:
        super().__init__(heartbeats=heartbeats)
        self.annex: ReplyAnnex | None = None
        self.failure: RequestFailure | None = None
        self._annexes: deque[ReplyAnnex | None] = deque()

    @property
    def ended(self) -> bool:
        """The reason of a failed request has come."""
        return self.failure is not None

    def next_reply(self) -> Reply | None:
        """As in the base class; an annex that does not fit its reply is a RemoteProtocolError too."""
        reply = super().next_reply()
        if reply is not None:
            self.annex = self._annexes.popleft()
        return reply

    def _frames(self) -> Generator[Reply | None, None, None]:
        intake = self._intake
        while True:
            while intake.end - intake.start < _I32.size:
                yield None
            annex = None
            (word,) = _U32.unpack_from(intake.buffer, intake.start)
            if word == HEARTBEAT_MAGIC and self._heartbeats:
                yield from self._heartbeat()
                continue
            if word == ANNEX_MAGIC:
                self._between_frames = False
                annex = yield from self._annex()
                if annex.failure is not None:
                    yield from self._end_with(annex.failure)
            reply = yield from self._reply()
            fault = None if annex is None else _misfit(annex, reply)
            if fault is not None:
                raise RemoteProtocolError(fault)
            self._between_frames = True
            self._annexes.append(annex)
            yield reply

    def _annex(self) -> Step[ReplyAnnex]:
        intake = self._intake
        yield from intake.need(_U32.size)
        (version,) = _U32.unpack_from(intake.buffer, (yield from intake.need(_U32.size)))
        if version != ANNEX_VERSION:
            raise RemoteProtocolError(f"annex version {version}; this side speaks {ANNEX_VERSION}")
        (length,) = _U32.unpack_from(intake.buffer, (yield from intake.need(_U32.size)))
        if length > MAX_ANNEX_BYTES:
            raise RemoteProtocolError(f"an annex of {length} bytes; at most {MAX_ANNEX_BYTES} are allowed")
        return decode_annex(bytes((yield from intake.grown(length))))

    def _end_with(self, failure: RequestFailure) -> Step[None]:
        self.failure = failure
        self._between_frames = True
        yield from self._intake.need(1)
        raise RemoteProtocolError("data behind the reason of a failed request")
