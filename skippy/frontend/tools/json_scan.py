"""Where a JSON value ends, in text that arrives in pieces. RFC 8259, strictly."""

from __future__ import annotations

import enum
import re
from typing import Final

MAX_DEPTH: Final = 128
"""Arrays and objects within each other; templates, and clients, walk what comes out recursively."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS: Final = frozenset("0123456789")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LITERALS: Final = {"t": "true", "f": "false", "n": "null"}


class Malformed(ValueError):
    """The text is not what it began as."""


class _State(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # or the end of the array
    FIRST_KEY = enum.auto()  # or the end of the object
    KEY = enum.auto()
    COLON = enum.auto()
    BEHIND = enum.auto()  # behind a value: a comma, or the end of what holds it
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    LITERAL = enum.auto()
    MINUS = enum.auto()
    ZERO = enum.auto()
    INTEGER = enum.auto()
    POINT = enum.auto()
    FRACTION = enum.auto()
    E = enum.auto()
    E_SIGN = enum.auto()
    EXPONENT = enum.auto()


# state → what may follow within the number, and the state after it.
_NUMBER: Final[dict[_State, tuple[tuple[frozenset[str], _State], ...]]] = {
    _State.MINUS: ((frozenset("0"), _State.ZERO), (_DIGITS, _State.INTEGER)),
    _State.ZERO: ((frozenset("."), _State.POINT), (frozenset("eE"), _State.E)),
    _State.INTEGER: (
        (_DIGITS, _State.INTEGER),
        (frozenset("."), _State.POINT),
        (frozenset("eE"), _State.E),
    ),
    _State.POINT: ((_DIGITS, _State.FRACTION),),
    _State.FRACTION: ((_DIGITS, _State.FRACTION), (frozenset("eE"), _State.E)),
    _State.E: ((frozenset("+-"), _State.E_SIGN), (_DIGITS, _State.EXPONENT)),
    _State.E_SIGN: ((_DIGITS, _State.EXPONENT),),
    _State.EXPONENT: ((_DIGITS, _State.EXPONENT),),
}
_WHOLE_NUMBER: Final = frozenset({_State.ZERO, _State.INTEGER, _State.FRACTION, _State.EXPONENT})
_BETWEEN: Final = frozenset(
    {_State.VALUE, _State.FIRST_ITEM, _State.FIRST_KEY, _State.KEY, _State.COLON, _State.BEHIND}
)


class JsonScanner:
    """Follows one value; each character is looked at once.

    Attributes:
        done: the value has ended. A number ends with the character behind it, which is not part of it.
        position: where in the text of the last call the first character is that was not taken.
    """

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._stack: list[str] = []
        self._in_key = False
        self._literal = ""
        self._hex_left = 0
        self.done = False
        self.position = 0

    def scan(self, text: str, start: int, end: int) -> None:
        """Go on with ``text[start:end]``, up to :attr:`position`.

        Raises Malformed: the character there does not fit; of no use after that.
        """
        self.position = start
        while self.position < end and not self.done:
            if self._state in _BETWEEN:
                self._skip(_SPACE, text, end)
            elif self._state is _State.STRING:
                self._skip(_PLAIN, text, end)
            if self.position < end:
                self.position += self._take(text[self.position])

    def _skip(self, pattern: re.Pattern[str], text: str, end: int) -> None:
        match = pattern.match(text, self.position, end)
        assert match is not None
        self.position = match.end()

    def _take(self, char: str) -> int:
        """Take a character; how many were taken: 0 if it comes after a number."""
        if self._state in _BETWEEN:
            self._between(char)
        elif self._state is _State.STRING:
            self._in_string(char)
        else:
            return self._within(char)
        return 1

    def _between(self, char: str) -> None:
        state = self._state
        if state is _State.VALUE or (state is _State.FIRST_ITEM and char != "]"):
            self._begin(char)
        elif state in (_State.KEY, _State.FIRST_KEY) and char == '"':
            self._state, self._in_key = _State.STRING, True
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.BEHIND and char == ",":
            self._state = _State.KEY if self._stack[-1] == "}" else _State.VALUE
        elif state in (_State.FIRST_ITEM, _State.FIRST_KEY, _State.BEHIND) and char == self._stack[-1]:
            self._stack.pop()
            self._end_value()
        else:
            raise Malformed

    def _begin(self, char: str) -> None:
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                raise Malformed
            self._stack.append("}" if char == "{" else "]")
            self._state = _State.FIRST_KEY if char == "{" else _State.FIRST_ITEM
        elif char == '"':
            self._state, self._in_key = _State.STRING, False
        elif char in _LITERALS:
            self._state, self._literal = _State.LITERAL, _LITERALS[char][1:]
        elif char == "-":
            self._state = _State.MINUS
        elif char in _DIGITS:
            self._state = _State.ZERO if char == "0" else _State.INTEGER
        else:
            raise Malformed

    def _end_value(self) -> None:
        self._state = _State.BEHIND
        self.done = not self._stack

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = _State.ESCAPE
        elif char != '"':
            raise Malformed  # a bare control character
        elif self._in_key:
            self._state = _State.COLON
        else:
            self._end_value()

    def _within(self, char: str) -> int:
        state = self._state
        if state is _State.ESCAPE:
            if char not in '"\\/bfnrtu':
                raise Malformed
            self._state, self._hex_left = (_State.HEX, 4) if char == "u" else (_State.STRING, 0)
        elif state is _State.HEX:
            if char not in _HEX:
                raise Malformed
            self._hex_left -= 1
            if not self._hex_left:
                self._state = _State.STRING
        elif state is _State.LITERAL:
            if char != self._literal[0]:
                raise Malformed
            self._literal = self._literal[1:]
            if not self._literal:
                self._end_value()
        else:
            return self._in_number(char)
        return 1

    def _in_number(self, char: str) -> int:
        for chars, state in _NUMBER[self._state]:
            if char in chars:
                self._state = state
                return 1
        if self._state not in _WHOLE_NUMBER:
            raise Malformed
        self._end_value()
        return 0
