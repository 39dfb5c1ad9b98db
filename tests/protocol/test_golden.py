"""Golden frames: made by the original codec, so they are the format's last word."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from skippy.protocol import (
    ErrorKind,
    Float32NaN,
    Message,
    MessageDecoder,
    ProtocolError,
    Reply,
    ReplyDecoder,
    bits_of_float,
    encode_message,
    encode_reply,
)
from skippy.protocol.check import check_file
from skippy.protocol.vectors import canonical_message, message_of, reply_of

from .strategies import cuts, receive_in_place

PATH = Path(__file__).parent / "golden" / "frames.json"
GOLDEN: dict[str, Any] = json.loads(PATH.read_bytes())
FRAMES = [v for v in GOLDEN["valid"] if v["type"] in ("message", "reply")]
BAD_FRAMES = [v for v in GOLDEN["malformed"] if v["type"] in ("message", "reply")]


def decoder_for(vector: dict[str, Any]) -> MessageDecoder | ReplyDecoder:
    return MessageDecoder(vector["n_embd"]) if vector["type"] == "message" else ReplyDecoder()


def take(decoder: MessageDecoder | ReplyDecoder) -> Message | Reply | None:
    return decoder.next_message() if isinstance(decoder, MessageDecoder) else decoder.next_reply()


def ids(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def test_every_section_of_the_file_agrees() -> None:
    report = check_file(PATH)
    assert report.unchecked == []
    assert [(s.name, s.mismatches) for s in report.sections if s.mismatches] == []
    counts = {s.name: s.count for s in report.sections}
    assert counts == {
        "constants": 19,
        "kinds": 19,
        "default_sampling": 1,
        "not_in_target_generation": 2,
        "valid": 168,
        "malformed": 137,
        "writer_errors": 19,
        "streams": 4,
        "truncation_sweeps": 4,
        "stats_merge": 26,
        "stats_observe": 16,
        "epochs": 16,
        "matches_kind": 152,
        "activation_sizes": 16,
        "flag_mapping": 6,
    }


@pytest.mark.parametrize("vector", FRAMES, ids=ids)
def test_valid_frames_however_they_are_cut(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])[: vector["consumed"]]
    rng = random.Random(vector["name"])
    ways = [[len(data)], [1], *([rng.randint(1, 90) for _ in range(7)] for _ in range(3))]
    for sizes in ways:
        fed, placed = decoder_for(vector), decoder_for(vector)
        frames: list[object] = []
        for piece in cuts(data, sizes):
            fed.receive_data(piece)
            if (decoded := take(fed)) is not None:
                frames.append(decoded)
        fed.receive_eof()
        frames += receive_in_place(placed, data, sizes)
        placed.receive_eof()
        assert len(frames) == 2
        for frame in frames:
            if isinstance(frame, Message):
                assert canonical_message(frame) == canonical_message(message_of(vector["message"]))
            else:
                assert isinstance(frame, Reply)
                assert frame == reply_of(vector["reply"])


@pytest.mark.parametrize("vector", FRAMES, ids=ids)
def test_encoding_gives_the_original_bytes(vector: dict[str, Any]) -> None:
    expected = vector["hex"]
    if vector["type"] == "reply":
        assert encode_reply(reply_of(vector["reply"])).hex() == expected
        return
    if vector["encode"] == "encode_from":
        assert b"".join(encode_message(message_of(vector["encode_from"]))).hex() == expected
    again = b"".join(encode_message(message_of(vector["message"]))).hex()
    assert again == vector.get("reencoded_hex", expected)


@pytest.mark.parametrize("vector", BAD_FRAMES, ids=ids)
def test_malformed_frames_fail_at_the_failing_byte_and_for_good(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    expected = ErrorKind(vector["error_kind"])
    if expected is ErrorKind.INVALID_DATA:
        good = vector["bytes_read_before_error"] - 1
        decoder = decoder_for(vector)
        decoder.receive_data(data[:good])
        assert take(decoder) is None
        decoder.receive_data(data[good : good + 1])
        with pytest.raises(ProtocolError) as caught:
            take(decoder)
    else:
        decoder = decoder_for(vector)
        decoder.receive_data(data)
        assert take(decoder) is None
        if not data:
            decoder.receive_eof()  # a clean end between frames
            return
        with pytest.raises(ProtocolError) as caught:
            decoder.receive_eof()
    assert caught.value.kind is expected
    for call in (
        decoder.get_buffer,
        decoder.receive_eof,
        lambda: take(decoder),
        lambda: decoder.receive_data(b"x"),
    ):
        with pytest.raises(ProtocolError) as again:
            call()
        assert again.value is caught.value


def test_signalling_nan_keeps_its_bits() -> None:
    found = 0
    for vector in FRAMES:
        sampling = vector.get("message", {}).get("sampling")
        if sampling is None:
            continue
        for bits in sampling["f32_bits"].values():
            if int(bits, 16) & 0x7FC00000 == 0x7F800000 and int(bits, 16) & 0x3FFFFF:
                found += 1
                decoder = decoder_for(vector)
                decoder.receive_data(bytes.fromhex(vector["hex"]))
                message = decoder.next_message() if isinstance(decoder, MessageDecoder) else None
                assert message is not None
                assert message.sampling is not None
                values = [getattr(message.sampling, name) for name in sampling["f32_bits"]]
                assert [f"{bits_of_float(v):08x}" for v in values] == list(sampling["f32_bits"].values())
                assert any(isinstance(v, Float32NaN) for v in values)
                assert b"".join(encode_message(message)).hex() == vector["hex"]
    assert found >= 2
