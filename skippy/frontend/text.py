"""Token bytes → text: incremental UTF-8, and stop strings that may cross token borders."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence


class Detokeniser:
    """Bytes in, valid text out; an incomplete character waits for its next bytes.

    Bytes that can never become UTF-8 turn into U+FFFD, as do the leftovers at :meth:`finish`; the text does
    not depend on how the bytes were cut into pieces.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether a character has begun and is not complete."""
        return bool(self._decoder.getstate()[0])

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def longest_prefix(text: str, words: Sequence[str], start: int = 0) -> int:
    """Where the longest end of ``text[start:]`` begins that is a proper prefix of one of ``words``."""
    longest = max(map(len, words))
    for at in range(max(start, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(len(word) > len(tail) and word.startswith(tail) for word in words):
            return at
    return len(text)


class StopMatcher:
    """Text in, text out, up to the first stop string.

    Text that may still grow into a stop string is held back. The match that begins earliest wins, of those
    that begin at one place the shortest; the match and all after it are dropped.

    Attributes:
        found: the stop string that was found; None: none yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(set(stops), key=len))
        # Alternatives in order of length: at one place the regular expression tries the shortest first.
        self._pattern = re.compile("|".join(map(re.escape, self._stops))) if self._stops else None
        self._held = ""
        self.found: str | None = None

    @property
    def seeks(self) -> bool:
        """Whether there is anything to look for: without, text comes out as it goes in."""
        return self._pattern is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; from then on nothing more comes out."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Text that is now certain to come before any stop string."""
        if self.stopped or self._pattern is None:
            return "" if self.stopped else text
        text = self._held + text
        keep = longest_prefix(text, self._stops)
        match = self._pattern.search(text)
        # A longer stop string that began earlier may still complete: wait for it.
        if match is not None and match.start() <= keep:
            self.found, self._held = match.group(), ""
            return text[: match.start()]
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, if nothing completed it."""
        text, self._held = self._held, ""
        if self.stopped or self._pattern is None:
            return ""
        match = self._pattern.search(text)
        if match is None:
            return text
        self.found = match.group()
        return text[: match.start()]
