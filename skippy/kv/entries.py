"""What the index of a stage consists of: entries, matches, counts."""

from __future__ import annotations

import enum
from array import array
from typing import Generic, Protocol, TypeVar

import attrs

from .radix import Node


class Sized(Protocol):
    """An exported state, as the store that holds it names it."""

    @property
    def size(self) -> int:
        """Bytes."""


S = TypeVar("S", bound=Sized)


class Part(enum.Enum):
    """What of an entry goes."""

    RESIDENT = "resident"
    STATE = "state"
    WHOLE = "whole"


@attrs.define(slots=True, eq=False)
class Entry(Generic[S]):
    """A token path that is remembered. For all to read; only :class:`PrefixCache` changes it.

    Attributes:
        namespace: whose it is; "" where nothing was said.
        tokens: the path, an array of C ints.
        sequence: the native sequence that holds it, or None.
        state: the exported state that holds it, or None.
        live: a session has the sequence.
        schedule: sizes of the chunks it was computed in, oldest first; their sum is the length.
        alone: no row shared a native call with rows of another sequence, and no chunk was cut afterwards:
            computed again by the same schedule it has the same bits.
        refs: restores and exports under way; while there are any it is no victim and cannot be taken.
        last_used: number of its last use, among all uses of the index.
        resident_base, state_base: the floors at that use, see :mod:`skippy.kv.policy`.
        node: where it is in the tree; None once it was removed.
        forgotten: it was removed because it is wrong, or because somebody asked for it.
    """

    namespace: str
    tokens: array[int]
    sequence: int | None
    state: S | None
    live: bool
    schedule: tuple[int, ...]
    alone: bool
    refs: int = 0
    last_used: int = 0
    resident_base: float = 0.0
    state_base: float = 0.0
    node: Node[Entry[S]] | None = None
    forgotten: bool = False

    @property
    def length(self) -> int:
        """Tokens of the path."""
        return len(self.tokens)

    @property
    def removed(self) -> bool:
        """Whether the index no longer has it."""
        return self.node is None


@attrs.frozen(slots=True)
class Match(Generic[S]):
    """The first ``length`` tokens of what was asked for are the first of ``entry``."""

    entry: Entry[S]
    length: int


@attrs.define(slots=True)
class KvCounters:
    """Counts since the start. Those up to ``imports`` are the owner's to raise, the others the index's.

    Attributes:
        hits, misses, errors: lookups that restored something, found nothing, or failed after they had found
        something.
        hit_tokens: tokens that were restored.
        takes, copies, imports: how.
        records, recorded_tokens: entries that became idle, and the tokens of their paths.
        duplicates, too_short: sessions and states that were not kept, and why.
        evicted_resident, evicted_state: parts that went for lack of room.
        dropped: entries that went for another reason.
        audits, audit_failures: entries that were compared with what computing them again gave, and those that
            differed.
        largest_difference: of all audits.
    """

    hits: int = 0
    misses: int = 0
    errors: int = 0
    hit_tokens: int = 0
    takes: int = 0
    copies: int = 0
    imports: int = 0
    records: int = 0
    recorded_tokens: int = 0
    duplicates: int = 0
    too_short: int = 0
    evicted_resident: int = 0
    evicted_state: int = 0
    dropped: int = 0
    audits: int = 0
    audit_failures: int = 0
    largest_difference: float = 0.0


@attrs.frozen(slots=True, kw_only=True)
class KvStats:
    """What an index holds, and its counts.

    Attributes:
        namespaces: token trees.
        entries, live: all entries; those that sessions have.
        resident, resident_tokens: idle ones with a sequence; the tokens of their paths, shared prefixes once.
        states, state_bytes: idle ones with a state; the sum of the states' sizes.
        quarantined: native sequences that are used no more.
    """

    namespaces: int
    entries: int
    live: int
    resident: int
    resident_tokens: int
    states: int
    state_bytes: int
    quarantined: int
    counters: KvCounters


def is_resident(entry: Entry[S]) -> bool:
    """Whether it is idle and has a sequence."""
    return entry.sequence is not None and not entry.live
