"""Texts of special tokens that come from clients stay text, wherever a template puts them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any, Final

import attrs

_SHORTEST_PART: Final = 2
"""Characters of a special token's text that, at a text's border, may become it with what stands beside."""
_DIGITS: Final = 20
_MARK: Final = "qz"
# Between the digits is a quotation mark, or what a template has made of it.
_PLACEHOLDER: Final = re.compile(
    rf"{_MARK}(\d{{{_DIGITS}}})(.{{0,32}}?)(?=(\d{{{_DIGITS}}}))", re.ASCII | re.IGNORECASE
)


@attrs.frozen(slots=True)
class PromptSegment:
    """A part of a rendered prompt; texts of special tokens count as such only in a ``trusted`` one."""

    text: str
    trusted: bool


class SpecialTexts:
    """The texts of a vocabulary's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None
        parts = [(text, range(_SHORTEST_PART, len(text))) for text in known]
        self._beginnings = frozenset(text[:size] for text, sizes in parts for size in sizes)
        self._ends = frozenset(text[-size:] for text, sizes in parts for size in sizes)
        self._longest = len(known[0]) if known else 0

    def concern(self, text: str) -> bool:
        """Whether ``text`` has one, or may be part of one together with what comes before or after it."""
        if self._pattern is None:
            return False
        if self._pattern.search(text) is not None:
            return True
        sizes = range(_SHORTEST_PART, min(len(text) + 1, self._longest))
        return any(text[-size:] in self._beginnings or text[:size] in self._ends for size in sizes)


class Guard:
    """Takes texts of one request out of a rendering, and puts them back as untrusted segments.

    A text that concerns a special token is replaced by a placeholder that nobody can guess before the
    template runs. It has a quotation mark in it: the backslashes before that tell how often the template has
    made JSON of it, as templates do of tools, and so the text is escaped as often when it is put back.
    """

    def __init__(self, special: SpecialTexts) -> None:
        self._special = special
        self._originals: dict[str, str] = {}

    def text(self, text: str) -> str:
        if not self._special.concern(text):
            return text
        # White space stays outside, where the template can trim it.
        core = text.strip()
        if not self._special.concern(core):
            core = text
        before, after = text.split(core, 1)
        # Letters and digits mean nothing in JSON strings, HTML or regular expressions.
        left, right = (str(secrets.randbelow(10**_DIGITS)).zfill(_DIGITS) for _ in range(2))
        self._originals[left + right] = core
        return f'{before}{_MARK}{left}"{right}{after}'

    def value(self, value: Any) -> Any:
        """A JSON value with all its texts, keys too, passed through :meth:`text`."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def segments(self, rendered: str) -> list[PromptSegment]:
        """The rendered prompt, in order."""
        result: list[PromptSegment] = []
        end = 0
        if self._originals:
            for match in _PLACEHOLDER.finditer(rendered):
                core = self._originals.get(match[1] + match[3])
                if core is not None:
                    _add(result, rendered[end : match.start()], trusted=True)
                    _add(result, _escaped(core, match[2]), trusted=False)
                    end = match.end() + _DIGITS
        _add(result, rendered[end:], trusted=True)
        return result


def _add(segments: list[PromptSegment], text: str, *, trusted: bool) -> None:
    if text:
        segments.append(PromptSegment(text, trusted))


def _escaped(text: str, mark: str) -> str:
    """``text`` as a JSON string without its quotation marks, made as often as made ``mark`` of one.

    What templates do otherwise with a quotation mark does not matter to the text.
    """
    backslashes = mark.count("\\") if mark.endswith('"') else 0
    for _ in range((backslashes + 1).bit_length() - 1):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text
