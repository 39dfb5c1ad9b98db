"""An answer's text, as it comes, → content, reasoning and tool calls. Sans-IO.

Each format is a generator that reads from a :class:`Source`, so that a text may be cut anywhere: what comes
out depends on the text alone, and the work grows with its length alone.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

from . import layouts
from .calls import CallReader, Enough
from .deltas import Content, Delta, Reasoning
from .formats import (
    CALL_TAGS,
    DEEPSEEK_WORDS,
    FUNCTION_TAG,
    FUNCTIONARY_SEPARATOR,
    HARMONY_CHANNEL,
    HARMONY_ENDS,
    HARMONY_START,
    HARMONY_TOOLS,
    PYTHON_TAG,
    TOOL_CALLS,
    ReasoningTags,
    ToolFormat,
)
from .json_scan import Malformed
from .source import Cut, Source, Steps

_SPACE: Final = " \t\n\r"
_MISTRAL_ID: Final = string.ascii_letters + string.digits


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_mistral_id() -> str:
    """Mistral's templates refuse ids that are not nine letters or digits."""
    return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))


class _Text:
    """Emits text; white space at its end waits for what follows.

    Attributes:
        skips: white space that comes next is dropped.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._waiting: list[str] = []
        self._gap = ""
        self._said = False
        self.skips = False

    def say(self, text: str) -> None:
        if self.skips:
            text = text.lstrip(_SPACE)
        core = text.rstrip(_SPACE)
        if core:
            self._emit(self._gap + self.take() + core)
            self._gap, self._said, self.skips = "", True, False
        if len(core) < len(text):
            self._waiting.append(text[len(core) :])

    def say_all(self, text: str) -> bool:
        """:meth:`say` where nothing that follows has a use for white space; whether anything was said."""
        if self.skips:
            text = text.lstrip(_SPACE)
        if text:
            self._emit(self.take() + text)
            self.skips = False
        return bool(text)

    def paragraph(self) -> None:
        """What is said next is a paragraph of its own."""
        if self._said:
            self.take()
            self._gap, self.skips = "\n\n", True

    def take(self) -> str:
        """The white space that waits, which does so no longer."""
        text = "".join(self._waiting)
        self._waiting.clear()
        return text


class OutputParser:
    """Splits one answer.

    A malformed call, or one of a tool that is not there, is given back as content, all of its text. What was
    already said of it is declared void by a CallBroken. A call in which the text ends keeps the arguments it
    has, and never gets a CallEnd; one that ends before its name is known is content, or nothing if calls come
    before it. White space between calls and content is dropped.

    Args:
        tools: how the model writes calls; None: it is not to call, and text that looks like one is text.
        names: of the tools it may call.
        parallel: whether it may call more than one; if not, the answer ends with the first.
        reasoning: how it marks reasoning; None: nothing is taken for such.
        thinks: the prompt ends within reasoning, so the answer begins there.
        texts: of each tool, the parameters that are texts, for formats in which that does not show.
        opened: the beginning of the answer that the prompt ends with, which is only marks.
        new_id: makes calls' ids.

    Attributes:
        thinking: what comes is reasoning, as far as that is known.
        done: the rest of the answer is not wanted.
        transparent: all that comes is content as it is, and need not be fed.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        names: Collection[str] = (),
        *,
        parallel: bool = True,
        reasoning: ReasoningTags | None = None,
        thinks: bool = False,
        texts: Mapping[str, Collection[str]] | None = None,
        opened: str = "",
        new_id: Callable[[], str] | None = None,
    ) -> None:
        if new_id is None:
            new_id = _new_mistral_id if tools is ToolFormat.MISTRAL else _new_id
        self._tools = tools
        self._tags = reasoning
        self._thinks = thinks
        self._deltas: list[Delta] = []
        self._source = Source()
        self._calls = CallReader(self._source, names, new_id, self._take, parallel=parallel, texts=texts)
        self._content = _Text(lambda text: self._deltas.append(Content(text)))
        self._steps = self._answer()
        self._finished = False
        self.thinking = False
        self.done = False
        self.transparent = False
        self._source.add(opened)
        self._go_on()

    @property
    def examined(self) -> int:
        """Characters that were looked at, each as often as it was: what the work grows with."""
        return self._source.examined

    def feed(self, text: str) -> list[Delta]:
        """What ``text`` adds to the answer."""
        if self._finished or not text:
            return []
        self._source.add(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        """What was held back, now that no more text comes."""
        if self._finished:
            return []
        self._source.end()
        return self._go_on()

    def finish_reason(self, reason: Literal["stop", "length"]) -> Literal["stop", "length", "tool_calls"]:
        """Why the answer ended, given why its tokens did: ``tool_calls`` if it made some, and whole ones."""
        calls = self._calls
        whole = calls.ended and not calls.is_open and not calls.broken
        return "tool_calls" if whole and (reason == "stop" or self.done) else reason

    def _go_on(self) -> list[Delta]:
        try:
            next(self._steps)
        except StopIteration:
            self._finished = True
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def _answer(self) -> Steps[None]:
        try:
            if self._tags is not None and self._tools is not ToolFormat.HARMONY:
                yield from self._think(self._tags)
            yield from self._body()
        except Enough:
            self.done = True
        except Cut:
            pass
        waiting = self._content.take()
        if waiting and not self._calls.ended:
            self._take(Content(waiting))

    def _body(self) -> Steps[None]:
        source, calls = self._source, self._calls
        match self._tools:
            case None:
                yield from self._all_text()
            case ToolFormat.HERMES:
                yield from self._marked(tuple(CALL_TAGS), lambda tag: layouts.tagged(source, calls, tag))
            case ToolFormat.LLAMA3:
                yield from self._attempt("", layouts.llama3(source, calls))
                yield from self._marked((PYTHON_TAG,), lambda _: layouts.llama3(source, calls))
            case ToolFormat.MISTRAL:
                yield from self._marked((TOOL_CALLS,), lambda _: layouts.mistral(source, calls))
            case ToolFormat.DEEPSEEK:
                words = {w.calls_begin: w for w in DEEPSEEK_WORDS} | {w.call_begin: w for w in DEEPSEEK_WORDS}
                yield from self._marked(
                    tuple(words), lambda word: layouts.deepseek(source, calls, words[word], word)
                )
            case ToolFormat.FUNCTIONARY:
                yield from self._attempt("", layouts.functionary(source, calls))
                yield from self._marked(
                    (FUNCTIONARY_SEPARATOR,), lambda _: layouts.functionary(source, calls)
                )
            case ToolFormat.FUNCTION_TAG:
                yield from self._marked((FUNCTION_TAG,), lambda _: layouts.function_tag(source, calls))
            case ToolFormat.CODER:
                yield from self._marked(
                    (*CALL_TAGS, FUNCTION_TAG), lambda tag: layouts.coder(source, calls, tag)
                )
            case ToolFormat.HARMONY:
                yield from self._harmony()
            case ToolFormat.GENERIC:
                yield from self._attempt("", layouts.generic(source, calls))
                yield from self._all_text()

    def _think(self, tags: ReasoningTags) -> Steps[None]:
        self._source.mark()
        yield from self._source.space()
        opened = yield from self._source.one_of(tags.begin)
        space = self._source.release()
        if not (opened or self._thinks):
            self._content.say(space)
            return
        thought = self._thought()
        words = (tags.end,)
        pattern = _pattern(words)
        word = None
        self.thinking = True
        while word is None:
            text, word = yield from self._source.before(pattern, words)
            thought.say(text)
            if not text and word is None:
                raise Cut
        self.thinking = False
        self._content.skips = True

    def _thought(self) -> _Text:
        thought = _Text(lambda text: self._deltas.append(Reasoning(text)))
        thought.skips = True
        return thought

    def _harmony(self) -> Steps[None]:
        """Messages. What has no header is content, and so is what is said on channels that nobody knows."""
        source, content = self._source, self._content
        analysis = content if self._tags is None else self._thought()
        opener: str | None = None
        while True:
            kept = opener or ""
            source.mark()
            if opener is None:
                yield from source.space()
                opener = yield from source.one_of(HARMONY_START, HARMONY_CHANNEL, HARMONY_TOOLS)
            header = channel = tool = ""
            if opener is not None:
                with contextlib.suppress(Malformed):
                    header, channel, tool = yield from layouts.harmony_header(source, opener)
            kept += source.release()
            text = analysis if channel == "analysis" and not tool else content
            if tool:
                yield from self._attempt(header, self._calls.named(tool))
            else:
                text.paragraph()
                text.say("" if header else kept)
            opener = yield from self._message(text)

    def _message(self, text: _Text) -> Steps[str | None]:
        """The text of a message up to its end. Returns the mark with which the next one has begun, if so."""
        words = (*HARMONY_ENDS, HARMONY_START, HARMONY_CHANNEL)
        pattern = _pattern(words)
        self.thinking = text is not self._content
        while True:
            said, word = yield from self._source.before(pattern, words)
            text.say(said)
            if word is not None:
                self.thinking = False
                return None if word in HARMONY_ENDS else word
            if not said:
                raise Cut

    def _all_text(self) -> Steps[None]:
        while text := (yield from self._source.some()):
            self.transparent = self._content.say_all(text)

    def _marked(self, words: Sequence[str], calls: Callable[[str], Steps[None]]) -> Steps[None]:
        """Content, with calls behind each of ``words``, up to the end of the text."""
        pattern = _pattern(words)
        while True:
            text, word = yield from self._source.before(pattern, words)
            self._content.say(text)
            if word is not None:
                yield from self._attempt(word, calls(word))
            elif not text:
                return

    def _attempt(self, word: str, calls: Steps[None]) -> Steps[None]:
        """Read calls; what turns out to be none is content. ``word`` has come before them."""
        before = self._content.take() + word
        ended = self._calls.ended
        self._source.mark()
        try:
            yield from calls
        except Malformed:
            self._calls.break_off()
            if self._calls.ended > ended:
                before, self._content.skips = "", True
            self._content.say(before + self._source.release())
        except Cut:
            self._source.rest()
            if not self._calls.is_open and self._calls.ended == ended:
                self._content.say(before + self._source.release())
            raise
        else:
            self._source.release()
            self._content.skips = True


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))
