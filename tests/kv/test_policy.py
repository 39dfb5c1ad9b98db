"""10,000 requests over a working set of ten times the cache: hits as documented, memory flat."""

from __future__ import annotations

import bisect
import gc
import itertools
import random
import sys
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import attrs
import pytest

from skippy.kv.cache import PrefixCache
from skippy.kv.entries import Part
from skippy.kv.settings import KvSettings

SEQUENCES, MIN_TOKENS, BYTES_PER_TOKEN = 16, 16, 10
T = TypeVar("T", str, list[int])


@attrs.frozen
class Request:
    namespace: str
    prompt: str
    """One character per token."""
    answer: str


def chats(
    chance: random.Random, popular: int, text: Callable[[int, int], T], *, longest: int
) -> Generator[tuple[int, T], T, None]:
    """Chats that go on turn by turn and begin anew, few of them often; they share system prompts.

    Yields which chat it is, and its prompt; takes the answer.
    """
    systems = [text(20, 200) for _ in range(12)]
    held = [text(0, 0) for _ in range(popular)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(popular)]
    while True:
        number = chance.choices(range(popular), weights)[0]
        if not held[number] or len(held[number]) > longest:
            held[number] = systems[number % len(systems)] + text(5, 40)
        prompt = held[number] + text(5, 60)
        answer = yield number, prompt
        held[number] = prompt + answer


def conversations(seed: int, *, popular: int, tenants: int = 3) -> Iterator[Request]:
    """A workload of such chats."""
    chance = random.Random(seed)
    letters = [chr(0x4E00 + number) for number in range(2000)]

    def text(low: int, high: int) -> str:
        return "".join(chance.choices(letters, k=chance.randint(low, high)))

    source = chats(chance, popular, text, longest=500)
    number, prompt = next(source)
    while True:
        answer = text(1, 60)
        yield Request(f"tenant {number % tenants}", prompt, answer)
        number, prompt = source.send(answer)


@attrs.frozen
class State:
    size: int


class Stage:
    """Does with the index what a stage does, one request after the other."""

    def __init__(self, max_bytes: int) -> None:
        self.index: PrefixCache[State] = PrefixCache(
            KvSettings(min_tokens=MIN_TOKENS, max_entries=64, max_bytes=max_bytes), sliceable=True
        )
        self.free = list(range(SEQUENCES))
        self.held: dict[int, str] = {}
        """What the sequences really hold."""
        self.max_bytes = max_bytes

    def run(self, request: Request) -> int:
        """Tokens that did not have to be computed."""
        index, tokens = self.index, [ord(letter) for letter in request.prompt]
        match = index.match(request.namespace, tokens[:-1])
        if match is None:
            sequence, length, entry = self.sequence(), 0, None
        else:
            length = match.length
            source = match.entry
            assert (source.sequence is None) or self.held[source.sequence].startswith(request.prompt[:length])
            if index.takes(match, free_sequences=len(self.free)):
                entry = index.take(source)
                assert entry.sequence is not None
                sequence = entry.sequence
                index.truncate(entry, length)
            else:
                index.acquire(source)
                sequence = self.sequence()
                index.release(source)
                entry = index.add(request.namespace, tokens[:length], sequence=sequence, live=True)
        if entry is None:
            entry = index.add(request.namespace, tokens[:1], sequence=sequence, live=True)
            assert entry is not None
        index.grow(entry, tokens[entry.length :])
        index.grow(entry, [ord(letter) for letter in request.answer])
        self.held[sequence] = request.prompt + request.answer
        if not index.keep(entry):
            self.free.append(sequence)
        while (excess := index.excess()) is not None:
            self.evict(*excess)
        return length

    def evict(self, entry: object, part: Part) -> None:
        sequence = entry.sequence  # type: ignore[attr-defined]
        self.index.evict(entry, part)  # type: ignore[arg-type]
        if sequence is not None:
            self.free.append(sequence)

    def sequence(self) -> int:
        if self.free:
            return self.free.pop()
        victim = self.index.victim(resident=True)
        assert victim is not None
        cost, size = self.index.cost(victim), victim.length * BYTES_PER_TOKEN
        self.evict(victim, Part.RESIDENT)
        if cost >= MIN_TOKENS and size <= self.max_bytes:
            while self.index.stats().state_bytes + size > self.max_bytes:
                state = self.index.victim(resident=False)
                assert state is not None
                self.index.evict(state, Part.STATE)
            self.index.add(victim.namespace, victim.tokens, state=State(size))
        return self.free.pop()


@attrs.define(eq=False)
class Kept:
    namespace: str
    text: str
    base: float
    used: int
    resident: bool


def common(one: str, other: str) -> int:
    """How many letters both begin with, by bisection."""
    return bisect.bisect_left(range(len(other)), True, key=lambda end: not one.startswith(other[: end + 1]))


class Documented:
    """What docs/operations.md says, with sorted lists of strings. Shares no code with the product."""

    def __init__(self, max_bytes: int) -> None:
        self.kept: list[Kept] = []
        self.paths: dict[str, list[str]] = {}
        """All of a namespace, sorted: who shares most with a path is next to it."""
        self.floor = {True: 0.0, False: 0.0}
        self.uses = 0
        self.free = SEQUENCES
        self.max_bytes = max_bytes

    def shared(self, namespace: str, text: str, *, own: bool) -> int:
        """The longest prefix of ``text`` that anything has; ``own``: but itself."""
        paths = self.paths.get(namespace, [])
        place = bisect.bisect_left(paths, text)
        above = place + 1 if own else place
        near = ([paths[place - 1]] if place else []) + paths[above : above + 1]
        return max((common(path, text) for path in near), default=0)

    def cost(self, kept: Kept) -> int:
        return len(kept.text) - self.shared(kept.namespace, kept.text, own=True)

    def worth(self, kept: Kept) -> float:
        size = 1 if kept.resident else len(kept.text) * BYTES_PER_TOKEN
        return kept.base + self.cost(kept) / size

    def put(self, kept: Kept) -> None:
        self.kept.append(kept)
        bisect.insort(self.paths.setdefault(kept.namespace, []), kept.text)

    def remove(self, kept: Kept) -> None:
        self.kept.remove(kept)
        self.paths[kept.namespace].remove(kept.text)

    def use(self, kept: Kept) -> None:
        self.uses += 1
        kept.base, kept.used = self.floor[kept.resident], self.uses

    def victim(self, resident: bool, besides: Kept | None = None) -> Kept | None:
        able = [kept for kept in self.kept if kept.resident is resident and kept is not besides]
        return min(able, key=lambda kept: (self.worth(kept), kept.used), default=None)

    def evict(self, kept: Kept) -> None:
        self.floor[kept.resident] = max(self.floor[kept.resident], self.worth(kept))
        self.remove(kept)
        self.free += kept.resident

    def room(self, besides: Kept | None) -> None:
        """A free sequence."""
        if not self.free:
            kept = self.victim(True, besides)
            assert kept is not None
            cost, size = self.cost(kept), len(kept.text) * BYTES_PER_TOKEN
            self.evict(kept)
            if cost >= MIN_TOKENS and size <= self.max_bytes:
                while size + self.state_bytes() > self.max_bytes:
                    state = self.victim(False, besides)
                    assert state is not None
                    self.evict(state)
                state = attrs.evolve(kept, resident=False)
                self.use(state)
                self.put(state)
        self.free -= 1

    def state_bytes(self) -> int:
        return sum(len(kept.text) * BYTES_PER_TOKEN for kept in self.kept if not kept.resident)

    def find(self, namespace: str, text: str) -> tuple[Kept | None, int]:
        length = self.shared(namespace, text, own=False)
        if length < MIN_TOKENS:
            return None, 0
        able = [k for k in self.kept if k.namespace == namespace and k.text.startswith(text[:length])]
        return min(able, key=lambda kept: (not kept.resident, len(kept.text), -kept.used)), length

    def run(self, request: Request) -> int:
        """Tokens that did not have to be computed."""
        source, length = self.find(request.namespace, request.prompt[:-1])
        if source is not None and source.resident and self.gives_itself(source, length):
            self.remove(source)
        else:
            self.room(source)
            if source is not None:
                self.use(source)
        entry = Kept(request.namespace, request.prompt + request.answer, 0.0, 0, True)
        self.use(entry)
        self.put(entry)
        while len(self.kept) > 64:
            kept = self.victim(False) or self.victim(True)
            assert kept is not None
            self.evict(kept)
        return length

    def gives_itself(self, source: Kept, length: int) -> bool:
        lost = min(self.cost(source), len(source.text) - length)
        if not lost:
            return True
        other = self.victim(True, besides=source)
        return not self.free and (other is None or self.floor[True] + lost < self.worth(other))


def rates(lengths: Sequence[int], requests: Sequence[Request]) -> tuple[float, float]:
    """Hits per request, and restored tokens per token asked for."""
    asked = sum(len(request.prompt) for request in requests)
    return sum(length > 0 for length in lengths) / len(requests), sum(lengths) / asked


def measured() -> int:
    """Blocks of memory that are in use."""
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.parametrize(
    ("count", "max_bytes"),
    [(10_000, 0), (2_500, 40 * 300 * BYTES_PER_TOKEN)],
    ids=["sequences", "sequences and states"],
)
def test_hits_are_those_of_the_documented_policy(count: int, max_bytes: int) -> None:
    room = SEQUENCES + max_bytes // (300 * BYTES_PER_TOKEN)
    requests = list(itertools.islice(conversations(1, popular=10 * room), count))
    stage, model = Stage(max_bytes), Documented(max_bytes)
    expected = [model.run(request) for request in requests]
    lengths = array("i", [0] * count)
    for number, request in enumerate(requests):
        lengths[number] = stage.run(request)
        if number == count // 5:
            warm = measured()
    assert measured() - warm < 500, "blocks; a request that leaves one behind would be as many as requests"
    assert rates(lengths, requests) == pytest.approx(rates(expected, requests), rel=0.05)
    assert 0.3 < rates(lengths, requests)[1] < 0.7, "neither all nor nothing: the policy has had to choose"
    stats = stage.index.stats()
    assert stats.entries <= 64
    assert stats.state_bytes <= max_bytes
    assert len(stage.free) + stats.resident == SEQUENCES
