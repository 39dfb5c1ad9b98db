"""Connections cut into frames, whatever the pieces that their bytes come in. Heartbeats are no frames."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest

from skippy.engine.toy import ToyEngine
from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    AdmissionRequest,
    ConnectionRole,
    DialerHandshake,
    FinishHint,
    ListenerHandshake,
    LoadedStage,
    Message,
    MessageKind,
    Reply,
    ReplyAnnex,
    default_state,
    encode_annexed_reply,
    encode_heartbeat,
    encode_message,
    encode_reply,
)
from skippy.sim.cutting import ConnectionCutter, Piece
from skippy.sim.faults import Direction
from skippy.sim.lies import LIES, Failure, lie
from tests.support.admission import engine_admission
from tests.support.cluster import ranges_of, toy_config

WIDTH = ToyEngine(2, 4, 6).info.input_width
ENDPOINTS = [f"127.0.0.1:{20_000 + index}" for index in range(3)]
ACK = encode_reply(Reply.ack())
BEAT = encode_heartbeat(10_000)
TOKEN = encode_annexed_reply(Reply.predicted_token(5), ReplyAnnex(finish_hint=FinishHint.MUST_END))


def frame(kind: MessageKind, tokens: Sequence[int] = ()) -> bytes:
    state = attrs.evolve(default_state(kind), source_stage_index=0 if tokens else -1, prompt_token_count=9)
    return b"".join(
        map(
            bytes,
            encode_message(
                Message(
                    kind,
                    state,
                    token_count=len(tokens),
                    request_id=3,
                    session_id=4,
                    tokens=tokens,
                    activation=bytes(4 * WIDTH * len(tokens)),
                )
            ),
        )
    )


def shaken(role: ConnectionRole) -> tuple[AdmissionRequest, LoadedStage]:
    index = 1 if role is ConnectionRole.LANE else 0
    start, end = ranges_of(3)[index]
    config = toy_config(index, ranges_of(3), ENDPOINTS)
    loaded = engine_admission(config, ToyEngine(start, end, 6).info).loaded
    loaded = attrs.evolve(loaded, extensions=(LIVENESS_EXTENSION, ANNEX_EXTENSION))
    request = AdmissionRequest(
        role=role,
        sender_id="test",
        sender_index=0 if index else 2,
        target_id=None,
        target_index=index,
        layer_start=start,
        layer_end=None,
        run_id="test",
        topology_id="test",
        model_id="toy",
        layer_count=None,
        package_id=None,
        activation_width=loaded.input_width if index else 0,
        cache_type_k=None,
        cache_type_v=None,
        context_length=loaded.context_length,
        batch_rows=1,
        extensions=loaded.extensions,
    )
    return request, loaded


def stream(role: ConnectionRole, token: bytes | None) -> list[tuple[Direction, bytes]]:
    """The parts of a connection, in the order in which they are sent."""
    request, loaded = shaken(role)
    dialer, listener = DialerHandshake(token, request), ListenerHandshake(token, loaded)
    parts = []
    while not dialer.admitted:
        if out := dialer.data_to_send():
            parts.append((Direction.FORWARD, out))
            listener.receive_data(out)
        if back := listener.data_to_send():
            parts.append((Direction.BACK, back))
            dialer.receive_data(back)
    if role is ConnectionRole.RETURN:
        opening = frame(MessageKind.PREDICTION_RETURN_OPEN)
        return [
            *parts,
            *((Direction.FORWARD, data) for data in (opening, TOKEN, BEAT, TOKEN)),
            (Direction.BACK, BEAT),
        ]
    return [
        *parts,
        (Direction.FORWARD, BEAT),
        (Direction.FORWARD, frame(MessageKind.PREFILL_EMBD, (1, 2, 3))),
        (Direction.BACK, BEAT + BEAT + ACK),
        (Direction.FORWARD, BEAT),
        (Direction.FORWARD, frame(MessageKind.DECODE_EMBD, (4,))),
        (Direction.FORWARD, frame(MessageKind.STOP)),
        (Direction.BACK, ACK),
    ]


@pytest.mark.parametrize("token", [None, b"s3cret"])
@pytest.mark.parametrize("role", ConnectionRole)
@pytest.mark.parametrize("most", [1, 7, 300, 10_000])
def test_frames_come_out_whole_however_they_come_in(
    role: ConnectionRole, token: bytes | None, most: int
) -> None:
    parts, chance = stream(role, token), random.Random(most)
    cutter = ConnectionCutter()
    pieces: dict[Direction, list[Piece]] = {way: [] for way in Direction}
    for way, data in parts:
        while data:
            size = chance.randint(1, most)
            pieces[way] += cutter.cut(way, data[:size])
            data = data[size:]
    for way in Direction:
        assert b"".join(piece.data for piece in pieces[way]) == b"".join(d for w, d in parts if w is way)
    kinds = {way: [p.frame.kind.name for p in pieces[way] if p.frame is not None] for way in Direction}
    if role is ConnectionRole.LANE:
        assert kinds[Direction.FORWARD] == ["PREFILL_EMBD", "DECODE_EMBD", "STOP"]
        assert kinds[Direction.BACK] == ["ACK", "ACK"]
    else:
        assert kinds[Direction.FORWARD] == ["PREDICTION_RETURN_OPEN", "PREDICTED_TOKEN", "PREDICTED_TOKEN"]
    assert cutter.admitted
    assert cutter.role is role


@pytest.mark.parametrize("failure", sorted(LIES, key=str))
@pytest.mark.parametrize("role", ConnectionRole)
def test_a_lie_is_as_long_as_the_truth_and_another(role: ConnectionRole, failure: Failure) -> None:
    cutter, chance = ConnectionCutter(), random.Random(1)
    for way, data in stream(role, None):
        for piece in cutter.cut(way, data):
            if piece.frame is not None:
                said = lie(failure, piece, chance)
                assert said != piece.data
                assert len(said) == len(piece.data)


def test_what_breaks_the_rules_passes_as_it_is() -> None:
    cutter = ConnectionCutter()
    assert list(cutter.cut(Direction.FORWARD, b"GET / HTTP/1.1\r\n")) == [Piece(b"GET / HTTP/1.1\r\n")]
    assert list(cutter.cut(Direction.FORWARD, b"\r\n")) == [Piece(b"\r\n")]
    cutter = ConnectionCutter()
    for way, data in stream(ConnectionRole.LANE, None):
        list(cutter.cut(way, data))
    garbage = b"\x99" * 100
    assert b"".join(piece.data for piece in cutter.cut(Direction.FORWARD, garbage)) == garbage
