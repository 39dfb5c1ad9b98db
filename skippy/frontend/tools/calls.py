"""Tool calls out of an answer's text: what one call is made of, whatever marks it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Final

from .deltas import CallArguments, CallBegin, CallBroken, CallEnd, Delta
from .formats import PARAMETER_ENDS, PARAMETER_TAG
from .json_scan import JsonScanner, Malformed
from .source import Cut, Source, Steps

MAX_NAME: Final = 64
"""Characters of a tool's name, as in OpenAI's API."""
_MAX_KEY: Final = 6 * MAX_NAME + 2
_PARAMETER_END: Final = re.compile("|".join(PARAMETER_ENDS))
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_ARGUMENTS: Final = ("arguments", "parameters")
_BARE_KEYS: Final = frozenset({"name", "id", "type", *_ARGUMENTS})
"""Keys of a call that nothing marks as one: an object with any other is an answer in JSON."""


class Enough(Exception):
    """The one call that was wanted is complete."""


class CallReader:
    """Reads calls out of a source, and says what they are as soon as that is certain.

    The methods that read raise Malformed where the text is no call of a known tool, and Cut where it ends
    too early; both leave a call that has begun open. They raise Enough where ``parallel`` is false.

    Args:
        names: of the tools there are; a call of another one is malformed.
        new_id: makes the id of a call.
        emit: takes what was read.
        texts: of each tool, the parameters that are texts.
        parallel: whether there may be more than one call.

    Attributes:
        begun, ended, broken: calls.
    """

    def __init__(
        self,
        source: Source,
        names: Collection[str],
        new_id: Callable[[], str],
        emit: Callable[[Delta], None],
        *,
        parallel: bool = True,
        texts: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._texts = texts or {}
        self._source = source
        self._names = names
        self._new_id = new_id
        self._emit = emit
        self._parallel = parallel
        self._index: int | None = None
        self.begun = 0
        self.ended = 0
        self.broken = 0

    @property
    def is_open(self) -> bool:
        return self._index is not None

    def break_off(self) -> None:
        """Declare the open call void, if there is one."""
        if self._index is not None:
            self._emit(CallBroken(self._index))
            self._index = None
            self.broken += 1

    def begin(self, name: str) -> None:
        if name not in self._names:
            raise Malformed
        self._index = self.begun
        self.begun += 1
        self._emit(CallBegin(self._index, self._new_id(), name))

    def end(self) -> None:
        assert self._index is not None
        self._emit(CallEnd(self._index))
        self._index = None
        self.ended += 1
        # What was read so far is never given back: it was a call.
        self._source.mark()
        if not self._parallel:
            raise Enough

    def named(self, name: str, opened: str = "") -> Steps[None]:
        """A call whose name has been read; its arguments, an object, come next.

        Args:
            opened: the beginning of the arguments that has been read, or nothing.
        """
        self.begin(name)
        if not opened and (yield from self._source.space()) not in ("{", ""):
            raise Malformed
        yield from self._stream(opened)
        self.end()

    def tagged(self, name: str) -> Steps[None]:
        """A call whose name has been read; its arguments come next, each between tags of its own."""
        self.begin(name)
        keys: set[str] = set()
        self._whole("{")
        while True:
            yield from self._source.space()
            if (yield from self._source.expect(PARAMETER_TAG, "</function>")) == "</function>":
                break
            key, _ = yield from self._source.until((">",), MAX_NAME)
            if key in keys:
                raise Malformed
            self._whole(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            yield from self._source.one_of("\n")
            if key in self._texts.get(name, ()):
                yield from self._text_value()
            else:
                yield from self._other_value()
        self._whole("}")
        self.end()

    def _text_value(self) -> Steps[None]:
        self._whole('"')
        word = None
        while word is None:
            text, word = yield from self._source.before(_PARAMETER_END, PARAMETER_ENDS)
            if text:
                self._whole(json.dumps(text, ensure_ascii=False)[1:-1])
            elif word is None:
                raise Cut
        self._whole('"')

    def _other_value(self) -> Steps[None]:
        """JSON; what is none counts as a text. Templates show Python's words for some values."""
        parts, word = [], None
        while word is None:
            text, word = yield from self._source.before(_PARAMETER_END, PARAMETER_ENDS)
            if not text and word is None:
                raise Cut
            parts.append(text)
        text = "".join(parts).strip()
        text = _PYTHON.get(text, text)
        self._whole(text if _is_json(text) else json.dumps(text, ensure_ascii=False))

    def either(self, *, bare: bool = False) -> Steps[None]:
        """A call object, or an array of at least one. ``bare``: nothing has marked it."""
        if (yield from self._source.space()) == "[":
            yield from self.array(bare=bare)
        else:
            yield from self.object(bare=bare)

    def array(self, *, bare: bool = False) -> Steps[None]:
        """An array of at least one call object."""
        word = yield from self._source.expect("[")
        while word != "]":
            yield from self._source.space()
            yield from self.object(bare=bare)
            yield from self._source.space()
            word = yield from self._source.expect(",", "]")

    def object(self, *, bare: bool = False) -> Steps[None]:
        """``{"name": …, "arguments" or "parameters": …}``, in either order, perhaps with other keys."""
        yield from self._source.expect("{")
        yield from self._source.space()
        yield from self.members((yield from self.key()), bare=bare)

    def key(self) -> Steps[str]:
        """A string, of a name's length at most."""
        if (yield from self._source.peek()) not in ('"', ""):
            raise Malformed
        text: str = json.loads((yield from self._source.value(_MAX_KEY)))
        return text

    def members(self, key: str, *, bare: bool) -> Steps[None]:
        """A call object from behind its first key."""
        name: str | None = None
        held: str | None = None
        while True:
            yield from self._source.space()
            yield from self._source.expect(":")
            char = yield from self._source.space()
            if key == "name" and name is None:
                name = yield from self.key()
                self.begin(name)
                if held is not None:
                    self._whole(held)
            elif key in _ARGUMENTS and held is None:
                held = yield from self._arguments(char)
            elif key in ("name", *_ARGUMENTS) or (bare and key not in _BARE_KEYS):
                raise Malformed
            else:
                yield from self._source.value(sys.maxsize)
            yield from self._source.space()
            if (yield from self._source.expect(",", "}")) == "}":
                break
            yield from self._source.space()
            key = yield from self.key()
        if name is None:
            raise Malformed
        if held is None:
            self._whole("{}")
        self.end()

    def _arguments(self, char: str) -> Steps[str]:
        """The value of the arguments' key, which begins with ``char``; said at once if the name is known."""
        if self.is_open and char == "{":
            yield from self._stream()
            return ""
        value = yield from self._source.value(sys.maxsize)
        if char == '"':
            value = json.loads(value)
        elif value == "null":
            value = "{}"
        if not _is_object(value):
            raise Malformed
        if self.is_open:
            self._whole(value)
        return value

    def _whole(self, arguments: str) -> None:
        assert self._index is not None
        self._emit(CallArguments(self._index, arguments))

    def _stream(self, opened: str = "") -> Steps[None]:
        scanner = JsonScanner()
        if opened:
            scanner.scan(opened, 0, len(opened))
            self._whole(opened)
        while not scanner.done:
            if text := (yield from self._source.scan(scanner)):
                self._whole(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(word)


def _is_object(text: str) -> bool:
    """Whether ``text`` is a JSON object that can be sent on."""
    scanner = JsonScanner()
    try:
        text.encode("utf-8")
        scanner.scan(text, 0, len(text))
    except (Malformed, UnicodeEncodeError):
        return False
    return scanner.done and text.lstrip().startswith("{") and not text[scanner.position :].strip(" \t\r\n")
