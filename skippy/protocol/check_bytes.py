"""The byte sections of a vector file: valid, malformed, writer errors, streams, truncation sweeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from . import rules, stats
from .codec import MessageDecoder, ReplyDecoder, encode_message, encode_reply, estimated_wire_bytes
from .epochs import RequestEpoch, authoritative_position, verify_window
from .errors import ErrorKind, ProtocolError
from .handshake import READY_WORD, DialerHandshake, ListenerHandshake, encode_transport_auth
from .messages import Message, NativeMtpDraft, Reply
from .vectors import FormError, Json, canonical_message, hex_bytes, length_of, message_of, reply_of

FrameDecoder = MessageDecoder | ReplyDecoder
_ERROR_KINDS: Final = {kind.value: kind for kind in ErrorKind}


def new_decoder(what: str, n_embd: int | None) -> FrameDecoder:
    if what == "reply":
        return ReplyDecoder()
    if what != "message":
        raise FormError(f"unknown type {what!r}")
    if n_embd is None:
        raise FormError("n_embd is missing")
    return MessageDecoder(n_embd)


def next_frame(decoder: FrameDecoder) -> Message | Reply | None:
    return decoder.next_message() if isinstance(decoder, MessageDecoder) else decoder.next_reply()


def encoded(frame: Message | Reply) -> bytes:
    return b"".join(encode_message(frame)) if isinstance(frame, Message) else encode_reply(frame)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def decode_one(decoder: FrameDecoder, data: bytes, piece: int) -> tuple[Message | Reply | None, int]:
    """Feed ``data`` in pieces until a frame is out; returns it and how many bytes it took."""
    fed = 0
    for part in _pieces(data, piece):
        decoder.receive_data(part)
        fed += len(part)
        frame = next_frame(decoder)
        if frame is not None:
            return frame, fed - len(decoder.take_trailing_data())
    return None, fed


def _error_kind(vector: Json) -> ErrorKind:
    try:
        return _ERROR_KINDS[vector["error_kind"]]
    except KeyError:
        raise FormError(f"unknown error_kind {vector.get('error_kind')!r}") from None


# --- valid


def check_valid(vector: Json) -> str | None:
    what, data = vector["type"], hex_bytes(vector["hex"])
    if what == "ready":
        dialer, listener = DialerHandshake(None), ListenerHandshake(None)
        if data != READY_WORD or listener.data_to_send() != data:
            return f"the ready word is {READY_WORD.hex()}"
        return None if dialer.receive_data(data) and dialer.trailing_data == b"" else "not accepted"
    if what == "transport_auth":
        token = hex_bytes(vector["token_hex"])
        if encode_transport_auth(token) != data:
            return "the preamble is encoded differently"
        return None if ListenerHandshake(token).receive_data(data) else "not accepted"
    for piece in (max(len(data), 1), 1):
        frame, consumed = decode_one(new_decoder(what, vector.get("n_embd")), data, piece)
        if frame is None:
            return f"after {consumed} bytes there is no frame"
        if consumed != vector["consumed"]:
            return f"took {consumed} bytes instead of {vector['consumed']}"
        problem = _check_message(vector, frame) if isinstance(frame, Message) else _check_reply(vector, frame)
        if problem is not None:
            return problem
    if data[consumed:] != hex_bytes(vector.get("unread_hex", "")):
        return "the bytes behind the frame differ"
    return None


def _check_message(vector: Json, message: Message) -> str | None:
    expected = message_of(vector["message"])
    ours, theirs = canonical_message(message), canonical_message(expected)
    for name in theirs:
        if ours[name] != theirs[name]:
            return f"{name}: expected {theirs[name]!r}, decoded {ours[name]!r}"
    return _check_message_encoding(vector, message, expected) or _check_derived(
        vector.get("derived", {}), message
    )


def _check_message_encoding(vector: Json, *decoded: Message) -> str | None:
    data = hex_bytes(vector["hex"])
    if vector["encode"] == "encode_from":
        source = message_of(vector["encode_from"])
        if encoded(source) != data:
            return "encode_from is encoded differently"
        if estimated_wire_bytes(source) != len(data):
            return f"estimated_wire_bytes of encode_from: {estimated_wire_bytes(source)}, not {len(data)}"
    elif vector["encode"] not in ("message", "decode_only"):
        raise FormError(f"unknown encode {vector['encode']!r}")
    for message in decoded:
        try:
            again = encoded(message)
        except ProtocolError as error:
            if "reencode_error" in vector:
                continue
            return f"cannot be encoded again: {error}"
        if "reencode_error" in vector:
            return "was encoded again without the expected error"
        if again != hex_bytes(vector["reencoded_hex"] if "reencoded_hex" in vector else vector["hex"]):
            return "is encoded again differently"
    return None


def _check_derived(expected: Json, message: Message) -> str | None:
    state, window = message.state, verify_window(message)
    facts: Json = {
        "estimated_wire_bytes": estimated_wire_bytes(message),
        "authoritative_session_position": authoritative_position(message),
        "request_epoch": attrs.asdict(RequestEpoch.of(message)),
        "state_matches_kind": rules.state_matches_kind(message.kind, state),
        "requires_predicted_reply": rules.requires_predicted_reply(message.kind),
        "activation_multiplier": rules.activation_multiplier(state.flags),
        "activation_frame_flags": rules.frame_flags_of(state.flags),
        "verify_window": None if window is None else attrs.asdict(window),
    }
    for name, value in expected.items():
        if name not in facts:
            raise FormError(f"unknown derived value {name}")
        if facts[name] != value:
            return f"{name}: expected {value!r}, got {facts[name]!r}"
    return None


def _check_reply(vector: Json, reply: Reply) -> str | None:
    expected = reply_of(vector["reply"])
    if reply != expected:
        return f"expected {expected!r}, decoded {reply!r}"
    if encode_reply(reply) != hex_bytes(vector["hex"]):
        return "is encoded again differently"
    wanted = vector["reply"].get("stats_is_empty")
    return None if wanted is None or stats.is_empty(reply.stats) == wanted else "stats_is_empty differs"


# --- malformed and truncated


def check_malformed(vector: Json) -> str | None:
    what, kind = vector["type"], _error_kind(vector)
    if what in ("ready", "transport_auth"):
        return _check_malformed_handshake(vector, kind)
    return expect_decode_error(
        what, vector["hex"], kind, vector.get("bytes_read_before_error"), n_embd=vector.get("n_embd")
    )


def expect_decode_error(
    what: str, text: str, kind: ErrorKind, failing_byte: int | None, *, n_embd: int | None
) -> str | None:
    """Decode all at once and byte by byte; both must fail with ``kind``, byte by byte at ``failing_byte``.

    An empty stream is a clean end here: only the layer above knows whether a frame was due.
    """
    data = hex_bytes(text)
    for piece in (max(len(data), 1), 1):
        decoder = new_decoder(what, n_embd)
        fed = 0
        try:
            for part in _pieces(data, piece):
                decoder.receive_data(part)
                fed += len(part)
                if next_frame(decoder) is not None:
                    return "was accepted"
            decoder.receive_eof()
        except ProtocolError as error:
            if error.kind is not kind:
                return f"expected {kind.value}, got {error.kind.value}: {error}"
            if piece == 1 and failing_byte is not None and fed != failing_byte:
                return f"failed after {fed} bytes instead of {failing_byte}: {error}"
        else:
            if data or kind is not ErrorKind.UNEXPECTED_EOF:
                return "was accepted"
    return None


def _check_malformed_handshake(vector: Json, kind: ErrorKind) -> str | None:
    data = hex_bytes(vector["hex"])
    for piece in (max(len(data), 1), 1):
        side: DialerHandshake | ListenerHandshake
        if vector["type"] == "ready":
            side = DialerHandshake(None)
        else:
            side = ListenerHandshake(hex_bytes(vector["expected_token_hex"]))
        try:
            for part in _pieces(data, piece):
                if side.receive_data(part):
                    return "was accepted"
            side.receive_eof()
        except ProtocolError as error:
            if error.kind is not kind:
                return f"expected {kind.value}, got {error.kind.value}: {error}"
        else:
            return "was accepted"
    return None


def check_truncation_sweep(vector: Json) -> str | None:
    what, data, kind = vector["type"], hex_bytes(vector["hex"]), _error_kind(vector)
    n_embd = vector.get("n_embd")
    frame, consumed = decode_one(new_decoder(what, n_embd), data, max(len(data), 1))
    if frame is None or consumed != len(data):
        return "the whole is not one frame"
    for end in range(len(data)):
        problem = expect_decode_error(what, data[:end].hex(), kind, None, n_embd=n_embd)
        if problem is not None:
            return f"prefix of {end} bytes: {problem}"
    return None


# --- writer errors


def check_writer_error(vector: Json) -> str | None:
    operation, data, kind = vector["operation"], vector["input"], _error_kind(vector)
    try:
        if operation == "write_message":
            encode_message(message_of(data))
        elif operation == "send_transport_auth":
            encode_transport_auth(bytes(length_of(data, "token_length")))
        elif operation == "send_reply":
            tokens = (0,) * length_of(data, "predicted_tokens_length")
            draft = (0,) * length_of(data, "draft_token_ids_length")
            encode_reply(
                attrs.evolve(
                    Reply.of_predicted_tokens(tokens),
                    native_mtp_draft=NativeMtpDraft(draft) if draft else None,
                )
            )
        elif operation == "encode_activation":
            payload = bytes(length_of(data, "payload_length"))
            rules.check_activation(payload, data["token_count"], data["n_embd"], data["state_flags"])
        else:
            raise FormError(f"unknown operation {operation!r}")
    except ProtocolError as error:
        return None if error.kind is kind else f"expected {kind.value}, got {error.kind.value}: {error}"
    return "was accepted"


# --- streams


def check_stream(vector: Json) -> str | None:
    data, end = hex_bytes(vector["hex"]), 0
    for item in vector["items"]:
        if item["offset"] != end:
            return f"{item['type']} is at {item['offset']}, but what comes before it ends at {end}"
        end += item["length"]
        problem = _check_stream_item(vector, item, data[item["offset"] : end])
        if problem is not None:
            return f"{item['type']} at {item['offset']}: {problem}"
    if end != len(data):
        return f"the items end at {end}, the bytes at {len(data)}"
    for piece in (max(len(data), 1), 1, 7, 100):
        problem = _check_whole_stream(vector, data, piece)
        if problem is not None:
            return f"in pieces of {piece}: {problem}"
    return None


def _check_stream_item(vector: Json, item: Json, part: bytes) -> str | None:
    if item["type"] == "ready":
        return None if part == READY_WORD else "is not the ready word"
    if item["type"] == "transport_auth":
        ours = encode_transport_auth(hex_bytes(vector["expected_token_hex"]))
        return None if part == ours else "is encoded differently"
    frame, consumed = decode_one(new_decoder(item["type"], vector.get("n_embd")), part, max(len(part), 1))
    if frame is None or consumed != len(part):
        return f"takes {consumed} bytes" if frame is not None else "is not whole"
    return None if encoded(frame) == part else "is encoded again differently"


def _check_whole_stream(vector: Json, data: bytes, piece: int) -> str | None:
    """Handshake, then frames, over one connection: nothing may be lost where one ends and the next begins."""
    types = [item["type"] for item in vector["items"]]
    frames = [t for t in types if t in ("message", "reply")]
    steps = types[: len(types) - len(frames)]
    if types[len(steps) :] != frames or len(set(frames)) > 1:
        raise FormError(f"a stream is handshake steps and then frames of one type, not {types}")
    sides = [
        DialerHandshake(None)
        if step == "ready"
        else ListenerHandshake(hex_bytes(vector["expected_token_hex"]))
        for step in steps
    ]
    decoder = new_decoder(frames[0], vector.get("n_embd")) if frames else None
    again = b""
    for part in _pieces(data, piece):
        rest = part
        for side in sides:
            if rest and not side.admitted:
                rest = side.trailing_data if side.receive_data(rest) else b""
        if decoder is None:
            continue
        decoder.receive_data(rest)
        while (frame := next_frame(decoder)) is not None:
            again += encoded(frame)
    if decoder is not None:
        decoder.receive_eof()
    start = vector["items"][len(steps)]["offset"] if frames else len(data)
    return None if again == data[start:] else "the frames differ"
