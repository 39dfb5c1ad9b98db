"""GBNF, llama.cpp's notation for grammars → the notation of the stages, llguidance's variant of Lark.

Source of the notation: ``grammars/README.md`` of llama.cpp.

A lexer takes the longest match, where GBNF knows no lexer. So a grammar that is recursive is taken apart into
single characters; one that is not is a single regular expression, which is much faster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .gbnf_rules import (
    Chars,
    Choice,
    Item,
    Repeated,
    Rule,
    Token,
    has_tokens,
    names_in,
    productive,
    recursive,
)

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


def gbnf_to_lark(text: str) -> str:
    """The same language in Lark.

    Raises:
        GbnfError: it is no GBNF, too large, or refers to a rule that is not there.
    """
    if len(text) > MAX_CHARACTERS:
        raise GbnfError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    rules = _Parser(text).rules()
    uses = {name: names_in(body) for name, body in rules.items()}
    for name, used in uses.items():
        for other in used:
            if other not in rules:
                raise GbnfError(f"rule {name!r} uses {other!r}, which is not defined")
    if "root" not in rules:
        raise GbnfError("there is no rule named 'root'")
    rules = productive(rules)
    if "root" not in rules:
        raise GbnfError("no text fits it: rule 'root' never comes to an end")
    uses = {name: names_in(body) for name, body in rules.items()}
    regular = not recursive(uses) and not any(has_tokens(body) for body in rules.values())
    # Lark: names of regular expressions are upper case, those of other rules lower case.
    names = {name: f"{'R' if regular else 'r'}{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_lark(body, names)}" for name, body in rules.items()]
    return "\n".join(lines) + "\n"


def _lark(item: Item, names: dict[str, str]) -> str:
    if isinstance(item, Rule):
        return names[item.name]
    if isinstance(item, Token):
        return item.text
    if isinstance(item, Chars):
        inside = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in item.ranges)
        return f"/[{'^' if item.negated else ''}{inside}]/"
    if isinstance(item, Repeated):
        most = "" if item.most is None else item.most
        return f"({_lark(item.item, names)}){{{item.least},{most}}}"
    return " | ".join(
        " ".join(
            f"({_lark(inner, names)})" if isinstance(inner, Choice) else _lark(inner, names)
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

    def rules(self) -> dict[str, Choice]:
        rules: dict[str, Choice] = {}
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

    def _choice(self, depth: int) -> Choice:
        sequences = [self._sequence(depth)]
        while self._next == "|":
            self._at += 1
            self._space(lines=True)
            sequences.append(self._sequence(depth))
        return Choice(tuple(sequences))

    def _sequence(self, depth: int) -> tuple[Item, ...]:
        items: list[Item] = []
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

    def _repeated(self, found: Sequence[Item], depth: int) -> Sequence[Item]:
        suffixes = 0
        while self._next in ("*", "+", "?", "{") and self._next:
            suffixes += 1
            if suffixes > MAX_SUFFIXES:
                raise self._error(f"more than {MAX_SUFFIXES} repetitions of repetitions")
            least, most = self._times()
            self._space(lines=depth > 0)
            inner = found[0] if len(found) == 1 else Choice((tuple(found),))
            found = [Repeated(inner, least, most) if most != 0 else Choice(((),))]
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

    def _atom(self, depth: int) -> Sequence[Item] | None:
        sign = self._next
        if sign == '"':
            return self._string()
        if sign == "[":
            return [self._class()]
        if sign == ".":
            self._at += 1
            return [Chars(((0, 0xD7FF), (0xE000, _LAST)))]
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
        return [Rule(self._name())] if _NAME.match(self._text, self._at) else None

    def _string(self) -> Sequence[Item]:
        self._at += 1
        chars: list[Item] = []
        while self._next != '"':
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._at += 1
        return chars or [Choice(((),))]

    def _class(self) -> Chars:
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
        return Chars(tuple(ranges), negated)

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

    def _token(self) -> Token:
        match = self._take(_TOKEN, "<[token id]> or <name of a special token>")
        negated, number, name = match[1], match[2], match[3]
        if number is not None:
            return Token(f"<[{'^' if negated else ''}{int(number)}]>")
        if negated:
            raise self._error("a token that is ruled out must be given by its id, as in !<[42]>")
        return Token(f"<{name}>")
