"""Message frames: bytes ↔ :class:`Message`.

Layout, order of checks and limits: ``docs/protocol.md``, sections "Message frame" and "Reader checks".
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final

from .codec_sampling import check_no_surplus, decode_sampling, encode_sampling, sampling_bytes
from .errors import LocalProtocolError, RemoteProtocolError
from .incremental import SMALL_BYTES, Allocate, Decoder, Intake, Step, decode_utf8
from .kinds import (
    HEARTBEAT_MAGIC,
    MAX_STAGE_ACTIVATION_BYTES,
    MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES,
    MAX_STAGE_SIDEBAND_VALUES,
    MAX_STAGE_STATE_IMPORT_BYTES,
    STAGE_STATE_VERSION,
    STAGE_WIRE_FIXED_HEADER_BYTES,
    TRANSPORT_AUTH_MAGIC,
    MessageKind,
    StateFlag,
)
from .messages import Buffer, Message, SamplingConfig, StageState
from .rules import activation_bytes, buffer_bytes, carries_activation, check_activation, state_matches_kind

_HEADER: Final = struct.Struct("<14i2Q")
_I32: Final = struct.Struct("<i")
_U32: Final = struct.Struct("<I")
_SEQ_ID_OFFSET: Final = 24
_STATE_VERSION_END: Final = 56  # the version is judged when the whole state header has been read
_KINDS: Final = {int(kind): kind for kind in MessageKind}
# Plain ints: an operation on an IntFlag costs about a microsecond.
_SAMPLING: Final = int(StateFlag.SAMPLING)
_CHAT_METADATA: Final = int(StateFlag.CHAT_SAMPLING_METADATA)
_HEADER_FIELDS: Final = (
    "kind", "pos_start", "token_count", "token sideband count", "position sideband count", "version",
    "seq_id", "phase", "flags", "checkpoint_generation", "prompt_token_count", "decode_step",
    "current_token", "source_stage_index", "request_id", "session_id",
)  # fmt: skip


class MessageDecoder(Decoder[Message]):
    """Incremental reader of message frames. See :mod:`skippy.protocol.incremental` for the loop around it.

    Args:
        n_embd: width, in f32 values per token, that this stage expects at its input. Part of the framing:
            a wrong value loses sync. 0 where no activation can come.
        max_activation_bytes: our own limit for one activation, at most 512 MiB.
        max_state_import_bytes: our own limit for a StateImport payload, at most 512 MiB.
        allocate: called with the size of an activation, once its size was found allowed and the frame got
            that far; returns a writable C-contiguous memoryview of exactly that many bytes, into which the
            activation is received in place and which becomes ``Message.activation``. What it raises kills the
            decoder. Without it, memory grows with what arrives.
        heartbeats: as in the base class.
    """

    def __init__(
        self,
        n_embd: int,
        *,
        max_activation_bytes: int = MAX_STAGE_ACTIVATION_BYTES,
        max_state_import_bytes: int = MAX_STAGE_STATE_IMPORT_BYTES,
        allocate: Allocate | None = None,
        heartbeats: bool = False,
    ) -> None:
        super().__init__(heartbeats=heartbeats)
        self._n_embd = n_embd
        self._max_activation_bytes = min(max_activation_bytes, MAX_STAGE_ACTIVATION_BYTES)
        self._max_state_import_bytes = min(max_state_import_bytes, MAX_STAGE_STATE_IMPORT_BYTES)
        self._allocate = allocate
        self._last_sampling: tuple[bytes, SamplingConfig] | None = None

    def next_message(self) -> Message | None:
        """The next whole message, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the bytes break a rule, as soon as the field that breaks it is complete. The
                decoder is dead then: every further call raises the same error.
        """
        return self._next()

    def _frames(self) -> Generator[Message | None, None, None]:
        intake = self._intake
        while True:
            while (have := intake.end - intake.start) < STAGE_WIRE_FIXED_HEADER_BYTES:
                if self._heartbeat_ahead(have):
                    yield from self._heartbeat()
                else:
                    self._check_partial_header(have)
                    yield None
            words = _HEADER.unpack_from(intake.buffer, intake.start)
            kind = _KINDS.get(words[0])
            if kind is None:
                if not self._heartbeat_ahead(have):
                    raise _unknown_kind(words[0])
                yield from self._heartbeat()
                continue
            _check_version(words[5])
            intake.start += STAGE_WIRE_FIXED_HEADER_BYTES
            self._between_frames = False
            message = yield from self._body(kind, words)
            self._between_frames = True
            yield message

    def _check_partial_header(self, have: int) -> None:
        intake = self._intake
        if have >= 4 and (word := _I32.unpack_from(intake.buffer, intake.start)[0]) not in _KINDS:
            raise _unknown_kind(word)
        if have >= _STATE_VERSION_END:
            _check_version(_I32.unpack_from(intake.buffer, intake.start + 20)[0])

    def _body(self, kind: MessageKind, words: tuple[int, ...]) -> Step[Message]:
        intake = self._intake
        _, pos_start, token_count, n_tokens, n_positions = words[:5]
        state = StageState(*words[5:14])
        sampling = chat = None
        if state.flags & _SAMPLING:
            sampling = yield from self._sampling()
        if state.flags & _CHAT_METADATA:
            chat = yield from _chat_metadata(intake)
        tokens: Sequence[int] = ()
        positions: Sequence[int] = ()
        activation: Buffer = b""
        raw: Buffer = b""
        if kind is not MessageKind.STOP:
            _check_counts(token_count, n_tokens, n_positions)
            if kind is MessageKind.STATE_IMPORT:
                if token_count > self._max_state_import_bytes:
                    raise RemoteProtocolError(
                        f"state import of {token_count} bytes is over the limit of "
                        f"{self._max_state_import_bytes}"
                    )
                raw = yield from intake.grown(token_count)
            else:
                if n_tokens:
                    tokens = yield from intake.words(n_tokens)
                if n_positions:
                    positions = yield from intake.words(n_positions)
                if carries_activation(kind, state.source_stage_index):
                    activation = yield from self._activation(token_count, state.flags)
        return Message(
            kind, state, pos_start, token_count, words[14], words[15],
            sampling, chat, tokens, positions, activation, raw,
        )  # fmt: skip

    def _sampling(self) -> Step[SamplingConfig]:
        # The block's length follows from its own bytes, so bytes that start with the previous block are that
        # block: true for nearly every decode step, and far cheaper than parsing.
        intake = self._intake
        if self._last_sampling is not None:
            raw, config = self._last_sampling
            if intake.end - intake.start >= len(raw) and intake.buffer.startswith(raw, intake.start):
                intake.start += len(raw)
                return config
        config = yield from decode_sampling(intake)
        self._last_sampling = (encode_sampling(config), config)
        return config

    def _activation(self, token_count: int, flags: int) -> Step[Buffer]:
        size = activation_bytes(token_count, self._n_embd, flags, RemoteProtocolError)
        if size > self._max_activation_bytes:
            raise RemoteProtocolError(
                f"activation of {size} bytes is over the limit of {self._max_activation_bytes}"
            )
        if size == 0:
            return b""
        if self._allocate is None:
            return (yield from self._intake.grown(size))
        view = self._allocate(size)
        if view.nbytes != size or view.readonly or not view.c_contiguous:
            raise LocalProtocolError(f"allocate({size}) gave {view.nbytes} bytes, or not writable ones")
        yield from self._intake.into(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        return view


def _unknown_kind(word: int) -> RemoteProtocolError:
    if word == TRANSPORT_AUTH_MAGIC:
        return RemoteProtocolError("the peer shows a link token, but this side asks for none")
    if word == HEARTBEAT_MAGIC:
        return RemoteProtocolError("a heartbeat, but none were agreed on this connection")
    return RemoteProtocolError(f"unknown message kind {word}")


def _check_version(version: int) -> None:
    if version != STAGE_STATE_VERSION:
        raise RemoteProtocolError(f"state version {version}, but only {STAGE_STATE_VERSION} is understood")


def _check_counts(token_count: int, n_tokens: int, n_positions: int) -> None:
    if token_count < 0 or n_tokens < 0 or n_positions < 0:
        raise RemoteProtocolError(
            f"negative count: token_count {token_count}, {n_tokens} tokens, {n_positions} positions"
        )
    for what, count in (("tokens", n_tokens), ("positions", n_positions)):
        if count > MAX_STAGE_SIDEBAND_VALUES:
            raise RemoteProtocolError(
                f"sideband of {count} {what}; at most {MAX_STAGE_SIDEBAND_VALUES} are allowed"
            )


def _chat_metadata(intake: Intake) -> Step[str]:
    length: int = _U32.unpack_from(intake.buffer, (yield from intake.need(4)))[0]
    if length > MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES:
        raise RemoteProtocolError(
            f"chat sampling metadata of {length} bytes; "
            f"at most {MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES} are allowed"
        )
    take = intake.take if length <= SMALL_BYTES else intake.grown
    return decode_utf8((yield from take(length)), "chat sampling metadata")


def encode_message(message: Message) -> list[Buffer]:
    """Encode one frame: a bytes header, then the caller's own payload buffer, if any, by reference.

    What the format's writer accepts is accepted, even where it destroys framing; our own code sends with
    :func:`encode_frame`. Flag bits SAMPLING and CHAT_SAMPLING_METADATA are set to agree with what is emitted.

    Raises:
        LocalProtocolError: a count over its limit, a StateImport whose ``token_count`` is not its byte count,
            a value that does not fit its field (InvalidInput); a sampling string over 64 bytes (InvalidData).
    """
    for what, values in (("tokens", message.tokens), ("positions", message.positions)):
        if len(values) > MAX_STAGE_SIDEBAND_VALUES:
            raise LocalProtocolError(f"{len(values)} {what}; at most {MAX_STAGE_SIDEBAND_VALUES} can travel")
    parts = [_encode_header(message)]
    if message.sampling is not None:
        parts.append(encode_sampling(message.sampling))
    if message.chat_sampling_metadata is not None:
        parts += _encode_chat_metadata(message.chat_sampling_metadata)
    if message.kind is MessageKind.STATE_IMPORT:
        payload = message.raw_bytes
        size = buffer_bytes(payload)
        if message.token_count != size:
            raise LocalProtocolError(
                f"state import: token_count is {message.token_count} but there are {size} bytes"
            )
        if size > MAX_STAGE_STATE_IMPORT_BYTES:
            raise LocalProtocolError(
                f"state import of {size} bytes is over the limit of {MAX_STAGE_STATE_IMPORT_BYTES}"
            )
    else:
        parts += [_encode_sideband("token", message.tokens), _encode_sideband("position", message.positions)]
        payload = message.activation
        size = buffer_bytes(payload)
    header = b"".join(parts)
    return [header, _as_bytes_view(payload)] if size else [header]


def encode_frame(message: Message, n_embd: int) -> list[Buffer]:
    """:func:`encode_message` for our own code: refuses whatever a reader would refuse or lose sync on.

    Args:
        n_embd: width of the activation we send, which is the receiver's input width.

    Raises:
        LocalProtocolError: additionally, another state version than 14; a header that does not match the
            kind; a negative token_count; an activation where a reader takes none (Stop, StateImport, kinds 15
            to 17, negative source_stage_index), or of another size than ``token_count * multiplier * n_embd *
            4``; a sideband on Stop or StateImport; raw bytes on any other kind; sampling list entries that
            the writer would drop.
    """
    kind, state = message.kind, message.state
    if state.version != STAGE_STATE_VERSION:
        raise LocalProtocolError(f"state version {state.version}; {STAGE_STATE_VERSION} is what we speak")
    if not state_matches_kind(kind, state):
        raise LocalProtocolError(f"phase {state.phase} and flags {state.flags:#x} do not match {kind.name}")
    if message.token_count < 0:
        raise LocalProtocolError(f"token_count {message.token_count} is negative")
    if kind in (MessageKind.STOP, MessageKind.STATE_IMPORT) and (
        len(message.tokens) or len(message.positions)
    ):
        raise LocalProtocolError(f"{kind.name} must not carry tokens or positions: no reader takes them")
    if kind is not MessageKind.STATE_IMPORT and buffer_bytes(message.raw_bytes):
        raise LocalProtocolError(f"{kind.name} must not carry raw bytes: they would not be sent")
    if carries_activation(kind, state.source_stage_index):
        check_activation(message.activation, message.token_count, n_embd, state.flags)
    elif buffer_bytes(message.activation):
        raise LocalProtocolError(
            f"{kind.name} from source stage {state.source_stage_index} must not carry an activation: "
            "no reader takes it"
        )
    if message.sampling is not None:
        check_no_surplus(message.sampling)
    return encode_message(message)


def encode_forwarded(
    message: Message, source_stage_index: int, activation: Buffer, n_embd: int
) -> tuple[bytearray, Buffer]:
    """``encode_frame(message.forwarded(source_stage_index, activation), n_embd)``, without that message.

    A received data message, whose header and counts were checked, is what goes in: this runs once per token
    and stage. The header is a bytearray for :func:`set_seq_id`.

    Raises:
        LocalProtocolError: the activation has another size than ``token_count * multiplier * n_embd * 4``.
    """
    state, sampling, tokens, positions = message.state, message.sampling, message.tokens, message.positions
    check_activation(activation, message.token_count, n_embd, state.flags)
    flags = state.flags & ~(_SAMPLING | _CHAT_METADATA)
    header = bytearray(_HEADER.pack(
        message.kind, message.pos_start, message.token_count, len(tokens), len(positions),
        state.version, state.seq_id, state.phase, flags if sampling is None else flags | _SAMPLING,
        state.checkpoint_generation, state.prompt_token_count, state.decode_step, state.current_token,
        source_stage_index, message.request_id, message.session_id,
    ))  # fmt: skip
    if sampling is not None:
        header += encode_sampling(sampling)
    if tokens or positions:
        header += _encode_sideband("token", tokens) + _encode_sideband("position", positions)
    return header, _as_bytes_view(activation)


def set_seq_id(header: bytearray, seq_id: int) -> None:
    """Give an encoded frame another ``state.seq_id``, in place: the same as to encode it anew with that one.

    For a frame that is encoded before it is known which wave it belongs to.

    Raises:
        LocalProtocolError: it is not an i32.
    """
    try:
        _I32.pack_into(header, _SEQ_ID_OFFSET, seq_id)
    except struct.error:
        raise LocalProtocolError(f"seq_id: {seq_id!r} does not fit its i32") from None


def estimated_wire_bytes(message: Message) -> int:
    """Size of the encoded frame, in bytes; exact for every message that :func:`encode_message` accepts."""
    size = STAGE_WIRE_FIXED_HEADER_BYTES
    if message.sampling is not None:
        size += sampling_bytes(message.sampling)
    if message.chat_sampling_metadata is not None:
        size += 4 + len(message.chat_sampling_metadata.encode(errors="surrogatepass"))
    if message.kind is MessageKind.STATE_IMPORT:
        return size + buffer_bytes(message.raw_bytes)
    return size + 4 * (len(message.tokens) + len(message.positions)) + buffer_bytes(message.activation)


def _encode_header(message: Message) -> bytes:
    state = message.state
    flags = state.flags & ~(_SAMPLING | _CHAT_METADATA)
    if message.sampling is not None:
        flags |= _SAMPLING
    if message.chat_sampling_metadata is not None:
        flags |= _CHAT_METADATA
    words = (
        message.kind, message.pos_start, message.token_count, len(message.tokens), len(message.positions),
        state.version, state.seq_id, state.phase, flags, state.checkpoint_generation,
        state.prompt_token_count, state.decode_step, state.current_token, state.source_stage_index,
        message.request_id, message.session_id,
    )  # fmt: skip
    try:
        return _HEADER.pack(*words)
    except struct.error:
        for i, (name, value) in enumerate(zip(_HEADER_FIELDS, words, strict=True)):
            low, high = (-(1 << 31), 1 << 31) if i < 14 else (0, 1 << 64)
            if not isinstance(value, int) or not low <= value < high:
                raise LocalProtocolError(
                    f"{name}: {value!r} does not fit its {'i32' if i < 14 else 'u64'}"
                ) from None
        raise


def _encode_chat_metadata(text: str) -> list[bytes]:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(
            f"chat sampling metadata cannot be encoded as UTF-8: {error.reason}"
        ) from None
    if len(data) > MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES:
        raise LocalProtocolError(
            f"chat sampling metadata of {len(data)} bytes; "
            f"at most {MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES} can travel"
        )
    return [_U32.pack(len(data)), data]


def _encode_sideband(what: str, values: Sequence[int]) -> bytes:
    if len(values) == 0:
        return b""
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error:
        raise LocalProtocolError(f"a {what} does not fit its i32") from None


def _as_bytes_view(data: Buffer) -> Buffer:
    """The same memory as bytes; a view over wider items would be counted in items by its users."""
    if isinstance(data, memoryview) and (data.format != "B" or data.ndim != 1):
        if not data.c_contiguous:
            raise LocalProtocolError("the payload is not contiguous")
        return data.cast("B")
    return data
