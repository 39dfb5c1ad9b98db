"""Exported sequence state in RAM: cut into blocks, equal blocks kept once, every byte counted.

State is kept in blocks of at most 1 MiB, known by their digest. States with equal blocks (the same prefix in
two namespaces, the same state recorded again) share them, and a block goes with the last state that has it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Final

import attrs

from skippy.protocol import Buffer

BLOCK_BYTES: Final = 1024 * 1024
DIGEST_BYTES: Final = 32


@attrs.frozen(slots=True, eq=False)
class StateRef:
    """A state that a :class:`BlockStore` keeps until it is told to drop it. Two refs are never equal.

    Attributes:
        size: bytes of the state.
        digests: BLAKE2b-256 of its blocks, in order.
    """

    size: int
    digests: tuple[bytes, ...]


@attrs.frozen(slots=True, kw_only=True)
class BlockStats:
    """What a :class:`BlockStore` holds and has done.

    Attributes:
        states, blocks: how many are kept.
        logical_bytes: the sizes of all states, as if nothing were shared.
        physical_bytes: the sizes of all blocks; what the budget is about.
        refused: states that did not fit.
    """

    states: int
    blocks: int
    logical_bytes: int
    physical_bytes: int
    refused: int


@attrs.define(slots=True)
class _Block:
    data: bytes
    states: int


class BlockStore:
    """States in RAM, within a budget. Safe from any thread; nothing here waits for more than a copy.

    It evicts nothing by itself: which state is worth less is for the index to say. Who gets None from
    :meth:`put` drops others and tries again, or goes without.

    Args:
        max_bytes: of all blocks together; 0: no limit.
    """

    def __init__(self, max_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._blocks: dict[bytes, _Block] = {}
        self._refs: set[StateRef] = set()
        self._physical = 0
        self._logical = 0
        self._refused = 0

    def put(self, state: Buffer) -> StateRef | None:
        """Keep a copy of ``state``; None if it does not fit next to what is kept.

        Takes about a millisecond per MiB, mostly for the digests, without the interpreter's lock: better not
        in the event loop. Blocks that are here already are not copied.
        """
        view = memoryview(state).cast("B")
        cut = [view[start : start + self._block_bytes] for start in range(0, len(view), self._block_bytes)]
        ref = StateRef(len(view), tuple(digest_of(block) for block in cut))
        new = dict(zip(ref.digests, cut, strict=True))
        with self._lock:
            missing = [digest for digest in new if digest not in self._blocks]
            added = sum(len(new[digest]) for digest in missing)
            if self.max_bytes and self._physical + added > self.max_bytes:
                self._refused += 1
                return None
            for digest in missing:
                self._blocks[digest] = _Block(bytes(new[digest]), 0)
            for digest in new:
                self._blocks[digest].states += 1
            self._physical += added
            self._logical += ref.size
            self._refs.add(ref)
        return ref

    def get(self, ref: StateRef) -> list[bytes]:
        """The state, in pieces whose concatenation it is. They stay valid when the state is dropped.

        Raises:
            LookupError: it was dropped, or is another store's.
        """
        with self._lock:
            self._check(ref)
            return [self._blocks[digest].data for digest in ref.digests]

    def drop(self, ref: StateRef) -> int:
        """Forget a state, and the blocks that no other state has; returns how many bytes that freed.

        Raises:
            LookupError: it was dropped before, or is another store's.
        """
        freed = 0
        with self._lock:
            self._check(ref)
            self._refs.remove(ref)
            for digest in set(ref.digests):
                block = self._blocks[digest]
                block.states -= 1
                if not block.states:
                    del self._blocks[digest]
                    freed += len(block.data)
            self._physical -= freed
            self._logical -= ref.size
        return freed

    def unique_bytes(self, ref: StateRef) -> int:
        """What dropping the state would free. Raises LookupError as :meth:`get`."""
        with self._lock:
            self._check(ref)
            blocks = [self._blocks[digest] for digest in set(ref.digests)]
            return sum(len(block.data) for block in blocks if block.states == 1)

    @property
    def used_bytes(self) -> int:
        return self._physical

    def stats(self) -> BlockStats:
        with self._lock:
            return BlockStats(
                states=len(self._refs),
                blocks=len(self._blocks),
                logical_bytes=self._logical,
                physical_bytes=self._physical,
                refused=self._refused,
            )

    def _check(self, ref: StateRef) -> None:
        if ref not in self._refs:
            raise LookupError(f"a state of {ref.size} bytes that this store does not keep")


def digest_of(data: Buffer) -> bytes:
    """BLAKE2b-256."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def digest_of_pieces(pieces: Sequence[Buffer]) -> tuple[bytes, int]:
    """BLAKE2b-256 of data in pieces, and its size."""
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for piece in pieces:
        digest.update(piece)
        size += memoryview(piece).nbytes
    return digest.digest(), size
