"""A small seeded mutator: the same seed and corpus give the same inputs on every machine."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

MAX_BYTES: Final = 64 * 1024
"""No input grows beyond this: what is announced may be larger, what arrives is not."""

_WORDS: Final = (
    0, 1, 2, 3, 4, 7, 8, 13, 14, 15, 16, 22, 23, 31, 63, 64, 65, 127, 128, 255, 256, 257, 4095, 4096, 4097,
    65_535, 65_536, 262_144, 262_145, 1_048_576, 1_048_577, 8_388_608, 8_388_609, 536_870_912, 536_870_913,
    2**31 - 1, 2**31, 2**32 - 1,
)  # fmt: skip
_PIECES: Final = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\ud800",
    b"9" * 50, b"\xff", b"\xef\xbb\xbf", b"[" * 200, b"\x00", b"\xed\xa0\x80",
)  # fmt: skip

_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**39, 0.0, -0.5, 1e300, "", "a", "\x00", "é" * 70, "\ud800",
    [], {}, [[]], {"": None}, [0, "a"], {"type": "text", "text": "x"},
)  # fmt: skip

Step = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def _at(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data)) if data else 0


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[_at(rng, data)] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[_at(rng, data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _word(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """An interesting u32 at a multiple of four, where the formats keep their counts, or anywhere."""
    if len(data) < 4:
        return
    offset = rng.randrange(len(data) - 3)
    if rng.random() < 0.75:
        offset &= ~3
    struct.pack_into("<I", data, offset, rng.choice(_WORDS))


def _nudge(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if len(data) < 4:
        return
    offset = rng.randrange(len(data) - 3) & ~3
    (value,) = struct.unpack_from("<I", data, offset)
    struct.pack_into("<I", data, offset, (value + rng.choice((-2, -1, 1, 2))) & 0xFFFFFFFF)


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    del data[start : start + rng.choice((1, 4, 8, 16, len(data)))]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    data[start:start] = data[start : start + rng.choice((1, 4, 72, 256))]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    data[start:start] = rng.choice(_PIECES) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 9))


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    other = rng.choice(corpus)
    data[_at(rng, data) :] = other[rng.randrange(len(other) + 1) :]


def _append(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    data += rng.choice(corpus)


_STEPS: Final[tuple[Step, ...]] = (
    _flip, _flip, _byte, _byte, _word, _word, _nudge, _cut, _repeat, _insert, _splice, _append,
)  # fmt: skip


def _json_places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside ``value``."""
    places: list[tuple[Any, Any]] = []
    level = [value]
    for item in level:
        keys = item.keys() if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        places += [(item, key) for key in keys]
        level += [item[key] for key in keys]
    return places


def _json_mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A document with one to three values or keys exchanged, so that it gets past the JSON parser."""
    value = json.loads(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _json_places(value)
        if not places:
            break
        container, key = rng.choice(places)
        what = rng.randrange(4)
        if what == 0:
            container[key] = copy.deepcopy(rng.choice(_VALUES))
        elif what == 1:
            other_container, other_key = rng.choice(places)
            container[key] = copy.deepcopy(other_container[other_key])
        elif what == 2:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(("x", key.upper(), key + "s", "\ud800", "n" * 200))] = container.pop(key)
        else:
            container.append(copy.deepcopy(rng.choice(_VALUES)))
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def mutated(rng: random.Random, corpus: Sequence[bytes], head: int = 0) -> bytes:
    """One input: an item of ``corpus`` after one to five random steps; rarely random bytes alone.

    The first ``head`` bytes steer the target: pieces of another item come without them. Items that are JSON
    are mutated as JSON half of the time.
    """
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    if corpus[0][:1] == b"{" and rng.random() < 0.5:
        return _json_mutated(rng, corpus)
    item = rng.choice(corpus)
    data = bytearray(item[head:])
    others = [rng.choice(corpus)[head:]]
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        rng.choice(_STEPS)(rng, data, others)
    steering = item[:head] if rng.random() < 0.9 else rng.randbytes(head)
    return steering + bytes(data[: MAX_BYTES - head])
