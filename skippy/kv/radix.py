"""A compressed trie over token ids: longest common prefix, values at the ends of paths.

Every node but the root ends a path or is where paths part, so the parent of a node that holds a value is as
far as any *other* path goes with it. Nodes that are neither are merged into their child, or pruned, when
values go.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

V = TypeVar("V")

TYPE_CODE = "i"
"""C ints: four bytes per token, compared without making Python integers."""


def tokens_of(tokens: Sequence[int]) -> array[int]:
    """Token ids in the form paths have: an array of C ints. One that is such an array already is not copied.

    Raises:
        OverflowError: an id beyond 32 bits with sign.
    """
    if isinstance(tokens, array) and tokens.typecode == TYPE_CODE:
        return tokens
    return array(TYPE_CODE, tokens)


def common_length(a: memoryview[int], b: memoryview[int]) -> int:
    """How many items two views begin with alike."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first difference is in [low, high): compare halves, which runs in C
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Node(Generic[V]):
    """Where a path ends or paths part. ``depth`` tokens lead here, ``edge`` are those since ``parent``."""

    __slots__ = ("children", "depth", "edge", "parent", "values")

    def __init__(self, parent: Node[V] | None, edge: array[int]) -> None:
        self.parent = parent
        self.edge = edge
        self.depth: int = (parent.depth if parent is not None else 0) + len(edge)
        self.children: dict[int, Node[V]] = {}
        self.values: list[V] = []

    def path(self) -> array[int]:
        """All tokens that lead here."""
        edges: list[array[int]] = []
        node: Node[V] | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        tokens = array(TYPE_CODE)
        for edge in reversed(edges):
            tokens.extend(edge)
        return tokens

    def subtree(self) -> Iterator[Node[V]]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class TokenTree(Generic[V]):
    """Values by token path. Several values may have the same path; a path has at least one token."""

    def __init__(self) -> None:
        self.root: Node[V] = Node(None, array(TYPE_CODE))

    def __bool__(self) -> bool:
        return bool(self.root.children)

    def find(self, tokens: Sequence[int]) -> tuple[int, Node[V]]:
        """The longest prefix of ``tokens`` that begins a path here.

        Returns:
            its length, and the first node at or below its end: every value in that node's subtree has a path
            that begins with the prefix, no other value has. The root where nothing is common.
        """
        view = memoryview(tokens_of(tokens))
        node, length = self.root, 0
        while length < len(view):
            child = node.children.get(view[length])
            if child is None:
                break
            common = common_length(memoryview(child.edge), view[length:])
            length += common
            node = child
            if common < len(child.edge):
                break
        return length, node

    def insert(self, tokens: Sequence[int], value: V) -> Node[V]:
        """Put ``value`` at the end of the path ``tokens``; returns where. ValueError for an empty path."""
        path = tokens_of(tokens)
        if not path:
            raise ValueError("a path has at least one token")
        length, node = self.find(path)
        if length < node.depth:
            node = self._split(node, length)
        if length < len(path):
            child: Node[V] = Node(node, path[length:])
            node.children[path[length]] = child
            node = child
        node.values.append(value)
        return node

    def remove(self, node: Node[V], value: V) -> None:
        """Take ``value`` (the very object) from ``node``. ValueError if it is not there."""
        for index, held in enumerate(node.values):
            if held is value:
                del node.values[index]
                break
        else:
            raise ValueError("the value is not at this node")
        parent = node.parent
        if node.values or parent is None:
            return
        if not node.children:
            del parent.children[node.edge[0]]
            node = parent
        self._merge(node)

    def count_tokens(self, chosen: Callable[[V], bool]) -> int:
        """Tokens of the paths of all values that are ``chosen``; a prefix that several share counts once."""
        total = 0
        leads: set[Node[V]] = set()
        for node in reversed(list(self.root.subtree())):  # children first
            if node.parent is not None and (node in leads or any(chosen(value) for value in node.values)):
                total += len(node.edge)
                leads.add(node.parent)
        return total

    def _split(self, node: Node[V], length: int) -> Node[V]:
        """A new node on ``node``'s edge, ``length`` tokens from the root."""
        parent = node.parent
        assert parent is not None  # the root's edge is empty
        at = length - parent.depth
        upper: Node[V] = Node(parent, node.edge[:at])
        parent.children[upper.edge[0]] = upper
        node.edge = node.edge[at:]
        node.parent = upper
        upper.children[node.edge[0]] = node
        return upper

    def _merge(self, node: Node[V]) -> None:
        """Leave out a node that neither ends a path nor is where paths part."""
        parent = node.parent
        if parent is None or node.values or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.edge = node.edge + child.edge
        child.parent = parent
        parent.children[child.edge[0]] = child
