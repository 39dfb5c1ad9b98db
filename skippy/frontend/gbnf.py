"""GBNF, llama.cpp's notation for grammars → the notation of the stages, llguidance's variant of Lark.

Source of the notation: ``grammars/README.md`` of llama.cpp.

A lexer takes the longest match, where GBNF knows no lexer. So a grammar that is recursive is taken apart into
single characters; one that is not is a single regular expression, which is much faster.
"""

from __future__ import annotations

import graphlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import attrs

MAX_CHARACTERS: Final = 64 * 1024
MAX_DEPTH: Final = 27
"""Parentheses within parentheses: llguidance takes 28, one more for what is repeated in the innermost."""
MAX_SUFFIXES: Final = 4
"""Repetitions right behind one another, each of which repeats all before it."""
MAX_RULES: Final = 1_000
MAX_ITEMS: Final = 20_000
"""Characters, classes and names of rules."""
MAX_REPETITIONS: Final = 2_000

_NAME: Final = re.compile(r"[A-Za-z0-9-]+")
_INTEGER: Final = re.compile(r"[0-9]{1,9}")
_REPEAT: Final = re.compile(r"\{\s*([0-9]{1,9})\s*(,\s*([0-9]{1,9})?)?\s*\}")
_TOKEN: Final = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^<>\s\[\]]+))>")
_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX: Final = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}"),
               "U": re.compile(r"[0-9A-Fa-f]{8}")}  # fmt: skip
_LAST: Final = 0x10FFFF


class GbnfError(ValueError):
    """What is wrong with a grammar, and where."""


@attrs.frozen(slots=True)
class _Chars:
    """One character out of some ranges, or out of all others."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@attrs.frozen(slots=True)
class _Token:
    """One token of the vocabulary, as Lark writes it."""

    text: str


@attrs.frozen(slots=True)
class _Rule:
    name: str


@attrs.frozen(slots=True)
class _Repeated:
    item: _Item
    least: int
    most: int | None


@attrs.frozen(slots=True)
class _Choice:
    """Sequences, one of which is taken."""

    sequences: tuple[tuple[_Item, ...], ...]


_Item = _Chars | _Token | _Rule | _Repeated | _Choice


def gbnf_to_lark(text: str) -> str:
    """The same language in Lark.

    Raises:
        GbnfError: it is no GBNF, too large, or refers to a rule that is not there.
    """
    if len(text) > MAX_CHARACTERS:
        raise GbnfError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    rules = _Parser(text).rules()
    uses = {name: _names(body) for name, body in rules.items()}
    for name, used in uses.items():
        for other in used:
            if other not in rules:
                raise GbnfError(f"rule {name!r} uses {other!r}, which is not defined")
    if "root" not in rules:
        raise GbnfError("there is no rule named 'root'")
    rules = _productive(rules)
    uses = {name: _names(body) for name, body in rules.items()}
    regular = not _recursive(uses) and not any(_has_tokens(body) for body in rules.values())
    # Lark: names of regular expressions are upper case, those of other rules lower case.
    names = {name: f"{'R' if regular else 'r'}{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_lark(body, names)}" for name, body in rules.items()]
    return "\n".join(lines) + "\n"


def _productive(rules: dict[str, _Choice]) -> dict[str, _Choice]:
    """Without the alternatives that never come to an end, such as all of ``a ::= "x" a``."""
    ends = _ending(rules)
    if "root" not in ends:
        raise GbnfError("no text fits it: rule 'root' never comes to an end")
    kept = {name: _without(body, ends) for name, body in rules.items()}
    return {name: body for name, body in kept.items() if isinstance(body, _Choice)}


@attrs.define(slots=True, eq=False)
class _Ending:
    """A sequence of which something has not been shown to end: a rule, or a choice within it.

    Attributes:
        of: what ends where the sequence does.
        missing: how much of it that is.
    """

    of: str | int
    missing: int


def _ending(rules: dict[str, _Choice]) -> set[str]:
    """The rules that come to an end. Looks at each item once, in whatever order rules use one another."""
    waiting: dict[str | int, list[_Ending]] = defaultdict(list)
    ready: list[str | int] = []
    choices: list[tuple[str | int, _Choice]] = list(rules.items())
    number = 0
    for key, choice in choices:  # which grows
        for sequence in choice.sequences:
            ending = _Ending(key, 0)
            for item in sequence:
                while isinstance(item, _Repeated) and item.least:
                    item = item.item
                if not isinstance(item, _Rule | _Choice):
                    continue
                if isinstance(item, _Choice):
                    number += 1
                    choices.append((number, item))
                waiting[item.name if isinstance(item, _Rule) else number].append(ending)
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


def _without(item: _Item, ends: set[str]) -> _Item | None:
    """An item without what refers to other rules than these; None where nothing is left."""
    if isinstance(item, _Rule):
        return item if item.name in ends else None
    if isinstance(item, _Repeated):
        inner = _without(item.item, ends)
        if inner is not None:
            return _Repeated(inner, item.least, item.most)
        return None if item.least else _Choice(((),))
    if isinstance(item, _Choice):
        sequences = []
        for sequence in item.sequences:
            left = [_without(inner, ends) for inner in sequence]
            if None not in left:
                sequences.append(tuple(inner for inner in left if inner is not None))
        return _Choice(tuple(sequences)) if sequences else None
    return item


def _names(item: _Item) -> set[str]:
    if isinstance(item, _Rule):
        return {item.name}
    if isinstance(item, _Repeated):
        return _names(item.item)
    if isinstance(item, _Choice):
        return {name for sequence in item.sequences for inner in sequence for name in _names(inner)}
    return set()


def _has_tokens(item: _Item) -> bool:
    if isinstance(item, _Repeated):
        return _has_tokens(item.item)
    if isinstance(item, _Choice):
        return any(_has_tokens(inner) for sequence in item.sequences for inner in sequence)
    return isinstance(item, _Token)


def _recursive(uses: dict[str, set[str]]) -> bool:
    """Whether a rule uses itself, perhaps by way of others."""
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError:
        return True
    return False


def _lark(item: _Item, names: dict[str, str]) -> str:
    if isinstance(item, _Rule):
        return names[item.name]
    if isinstance(item, _Token):
        return item.text
    if isinstance(item, _Chars):
        inside = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in item.ranges)
        return f"/[{'^' if item.negated else ''}{inside}]/"
    if isinstance(item, _Repeated):
        most = "" if item.most is None else item.most
        return f"({_lark(item.item, names)}){{{item.least},{most}}}"
    return " | ".join(
        " ".join(
            f"({_lark(inner, names)})" if isinstance(inner, _Choice) else _lark(inner, names)
            for inner in sequence
        )
        or '""'
        for sequence in item.sequences
    )


class _Parser:
    """Recursive descent, of bounded depth."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._items = 0

    def rules(self) -> dict[str, _Choice]:
        rules: dict[str, _Choice] = {}
        self._space(lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._space()
            if not self._text.startswith("::=", self._at):
                raise self._error("expected '::='")
            self._at += 3
            self._space(lines=True)
            body = self._choice(0)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected the end of the line")
            if name in rules:
                raise GbnfError(f"rule {name!r} is defined twice")
            rules[name] = body
            if len(rules) > MAX_RULES:
                raise GbnfError(f"it has more than {MAX_RULES} rules")
            self._space(lines=True)
        return rules

    def _error(self, what: str) -> GbnfError:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - (before.rfind("\n") + 1) + 1
        return GbnfError(f"{what} at line {line}, column {column}")

    def _space(self, *, lines: bool = False) -> None:
        pattern = r"(?:[ \t\r\n]|#[^\r\n]*)*" if lines else r"(?:[ \t]|#[^\r\n]*)*"
        match = re.compile(pattern).match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"expected {what}")
        self._at = match.end()
        return match

    def _name(self) -> str:
        return self._take(_NAME, "the name of a rule").group()

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self, depth: int) -> _Choice:
        sequences = [self._sequence(depth)]
        while self._next == "|":
            self._at += 1
            self._space(lines=True)
            sequences.append(self._sequence(depth))
        return _Choice(tuple(sequences))

    def _sequence(self, depth: int) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while True:
            found = self._atom(depth)
            if found is None:
                if self._next in ("*", "+", "?", "{") and self._next:
                    raise self._error("nothing to repeat")
                return tuple(items)
            self._items += len(found)
            if self._items > MAX_ITEMS:
                raise GbnfError(f"it has more than {MAX_ITEMS} characters, classes and names of rules")
            self._space(lines=depth > 0)
            items += self._repeated(found, depth)

    def _repeated(self, found: Sequence[_Item], depth: int) -> Sequence[_Item]:
        suffixes = 0
        while self._next in ("*", "+", "?", "{") and self._next:
            suffixes += 1
            if suffixes > MAX_SUFFIXES:
                raise self._error(f"more than {MAX_SUFFIXES} repetitions of repetitions")
            least, most = self._times()
            self._space(lines=depth > 0)
            inner = found[0] if len(found) == 1 else _Choice((tuple(found),))
            found = [_Repeated(inner, least, most) if most != 0 else _Choice(((),))]
        return found

    def _times(self) -> tuple[int, int | None]:
        sign = self._next
        if sign != "{":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        match = self._take(_REPEAT, "{m}, {m,} or {m,n}")
        least = int(match[1])
        most = least if match[2] is None else None if match[3] is None else int(match[3])
        if max(least, most or 0) > MAX_REPETITIONS:
            raise self._error(f"more than {MAX_REPETITIONS} repetitions")
        if most is not None and most < least:
            raise self._error(f"from {least} to {most} repetitions")
        return least, most

    def _atom(self, depth: int) -> Sequence[_Item] | None:
        sign = self._next
        if sign == '"':
            return self._string()
        if sign == "[":
            return [self._class()]
        if sign == ".":
            self._at += 1
            return [_Chars(((0, 0xD7FF), (0xE000, _LAST)))]
        if sign == "(":
            if depth >= MAX_DEPTH:
                raise self._error(f"parentheses more than {MAX_DEPTH} deep")
            self._at += 1
            self._space(lines=True)
            inner = self._choice(depth + 1)
            if self._next != ")":
                raise self._error("expected ')'")
            self._at += 1
            return [inner]
        if sign in ("<", "!") and sign:
            return [self._token()]
        return [_Rule(self._name())] if _NAME.match(self._text, self._at) else None

    def _string(self) -> Sequence[_Item]:
        self._at += 1
        chars: list[_Item] = []
        while self._next != '"':
            code = self._char()
            chars.append(_Chars(((code, code),)))
        self._at += 1
        return chars or [_Choice(((),))]

    def _class(self) -> _Chars:
        self._at += 1
        negated = self._next == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._next != "]":
            low = high = self._char()
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            if high < low:
                raise self._error("a range of characters that ends before it begins")
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            raise self._error("a class without characters")
        return _Chars(tuple(ranges), negated)

    def _char(self) -> int:
        sign = self._next
        if not sign:
            raise self._error("the text ends inside of a string or a class")
        self._at += 1
        if sign != "\\":
            return self._scalar(ord(sign))
        letter = self._next
        self._at += 1
        if letter in _HEX and letter:
            return self._scalar(int(self._take(_HEX[letter], "hexadecimal digits").group(), 16))
        if letter not in _ESCAPES or not letter:
            raise self._error(f"unknown escape \\{letter}")
        return ord(_ESCAPES[letter])

    def _scalar(self, code: int) -> int:
        if code > _LAST or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"U+{code:04X} is no character")
        return code

    def _token(self) -> _Token:
        match = self._take(_TOKEN, "<[token id]> or <name of a special token>")
        negated, number, name = match[1], match[2], match[3]
        if number is not None:
            return _Token(f"<[{'^' if negated else ''}{int(number)}]>")
        if negated:
            raise self._error("a token that is ruled out must be given by its id, as in !<[42]>")
        return _Token(f"<{name}>")
