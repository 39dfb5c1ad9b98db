"""What a peer announces costs nothing before it arrives: measured on the process, not on our own counters."""

from __future__ import annotations

import gc
import struct

import psutil
import pytest

from skippy.protocol import MessageDecoder, ReplyDecoder
from skippy.stage.framing import allocate

MIB = 1 << 20
PEERS = 32


def frame(kind: int, token_count: int, tokens: int = 0, positions: int = 0, flags: int = 0) -> bytes:
    words = (kind, 0, token_count, tokens, positions, 14, 0, 1, flags, 0, 0, 0, 0, 0)
    return struct.pack("<14i2Q", *words, 1, 2)


ANNOUNCED = {
    "activation of 512 MiB": frame(1, 512),
    "state import of 512 MiB": frame(7, 512 * MIB),
    "a million tokens": frame(1, 0, tokens=MIB),
    "a million positions": frame(1, 0, positions=MIB),
    "8 MiB of chat metadata": frame(1, 0, flags=32) + struct.pack("<I", 8 * MIB),
}


def memory() -> tuple[int, int]:
    """Resident and virtual bytes: memory that is reserved, but not touched, shows in the second."""
    gc.collect()
    info = psutil.Process().memory_info()
    return info.rss, info.vms


@pytest.mark.parametrize("announced", ANNOUNCED.values(), ids=ANNOUNCED)
def test_peers_that_announce_much_and_send_nothing(announced: bytes) -> None:
    before = memory()
    decoders = [MessageDecoder(n_embd=MIB // 4) for _ in range(PEERS)]
    for decoder in decoders:
        decoder.receive_data(announced)
        for _ in range(3):
            assert decoder.next_message() is None
            assert len(decoder.get_buffer()) <= MIB
    grown = [now - then for now, then in zip(memory(), before, strict=True)]
    assert max(grown) < PEERS * MIB, f"resident and virtual size grew by {grown} bytes for {PEERS} peers"


def test_replies_that_announce_much_and_send_nothing() -> None:
    before = memory()
    decoders = [ReplyDecoder() for _ in range(PEERS)]
    for decoder in decoders:
        decoder.receive_data(struct.pack("<3i", 3, 0, 262_144))
        assert decoder.next_reply() is None
    grown = [now - then for now, then in zip(memory(), before, strict=True)]
    assert max(grown) < PEERS * MIB


def test_buffers_of_a_stage_are_not_resident_before_bytes_arrive() -> None:
    """A stage receives activations in place: the buffer exists, but its pages do not."""
    before, _ = memory()
    decoders = [MessageDecoder(n_embd=MIB // 4, allocate=allocate) for _ in range(4)]
    for decoder in decoders:
        decoder.receive_data(ANNOUNCED["activation of 512 MiB"] + bytes(1000))
        assert decoder.next_message() is None
        assert len(decoder.get_buffer()) == 512 * MIB - 1000
    after, _ = memory()
    assert after - before < len(decoders) * MIB
