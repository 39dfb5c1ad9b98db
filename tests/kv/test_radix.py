"""The token tree against a list of paths."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.kv.radix import Node, TokenTree, common_length, tokens_of

TOKENS = st.lists(st.integers(0, 2), max_size=10)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=10)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Value:
    def __init__(self, path: list[int]) -> None:
        self.path = path


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree: TokenTree[Value] = TokenTree()
        self.held: list[tuple[Node[Value], Value]] = []

    @rule(path=PATHS)
    def insert(self, path: list[int]) -> None:
        value = Value(path)
        node = self.tree.insert(path, value)
        self.held.append((node, value))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        node, value = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.remove(node, value)
        with pytest.raises(ValueError, match="not at this node"):
            self.tree.remove(node, value)

    @rule(tokens=TOKENS)
    def find(self, tokens: list[int]) -> None:
        length, node = self.tree.find(tokens)
        assert length == max((shared(tokens, value.path) for _, value in self.held), default=0)
        below = [value for part in node.subtree() for value in part.values]
        expected = [value for _, value in self.held if shared(tokens, value.path) >= length]
        assert sorted(map(id, below)) == sorted(map(id, expected))

    @rule(modulus=st.integers(1, 3))
    def count(self, modulus: int) -> None:
        def chosen(value: Value) -> bool:
            return len(value.path) % modulus == 0

        prefixes = {
            tuple(value.path[: end + 1])
            for _, value in self.held
            if chosen(value)
            for end in range(len(value.path))
        }
        assert self.tree.count_tokens(chosen) == len(prefixes)

    @invariant()
    def nodes_end_paths_or_part_them(self) -> None:
        assert bool(self.tree) == bool(self.held)
        for node in self.tree.root.subtree():
            for first, child in node.children.items():
                assert child.parent is node
                assert child.edge[0] == first
                assert child.depth == node.depth + len(child.edge)
                assert child.values or len(child.children) > 1
        for node, value in self.held:
            assert list(node.path()) == value.path
            assert any(held is value for held in node.values)


TestTree = TreeMachine.TestCase


@given(a=TOKENS, b=TOKENS)
def test_common_length(a: list[int], b: list[int]) -> None:
    assert common_length(memoryview(tokens_of(a)), memoryview(tokens_of(b))) == shared(a, b)


def test_a_path_is_not_empty_and_its_tokens_have_32_bits() -> None:
    tree: TokenTree[str] = TokenTree()
    with pytest.raises(ValueError, match="at least one token"):
        tree.insert([], "nothing")
    with pytest.raises(OverflowError):
        tree.insert([2**31], "too large")
    assert not tree


def test_what_the_caller_does_to_its_tokens_afterwards_changes_nothing() -> None:
    tree: TokenTree[str] = TokenTree()
    tokens = array("i", [1, 2, 3])
    tree.insert(tokens, "value")
    tokens[2] = 9
    tokens.extend([4, 5])
    assert tree.find([1, 2, 3, 4])[0] == 3
