"""What hostile peers do to a stage, one connection after the other. Each attack ends by itself."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from skippy.protocol import (
    ConnectionRole,
    DialerHandshake,
    MessageKind,
    ReplyKind,
    SamplingConfig,
    SamplingFlag,
    encode_admission,
    encode_transport_auth,
)

from .hostile import PATIENCE_SECS, Ended, Report, Target

GOLDEN: Final = Path(__file__).parents[1] / "protocol" / "golden" / "frames.json"
K = MessageKind


# -- bytes that break the format ----------------------------------------------------------------------------


def vectors(*types: str) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the malformed golden frames of these types."""
    for vector in json.loads(GOLDEN.read_bytes())["malformed"]:
        if vector["type"] in types and vector["hex"]:
            yield vector["name"], bytes.fromhex(vector["hex"])


async def malformed_frames(target: Target, report: Report) -> None:
    """Each on a lane of its own, as the first frame and behind a sound one in turns."""
    for number, (name, data) in enumerate(vectors("message", "reply")):
        async with target.admitted() as peer:
            before = target.frame(K.PREFILL_EMBD, 0, range(4)) if number % 2 else b""
            await peer.send(before + data)
            await peer.finish()
            await peer.closed(name)
        report.append(Ended(name, peer.address, "."))


async def malformed_preambles(target: Target, report: Report) -> None:
    """In place of the token."""
    for name, data in vectors("transport_auth", "ready"):
        async with target.connected() as peer:
            await peer.send(data)
            await peer.finish()
            await peer.closed(name)
        report.append(Ended(name, peer.address, "credentials|token|handshake|transport"))


async def wrong_tokens(target: Target, report: Report) -> None:
    wrong = (b"x", target.token[:-1], target.token + b"x", bytes(64))
    for token in wrong:
        async with target.connected() as peer:
            await peer.send(encode_transport_auth(token))
            with trio.fail_after(PATIENCE_SECS):
                assert await peer.stream.receive_some(1) == b"", "a stranger was told something"
        report.append(Ended(f"token {token!r}", peer.address, "wrong transport token"))


# -- admission ----------------------------------------------------------------------------------------------


def packet(body: bytes, *, magic: int = 0x53545053, version: int = 1, length: int | None = None) -> bytes:
    return struct.pack("<3I", magic, version, len(body) if length is None else length) + body


async def admissions(target: Target, report: Report) -> None:
    """Packets that are malformed, too large, of another chain, or missing."""
    good = encode_admission(target.request)
    fields = json.loads(good[12:])
    other: dict[str, Any] = {
        "activation_width": target.width + 1,
        "batch_rows": target.batch_rows + 1,
        "cache_type_k": "q4_0",
        "context_length": 1,
        "layer_start": 5,
        "model_id": "else",
        "package_id": "sha256:" + "0" * 64,
        "run_id": "else",
        "sender_index": 5,
        "target_index": 9,
        "topology_id": "else",
    }
    cases = [
        (f"other {name}", encode_admission(attrs.evolve(target.request, **{name: value})), name)
        for name, value in other.items()
    ]
    cases += [
        ("no JSON", packet(b"\xff{"), "packet"),
        ("a list", packet(b"[" * 60_000), "packet"),
        ("unknown key", packet(json.dumps({**fields, "x": 1}).encode()), "packet"),
        ("missing key", packet(json.dumps({"role": "lane"}).encode()), "packet"),
        ("other role", packet(json.dumps({**fields, "role": "king"}).encode()), "packet"),
        ("empty", packet(b""), "packet"),
        ("over the limit", packet(b"", length=65_537), "packet"),
        ("4 GiB", packet(b"", length=2**32 - 1), "packet"),
        ("other version", packet(good[12:], version=2), "packet"),
        ("half, then the end", good[:40], "closed the connection during the handshake"),
        ("none, but a frame", target.frame(K.PREFILL_EMBD, 0, range(4)), "older or incomplete peer"),
        ("none, but noise", random.Random(1).randbytes(500), "older or incomplete peer"),
    ]
    for name, data, reason in cases:
        async with target.authenticated() as peer:
            await peer.send(data)
            await peer.finish()
            await peer.closed(name)
        report.append(Ended(f"admission: {name}", peer.address, reason if reason != "packet" else "."))


async def strange_returns(target: Target, report: Report) -> None:
    """Return streams that nobody waits for, and to a stage that takes none."""
    # For the ids of the other attacks, which run meanwhile, stage 0 may be waiting.
    ids = {"request_id": 70, "session_id": 80}
    opening = target.frame(K.PREDICTION_RETURN_OPEN, **ids)
    role = ConnectionRole.RETURN
    request = attrs.evolve(target.request, role=role, sender_index=5, activation_width=0)
    for data in (opening, target.frame(K.PREFILL_EMBD, 0, range(2), **ids), opening * 2):
        async with target.connected() as peer:
            with contextlib.suppress(Exception):  # stages other than the first refuse the role
                await peer.shake_hands(DialerHandshake(target.token, request))
            await peer.send(data)
            await peer.closed("a strange return stream")
        report.append(Ended("a strange return stream", peer.address, "role|return|waits for none"))


Case = tuple[str, list[bytes], str]
"""Name, frames, pattern of the reason."""


# -- frames in the wrong order, place or number -------------------------------------------------------------


def sequences(target: Target) -> list[Case]:
    frame, index = target.frame, target.index
    configure, opening = frame(K.CONFIGURE_GENERATION), frame(K.PREDICTION_RETURN_OPEN)
    prefill, decode = frame(K.PREFILL_EMBD, 0, range(4)), frame(K.DECODE_EMBD, 4, [5], decode_step=0)
    final, window = frame(K.PREFILL_FINAL_EMBD, 4, [5]), frame(K.VERIFY_WINDOW, 4, [5, 6], seq_id=3)
    retire = frame(K.RETIRE_VERIFY_WINDOW, -1, count=2)
    begun = [prefill] if index else [configure, prefill]
    # Where the last stage owes a prediction, it finds that nobody waits for the return stream.
    lost = "return stream|where an ACK|waits for none|closed"
    cases = [
        ("decode before prefill", [decode], "idle: decode does not fit"),
        ("decode into nothing", [configure, decode], f"gap|{lost}"),
        ("settings in the middle", [final, configure], f"decoding: configure|ConfigureGeneration|gap|{lost}"),
        (
            "settings, tokens, settings",
            [configure, prefill, decode, configure],
            f"decoding: configure|{lost}",
        ),
        ("a return stream opens on a lane", [opening], "admitted in the role 'lane'"),
        ("a return stream opens in the middle", [prefill, opening], "return open does not fit"),
        ("two requests at once", [prefill, frame(K.PREFILL_EMBD, 4, range(4), request_id=9)], "is live"),
        ("another one's Stop", [prefill, frame(K.STOP, session_id=9)], "is live"),
        ("another one's trim", [prefill, frame(K.TRIM_SESSION, request_id=9)], "is live"),
        (
            "windows out of order",
            [*begun, window, frame(K.VERIFY_WINDOW, 6, [7], seq_id=2)],
            f"order|{lost}",
        ),
        ("a window retired before any", [frame(K.RETIRE_VERIFY_WINDOW)], "idle: retire window does not fit"),
        ("less than nothing retired", [*begun, window, retire], f"may be negative|{lost}"),
        ("state import", [frame(K.STATE_IMPORT)], "state|STATE"),
        ("state export", [frame(K.STATE_EXPORT)], "state|STATE"),
        (
            "header of another kind",
            [frame(K.PREFILL_EMBD, 0, range(4), phase=2)],
            "do not match PREFILL_EMBD",
        ),
        ("a gap", [prefill, frame(K.PREFILL_EMBD, 10, range(4))], "gap"),
        ("a gap at the start", [frame(K.PREFILL_EMBD, 2**31 - 5, range(4))], "gap"),
        ("a replayed chunk", [prefill, prefill], "already holds"),
        ("a chunk half replayed", [prefill, frame(K.PREFILL_EMBD, 2, range(4))], "already holds"),
        ("too many rows", [frame(K.PREFILL_EMBD, 0, range(target.batch_rows + 1))], "at most|limit|over"),
        ("fewer rows than tokens", [frame(K.PREFILL_EMBD, 0, range(4), count=3)] * 2, "."),
    ]
    cases += [
        (f"source {source}", [frame(K.PREFILL_EMBD, 0, range(4), source=source)], "comes from|kind")
        for source in (index - 2, index, index + 1, 2**31 - 1)
        if max(source, -1) != index - 1
    ]
    return cases


def poisons(target: Target) -> list[tuple[str, list[bytes]]]:
    """(name, frames)."""
    frame = target.frame
    prefill, final = frame(K.PREFILL_EMBD, 0, range(4)), frame(K.PREFILL_FINAL_EMBD, 4, [5])
    most = 2**31 - 1
    settings = {
        "endless windows": SamplingConfig(
            SamplingFlag.ENABLED,
            penalty_last_n=most,
            repeat_penalty=1.1,
            dry_multiplier=1.0,
            dry_penalty_last_n=most,
        ),
        "an unknown mirostat": SamplingConfig(SamplingFlag.ENABLED, mirostat_mode=3),
        "a bias for no token": SamplingConfig(SamplingFlag.ENABLED, logit_bias=((-1, 1.0),)),
        "an infinite temperature": SamplingConfig(SamplingFlag.ENABLED, temperature=float("inf")),
    }
    cases = [
        ("no tokens of the vocabulary", [frame(K.PREFILL_EMBD, 0, [most, -(2**31), 0, 1]), final]),
        ("chat metadata", [frame(K.CONFIGURE_GENERATION, chat_sampling_metadata="[" * 10_000)]),
    ]
    # Settings of the final frame, where nobody configured any: no return stream is opened for it.
    cases += [
        (name, [prefill, frame(K.PREFILL_FINAL_EMBD, 4, [5], sampling=sampling)])
        for name, sampling in settings.items()
    ]
    if target.index:
        cases += [
            (f"activations of {value}", [frame(K.PREFILL_EMBD, 0, range(4), value=value), final])
            for value in (float("nan"), float("inf"), 3e38)
        ]
    return cases


def wrong_widths(target: Target) -> list[Case]:
    """Frames of another width than was agreed on: what follows is read from within an activation."""
    if target.index == 0:
        extra = target.frame(K.PREFILL_EMBD, 0, range(4)) + struct.pack("<8f", *[0.25] * 8)
        return [("an activation where none is read", [extra], "unknown message kind")]
    lost = "unknown message kind|state version|negative count"

    def frames(width: int) -> list[bytes]:
        enough = 3 + 4 * target.width // (width + 22)
        return [target.frame(K.PREFILL_EMBD, n * 4, range(4), width=width) for n in range(enough)]

    widths = (1, target.width - 1, target.width + 1, target.width * 2)
    return [(f"width {width}", frames(width), lost) for width in widths]


async def wrong_frames(target: Target, report: Report) -> None:
    """Each case on a lane of its own. The stage ends it by itself: the attacker leaves its side open."""
    for name, frames, reason in [*sequences(target), *wrong_widths(target)]:
        async with target.admitted() as peer:
            await peer.send(b"".join(frames))
            await peer.closed(name)
        report.append(Ended(name, peer.address, reason))


async def announcements(target: Target, report: Report) -> None:
    """Frames that promise more than comes."""
    for name, data in (
        ("millions of rows", target.frame(K.PREFILL_EMBD, 0, [1], count=2**20)),
        ("a million tokens", target.frame(K.PREFILL_EMBD, 0, [1])[:12] + struct.pack("<i", 2**20)),
        ("an activation", target.frame(K.PREFILL_EMBD, 0, range(4))[:-1]),
    ):
        async with target.admitted() as peer:
            await peer.send(data)
            await peer.finish()
            await peer.closed(name)
        report.append(Ended(name, peer.address, "."))


async def poisoned_values(target: Target, report: Report) -> None:
    """Frames in good order whose values must hurt nobody else. The chain may well answer them."""
    for name, frames in poisons(target):
        async with target.admitted() as peer:
            await peer.send(b"".join(frames))
            with (
                contextlib.suppress(AssertionError, trio.BrokenResourceError),
                trio.fail_after(PATIENCE_SECS),
            ):
                while (await peer.reply()).kind is not ReplyKind.PREDICTED_TOKEN:
                    pass
            await peer.finish()
            await peer.closed(name)
        report.append(Ended(name, peer.address, "."))


async def stale_frames(target: Target, report: Report) -> None:
    """A chunk of a generation that was rewound is answered and not executed, as the gap behind it shows."""
    chunks = [
        target.frame(K.PREFILL_EMBD, start, range(4), checkpoint_generation=generation)
        for start, generation in ((0, 2), (2, 3), (4, 2))
    ]
    async with target.admitted() as peer:
        await peer.send(b"".join(chunks))
        assert {(await peer.reply()).kind for _ in chunks} == {ReplyKind.ACK}
        await peer.send(target.frame(K.PREFILL_EMBD, 7, range(4), checkpoint_generation=3))
        await peer.closed("a stale chunk")
    report.append(Ended("a stale chunk", peer.address, r"holds 6\b"))


# -- what is odd, and right ---------------------------------------------------------------------------------


async def odd_but_right(target: Target, report: Report) -> None:
    """A peer that stops before it starts, and one that sends single bytes: both are served."""
    prefill, stop = target.frame(K.PREFILL_EMBD, 0, range(4)), target.frame(K.STOP)
    async with target.admitted() as peer:
        for data in (stop, stop, prefill, stop):
            await peer.send(data)
            assert (await peer.reply()).kind is ReplyKind.ACK
    async with target.connected() as peer:
        await peer.send(encode_transport_auth(target.token), piece=1)
        await peer.stream.receive_some(4)
        await peer.send(encode_admission(target.request), piece=7)
        await peer.stream.receive_some(65536)
        await peer.send(prefill, piece=1 if target.width < 100 else 97)
        await peer.send(stop, piece=1)
        assert (await peer.reply()).kind is (await peer.reply()).kind is ReplyKind.ACK


async def resets(target: Target, report: Report) -> None:
    """Connections that are reset at every stage of their lives."""
    prefill = target.frame(K.PREFILL_EMBD, 0, range(4))
    for open_one in (target.connected, target.authenticated, target.admitted):
        for data in (b"", prefill[:50], prefill, prefill + prefill[:-5]):
            async with open_one() as peer:
                await peer.send(data)
                peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ATTACKS: Final[Sequence[Callable[[Target, Report], Awaitable[None]]]] = (
    malformed_preambles,
    malformed_frames,
    wrong_tokens,
    admissions,
    strange_returns,
    wrong_frames,
    announcements,
    poisoned_values,
    stale_frames,
    odd_but_right,
    resets,
)


async def run_attacks(target: Target) -> Report:
    """All of the above, three at a time."""
    report: Report = []
    limit = trio.CapacityLimiter(3)

    async def run(attack: Callable[[Target, Report], Awaitable[None]]) -> None:
        async with limit:
            await attack(target, report)

    async with trio.open_nursery() as nursery:
        for attack in ATTACKS:
            nursery.start_soon(run, attack)
    return report
