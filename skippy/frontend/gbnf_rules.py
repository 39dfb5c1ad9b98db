"""The rules of a grammar, as :mod:`.gbnf` reads them, and what can be said of them without a text."""

from __future__ import annotations

import graphlib
from collections import defaultdict

import attrs


@attrs.frozen(slots=True)
class Chars:
    """One character out of some ranges, or out of all others."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@attrs.frozen(slots=True)
class Token:
    """One token of the vocabulary, as Lark writes it."""

    text: str


@attrs.frozen(slots=True)
class Rule:
    name: str


@attrs.frozen(slots=True)
class Repeated:
    item: Item
    least: int
    most: int | None


@attrs.frozen(slots=True)
class Choice:
    """Sequences, one of which is taken."""

    sequences: tuple[tuple[Item, ...], ...]


Item = Chars | Token | Rule | Repeated | Choice


def productive(rules: dict[str, Choice]) -> dict[str, Choice]:
    """Without the alternatives that never come to an end, such as all of ``a ::= "x" a``."""
    ends = _ending(rules)
    kept = {name: _without(body, ends) for name, body in rules.items()}
    return {name: body for name, body in kept.items() if isinstance(body, Choice)}


@attrs.define(slots=True, eq=False)
class _Ending:
    """A sequence of which something has not been shown to end: a rule, or a choice within it.

    Attributes:
        of: what ends where the sequence does.
        missing: how much of it that is.
    """

    of: str | int
    missing: int


def _ending(rules: dict[str, Choice]) -> set[str]:
    """The rules that come to an end. Looks at each item once, in whatever order rules use one another."""
    waiting: dict[str | int, list[_Ending]] = defaultdict(list)
    ready: list[str | int] = []
    choices: list[tuple[str | int, Choice]] = list(rules.items())
    number = 0
    for key, choice in choices:  # which grows
        for sequence in choice.sequences:
            ending = _Ending(key, 0)
            for item in sequence:
                while isinstance(item, Repeated) and item.least:
                    item = item.item
                if not isinstance(item, Rule | Choice):
                    continue
                if isinstance(item, Choice):
                    number += 1
                    choices.append((number, item))
                waiting[item.name if isinstance(item, Rule) else number].append(ending)
                ending.missing += 1
            if not ending.missing:
                ready.append(key)
    ended: set[str | int] = set()
    while ready:
        key = ready.pop()
        if key not in ended:
            ended.add(key)
            for ending in waiting[key]:
                ending.missing -= 1
                if not ending.missing:
                    ready.append(ending.of)
    return {key for key in ended if isinstance(key, str)}


def _without(item: Item, ends: set[str]) -> Item | None:
    """An item without what refers to other rules than these; None where nothing is left."""
    if isinstance(item, Rule):
        return item if item.name in ends else None
    if isinstance(item, Repeated):
        inner = _without(item.item, ends)
        if inner is not None:
            return Repeated(inner, item.least, item.most)
        return None if item.least else Choice(((),))
    if isinstance(item, Choice):
        sequences = []
        for sequence in item.sequences:
            left = [_without(inner, ends) for inner in sequence]
            if None not in left:
                sequences.append(tuple(inner for inner in left if inner is not None))
        return Choice(tuple(sequences)) if sequences else None
    return item


def names_in(item: Item) -> set[str]:
    if isinstance(item, Rule):
        return {item.name}
    if isinstance(item, Repeated):
        return names_in(item.item)
    if isinstance(item, Choice):
        return {name for sequence in item.sequences for inner in sequence for name in names_in(inner)}
    return set()


def has_tokens(item: Item) -> bool:
    if isinstance(item, Repeated):
        return has_tokens(item.item)
    if isinstance(item, Choice):
        return any(has_tokens(inner) for sequence in item.sequences for inner in sequence)
    return isinstance(item, Token)


def recursive(uses: dict[str, set[str]]) -> bool:
    """Whether a rule uses itself, perhaps by way of others."""
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError:
        return True
    return False
