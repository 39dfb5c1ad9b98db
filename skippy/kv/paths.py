"""Entries by namespace and token path: which one a question meets, and which tokens an entry alone holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Generic

from .entries import Entry, Match, S, is_resident
from .radix import Node, TokenTree
from .schedule import ChunkPlan


def _preference(entry: Entry[S]) -> tuple[int, int, int]:
    """Of entries that hold as much of what is asked for: which one to restore from. The least is the best."""
    if entry.sequence is None:
        rank = 3
    elif entry.live:
        rank = 2
    else:
        rank = 1 if entry.refs else 0
    return rank, entry.length, -entry.last_used


class PathIndex(Generic[S]):
    """A token tree per namespace.

    Args:
        sliceable: an entry serves every prefix of its path (attention, where sequences can be trimmed).
            Otherwise it serves only all of it (recurrent and hybrid models), and only while idle: a live
            one's state runs ahead of what is known here.
        min_tokens: what is shorter is no match.
    """

    def __init__(self, *, sliceable: bool, min_tokens: int) -> None:
        self.sliceable = sliceable
        self.min_tokens = max(1, min_tokens)
        self._trees: dict[str, TokenTree[Entry[S]]] = {}

    @property
    def namespaces(self) -> int:
        """Namespaces that have entries."""
        return len(self._trees)

    def match(self, namespace: str, tokens: Sequence[int], chunks: ChunkPlan | None) -> Match[S] | None:
        """See :meth:`skippy.kv.cache.PrefixCache.match`."""
        tree = self._trees.get(namespace)
        if tree is None:
            return None
        length, node = tree.find(tokens)
        if self.sliceable:
            below = (entry for under in node.subtree() for entry in under.values)
            return self._best(below, length, chunks)
        here: Node[Entry[S]] | None = node if length == node.depth else node.parent
        while here is not None:
            if (match := self._best(here.values, here.depth, chunks)) is not None:
                return match
            here = here.parent
        return None

    def _best(self, entries: Iterable[Entry[S]], length: int, chunks: ChunkPlan | None) -> Match[S] | None:
        def held(entry: Entry[S]) -> int:
            if chunks is None:
                return length
            return chunks.shared(entry.schedule, length) if entry.alone else 0

        least = max(self.min_tokens, 0 if self.sliceable else length)
        usable = (entry for entry in entries if self.sliceable or not entry.live)
        matches = (Match(entry, held(entry)) for entry in usable)
        best = min(matches, key=lambda match: (-match.length, _preference(match.entry)), default=None)
        return None if best is None or best.length < least else best

    def common(self, namespace: str, tokens: Sequence[int]) -> int:
        """See :meth:`skippy.kv.cache.PrefixCache.common`."""
        tree = self._trees.get(namespace)
        return 0 if tree is None else tree.find(tokens)[0]

    def cost(self, entry: Entry[S]) -> int:
        """See :meth:`skippy.kv.cache.PrefixCache.cost`."""
        node = entry.node
        if node is None:
            raise ValueError("the entry was removed")
        if self.sliceable:
            # A parent ends another path, or another one parts there.
            return 0 if node.children or len(node.values) > 1 else len(node.edge)
        if any(other is not entry and not other.live for other in node.values):
            return 0
        above = node.parent
        while above is not None and all(other.live for other in above.values):
            above = above.parent
        return node.depth - (0 if above is None else above.depth)

    def resident_tokens(self) -> int:
        """Tokens of the paths of idle entries with a sequence; a prefix that several share counts once."""
        return sum(tree.count_tokens(is_resident) for tree in self._trees.values())

    def place(self, entry: Entry[S]) -> None:
        """Put it at the end of its path. ValueError: that is empty."""
        tree = self._trees.get(entry.namespace) or TokenTree()
        entry.node = tree.insert(entry.tokens, entry)
        self._trees[entry.namespace] = tree

    def unplace(self, entry: Entry[S]) -> None:
        """Take it out; empty trees go."""
        assert entry.node is not None
        tree = self._trees[entry.namespace]
        tree.remove(entry.node, entry)
        entry.node = None
        if not tree:
            del self._trees[entry.namespace]

    def move(self, entry: Entry[S], tokens: array[int]) -> None:
        """Its path is now ``tokens``."""
        self.unplace(entry)
        entry.tokens = tokens
        self.place(entry)
