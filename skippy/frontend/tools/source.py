"""Text that arrives in pieces, read from front to back by generators that yield when they need more."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from skippy.frontend.text import longest_prefix

from .json_scan import JsonScanner, Malformed

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Runs until it needs more text, and goes on when there is some or none will come."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")


class Cut(Exception):
    """The text has ended where more was needed."""


class Source:
    """The text that has come and is not yet read.

    What is read after :meth:`mark` can be had back as a whole. Nothing here looks at a character more often
    than a small number of times, however the text is cut: what waits to be read is never longer than a piece
    and the longest word that is looked for.

    Attributes:
        ended: no more text will come.
        examined: characters that have been looked at, each as often as it was.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.ended = False
        self.examined = 0

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self.examined += len(self._text)

    def end(self) -> None:
        """No more text will come."""
        self.add("")
        self.ended = True

    def mark(self) -> None:
        """Keep what is read from here on."""
        self._kept = []

    def release(self) -> str:
        """What has been read since :meth:`mark`; keep no more of it."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def _advance(self, end: int) -> str:
        """Read up to ``end`` of the present text."""
        text = self._text[self._at : end]
        self.examined += len(text)
        self._at = end
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _more(self) -> Steps[None]:
        """Wait for more text. Raises Cut."""
        if self.ended:
            raise Cut
        yield

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def rest(self) -> str:
        """Read what has come."""
        return self._advance(len(self._text))

    def some(self) -> Steps[str]:
        """Read all the text there is, once there is some; empty at the end."""
        yield from self.peek()
        return self.rest()

    def space(self) -> Steps[str]:
        """Read the white space that comes next, and the character behind it, unread; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._advance(match.end())
            if self._at < len(self._text) or self.ended:
                return self._text[self._at : self._at + 1]
            yield

    def one_of(self, *words: str) -> Steps[str | None]:
        """Read whichever of ``words`` comes next; None, and nothing is read, if none does.

        No word may begin another.
        """
        longest = max(map(len, words))
        while True:
            rest = self._text[self._at : self._at + longest]
            self.examined += len(rest)
            for word in words:
                if rest.startswith(word):
                    return self._advance(self._at + len(word))
            if self.ended or not any(word.startswith(rest) for word in words):
                return None
            yield

    def closing(self, *words: str) -> Steps[str | None]:
        """As :meth:`one_of`; a word in which the text ends is read too, but not returned."""
        found = yield from self.one_of(*words)
        if found is None and self._ends_within(words):
            self.rest()
        return found

    def _ends_within(self, words: Sequence[str]) -> bool:
        """Whether the text ends in one of ``words``, which is not all there."""
        rest = self._text[self._at :]
        return self.ended and any(word.startswith(rest) for word in words)

    def expect(self, *words: str) -> Steps[str]:
        """Read one of ``words``. Raises Malformed for other text, Cut where the text ends within it."""
        found = yield from self.one_of(*words)
        if found is None:
            raise Cut if self._ends_within(words) else Malformed
        return found

    def until(self, words: Sequence[str], limit: int) -> Steps[tuple[str, str]]:
        """Read the text before one of ``words``, and the word.

        Raises Malformed: not within ``limit`` characters; Cut.
        """
        pattern = re.compile("|".join(map(re.escape, words)))
        longest = max(map(len, words))
        start = self._at
        while True:
            match = pattern.search(self._text, start, self._at + limit + longest)
            if match is not None and match.start() - self._at <= limit:
                before = self._advance(match.start())
                return before, self._advance(match.end())
            waiting = min(len(self._text) - self._at, limit + longest)
            self.examined += self._at + waiting - start
            if match is not None or waiting == limit + longest:
                raise Malformed
            yield from self._more()
            # What was searched is at the front now.
            start = max(0, waiting - longest + 1)

    def before(self, pattern: re.Pattern[str], words: Sequence[str]) -> Steps[tuple[str, str | None]]:
        """Read some text that comes before the next of ``words``, and the word if that is reached.

        Args:
            pattern: finds them.

        Returns: text, perhaps none; the word, or None while it has not come. At the end: no text, no word.
        """
        while True:
            match = pattern.search(self._text, self._at)
            self.examined += (len(self._text) if match is None else match.end()) - self._at
            if match is not None:
                text = self._advance(match.start())
                return text, self._advance(match.end())
            end = len(self._text) if self.ended else longest_prefix(self._text, words, self._at)
            if end > self._at or self.ended:
                return self._advance(end), None
            yield

    def value(self, limit: int) -> Steps[str]:
        """Read a JSON value of at most ``limit`` characters. Raises Malformed, Cut."""
        parts: list[str] = []
        scanner = JsonScanner()
        while not scanner.done:
            if not limit:
                raise Malformed
            part = yield from self.scan(scanner, limit)
            parts.append(part)
            limit -= len(part)
        return "".join(parts)

    def scan(self, scanner: JsonScanner, limit: int = sys.maxsize) -> Steps[str]:
        """Read on in a JSON value: at most ``limit`` characters of it. Raises Malformed, Cut.

        What comes before the character that does not fit is read, wherever the pieces of the text end.
        """
        while self._at == len(self._text):
            yield from self._more()
        try:
            scanner.scan(self._text, self._at, min(len(self._text), self._at + limit))
        except Malformed:
            self._advance(scanner.position)
            raise
        return self._advance(scanner.position)
