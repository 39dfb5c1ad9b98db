"""How each format arranges calls. Every function reads what comes behind its mark.

They raise as :class:`CallReader` does. What is read after a call has ended is lost, so what may be text must
stay unread.
"""

from __future__ import annotations

import re

from .calls import MAX_NAME, CallReader
from .formats import (
    ARGS,
    CALL_ID,
    CALL_TAGS,
    FUNCTION_TAG,
    FUNCTIONARY_SEPARATOR,
    HARMONY_CHANNEL,
    HARMONY_MESSAGE,
    HARMONY_START,
    PYTHON_TAG,
    DeepSeekWords,
)
from .json_scan import Malformed
from .source import Source, Steps

_MAX_ID = 64
_MAX_HEADER = 2 * MAX_NAME
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def tagged(source: Source, calls: CallReader, opener: str) -> Steps[None]:
    """Call objects, or arrays of them, and the tag that fits ``opener``; models forget that."""
    char = "{"
    while char == "{":
        yield from calls.either()
        char = yield from source.space()
    yield from source.closing(CALL_TAGS[opener])


def llama3(source: Source, calls: CallReader) -> Steps[None]:
    """Call objects with ``;`` between them, each perhaps behind the tag."""
    while True:
        yield from source.space()
        yield from source.one_of(PYTHON_TAG)
        yield from source.space()
        yield from calls.object(bare=True)
        char = yield from source.space()
        if (yield from source.one_of(";", PYTHON_TAG)) is None and char != "{":
            return


def mistral(source: Source, calls: CallReader) -> Steps[None]:
    """An array of call objects; or a name, perhaps an id, and the arguments."""
    if (yield from source.space()) == "[":
        yield from calls.array()
        return
    name, word = yield from source.until((ARGS, CALL_ID, "{"), MAX_NAME)
    if word == CALL_ID:
        yield from source.until((ARGS,), _MAX_ID)
    yield from calls.named(name.strip(), "{" if word == "{" else "")


def deepseek(source: Source, calls: CallReader, words: DeepSeekWords, opener: str) -> Steps[None]:
    """Calls, each between its own tokens."""
    if opener == words.calls_begin:
        yield from source.space()
        yield from source.expect(words.call_begin)
    word: str | None = words.call_begin
    while word == words.call_begin:
        head, _ = yield from source.until((words.separator,), MAX_NAME)
        fenced = None
        if (yield from source.space()) == "{":
            yield from calls.named(head.strip())
        else:
            name, _ = yield from source.until(("\n",), MAX_NAME)
            yield from source.space()
            fenced = yield from source.one_of("```json", "{")
            if fenced is None:
                raise Malformed
            yield from calls.named(name.strip(), "{" if fenced == "{" else "")
        yield from source.space()
        if fenced == "```json":
            yield from source.closing("```")
            yield from source.space()
        yield from source.closing(words.call_end)
        yield from source.space()
        word = yield from source.closing(words.call_begin, words.calls_end)


def functionary(source: Source, calls: CallReader) -> Steps[None]:
    """Whom the text is for: ``all``, which is content, or a tool."""
    yield from source.one_of(FUNCTIONARY_SEPARATOR)
    name, _ = yield from source.until(("\n",), MAX_NAME)
    if name.strip() != "all":
        yield from calls.named(name.strip())


def function_tag(source: Source, calls: CallReader) -> Steps[None]:
    """A name, ``>`` and the arguments."""
    name, _ = yield from source.until((">",), MAX_NAME)
    yield from calls.named(name.strip())
    yield from source.space()
    yield from source.closing("</function>")


def coder(source: Source, calls: CallReader, opener: str) -> Steps[None]:
    """Functions with tags around their arguments, or objects; models forget the outermost tag."""
    inside = opener != FUNCTION_TAG
    if inside and (yield from source.space()) == "{":
        yield from tagged(source, calls, opener)
        return
    if inside:
        yield from source.expect(FUNCTION_TAG)
    more: str | None = FUNCTION_TAG
    while more:
        name, _ = yield from source.until((">",), MAX_NAME)
        yield from calls.tagged(name.strip())
        yield from source.space()
        more = (yield from source.one_of(FUNCTION_TAG)) if inside else None
    yield from source.closing(CALL_TAGS[opener] if inside else "</tool_call>")


def generic(source: Source, calls: CallReader) -> Steps[None]:
    """``{"tool_calls": [call, …]}``, ``{"tool_call": call}``, or what these hold; perhaps in a fence."""
    yield from source.space()
    fenced = yield from source.one_of("```")
    if fenced:
        yield from source.one_of("json")
    if (yield from source.space()) == "[":
        yield from calls.array(bare=True)
    else:
        yield from source.expect("{")
        yield from source.space()
        key = yield from calls.key()
        if key in ("tool_calls", "tool_call"):
            yield from source.space()
            yield from source.expect(":")
            yield from calls.either()
            yield from source.space()
            yield from source.closing("}")
        else:
            yield from calls.members(key, bare=True)
    if fenced:
        yield from source.space()
        yield from source.closing("```")


def harmony_header(source: Source, opener: str) -> Steps[tuple[str, str, str]]:
    """A message's header, of which ``opener`` has been read: its text, the channel, and the tool it is for.

    Names that it does not give are empty.
    """
    text = opener
    while not text.endswith(HARMONY_MESSAGE):
        part, word = yield from source.until((HARMONY_MESSAGE, HARMONY_CHANNEL, HARMONY_START), _MAX_HEADER)
        if word == HARMONY_START or (word == HARMONY_CHANNEL and HARMONY_CHANNEL in text):
            raise Malformed
        text += part + word
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return text, channel[1] if channel else "", recipient[1] if recipient else ""
