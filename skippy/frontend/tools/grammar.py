"""Grammars over whole answers: reasoning, then calls whose arguments fit their schemas, or other text.

In llguidance's variant of Lark. Its lexer takes the longest lexeme it can, but for rules marked ``lazy``,
which end as soon as they may: so text up to a mark is lazy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from ..json_schema import literal
from .formats import (
    ARGS,
    CALL_TAGS,
    DEEPSEEK_WORDS,
    FUNCTION_TAG,
    FUNCTIONARY_SEPARATOR,
    HARMONY_ANALYSIS,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_FINAL,
    HARMONY_MESSAGE,
    HARMONY_TOOLS,
    HARMONY_TURN,
    PYTHON_TAG,
    TOOL_CALLS,
    ReasoningTags,
    ToolFormat,
)

_TEXT: Final = "TOOL_TEXT"
_RULES: Final = f"{_TEXT}: /(.|\\n)+/\n"
# What a call that nothing marks may begin with.
_BARE: Final = r"{\[`\s"
_GAP: Final = r'("\n\n" | "\n")?'
_LINE: Final = r'"\n"?'
_COMMA: Final = '", "'
_TOOL_CALLS: Final = '{"tool_calls": ['


@attrs.frozen(slots=True, kw_only=True)
class CallRules:
    """What an answer may call, and how it is written.

    Attributes:
        format: how calls are written.
        template: the chat template, whose spelling is taken where a format has several.
        arguments: names of tools, and what stands for their arguments in a grammar.
        required: the answer must be a call.
        parallel: it may have several.
        prompt_end: what the prompt ends with; with HARMONY the marks of a message that it has begun.
    """

    format: ToolFormat
    template: str
    arguments: Mapping[str, str]
    required: bool = False
    parallel: bool = True
    prompt_end: str = ""


def answer_grammar(
    calls: CallRules | None,
    answer: str | None,
    *,
    reasoning: ReasoningTags | None,
    thinks: bool,
    tokens: Mapping[str, int],
) -> str:
    """The grammar of an answer.

    Args:
        calls: None: there are none.
        answer: a grammar, whose first rule is ``start``, for all of the answer that is neither reasoning nor
            calls; None: any text.
        thinks: the answer begins within reasoning.
        tokens: marks that are control tokens, which are no text.
    """
    writer = _Writer(tokens, None if thinks else reasoning)
    rules = "" if answer is None else answer.replace("start:", "tool_answer:", 1)
    if calls is not None and calls.format is ToolFormat.HARMONY:
        said = _harmony(writer, calls, f"{_TEXT}?" if answer is None else "tool_answer")
        return f"start: {said}\n{rules}{_RULES}{''.join(writer.rules)}"
    thought = ""
    if reasoning is not None:
        thought = f"{writer.up_to(reasoning.end)} {_GAP}"
        if not thinks:
            thought = f"({writer.mark(reasoning.begin)} {thought})?"
    if calls is None:
        said = "tool_answer"
    else:
        sequence, free = _LAYOUTS[calls.format](writer, calls)
        any_answer = free if answer is None else f"({sequence} | tool_answer)"
        said = sequence if calls.required else any_answer
    return f"start: {thought} {said}\n{rules}{_RULES}{''.join(writer.rules)}"


class _Writer:
    """Words of a grammar, and the rules that they need.

    Args:
        maybe: what the answer may begin with.
    """

    def __init__(self, tokens: Mapping[str, int], maybe: ReasoningTags | None) -> None:
        self._tokens = tokens
        self._first = "" if maybe is None or maybe.begin in tokens else maybe.begin[0]
        self.rules: list[str] = []

    def rule(self, body: str, attribute: str = "") -> str:
        name = f"tool_{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}\n")
        return name

    def mark(self, text: str) -> str:
        token = self._tokens.get(text)
        return literal(text) if token is None else f"<[{token}]>"

    def frame(self, text: str) -> str:
        """A text in which marks may stand."""
        marks = "|".join(map(re.escape, self._tokens))
        parts = re.split(f"({marks})", text) if marks else [text]
        return " ".join(self.mark(part) for part in parts if part)

    def up_to(self, mark: str) -> str:
        """Any text, or none, and the mark behind it."""
        if mark in self._tokens:
            return f"{_TEXT}? {self.mark(mark)}"
        return self.rule(f"{literal(mark)} | {_TEXT} {literal(mark)}", "[lazy]")

    def plain(self) -> str:
        """Text that cannot become a call that nothing marks, nor reasoning."""
        return rf"/[^{_BARE}{re.escape(self._first)}](.|\n)*/"

    def objects(self, calls: CallRules, key: str = "arguments") -> str:
        """A call of any of the tools, as an object."""
        bodies = []
        for name, rule in calls.arguments.items():
            value = self.rule(rule)
            bodies.append(f'{literal(f"""{{"name": "{name}", "{key}": """)} {value} "}}"')
        return self.rule(" | ".join(bodies))

    def named(self, calls: CallRules, before: str, behind: str = "") -> str:
        """A call of any of the tools: its name between two texts, and its arguments."""
        bodies = []
        for name, rule in calls.arguments.items():
            value = self.rule(rule)
            bodies.append(f"{literal(f'{before}{name}{behind}')} {value}")
        return self.rule(" | ".join(bodies))


def _series(calls: CallRules, first: str, between: str, item: str) -> str:
    """``first``, and, if there may be several calls, any number of ``item`` with ``between`` before each."""
    return f"{first} ({between} {item})*" if calls.parallel else first


def _marked(writer: _Writer, calls: CallRules, mark: str, block: str, gap: str = "") -> tuple[str, str]:
    """Calls each of which begins with ``mark``: all of an answer, and among text."""
    opener = writer.mark(mark)
    one = f"{opener} {block}"
    sequence = _series(calls, one, gap, one)
    opened = f"({writer.up_to(mark)} {block})"
    return sequence, f"{opened}* {_TEXT}?" if calls.parallel else f"({opened} | {_TEXT})?"


def _hermes(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    tag = next((tag for tag in CALL_TAGS if tag in calls.template), "<tool_call>")
    block = f'"\\n" {writer.objects(calls)} "\\n" {writer.mark(CALL_TAGS[tag])}'
    return _marked(writer, calls, tag, writer.rule(block), _LINE)


def _llama3(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    item = writer.objects(calls, "parameters")
    items = _series(calls, item, literal("; "), item)
    sequence = writer.rule(f"({writer.mark(PYTHON_TAG)})? {items}")
    return sequence, f"({sequence} | {writer.plain()})?"


def _mistral(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    if ARGS in calls.template:
        names = " | ".join(
            f"{literal(name)} {writer.mark(ARGS)} {writer.rule(rule)}"
            for name, rule in calls.arguments.items()
        )
        return _marked(writer, calls, TOOL_CALLS, writer.rule(names))
    item = writer.objects(calls)
    block = writer.rule(f'"[" {_series(calls, item, _COMMA, item)} "]"')
    return _marked(writer, attrs.evolve(calls, parallel=False), TOOL_CALLS, block)


def _deepseek(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    words = next(
        (words for words in DEEPSEEK_WORDS if words.calls_begin in calls.template), DEEPSEEK_WORDS[0]
    )
    begin, end = writer.mark(words.call_begin), writer.mark(words.call_end)
    separator = writer.mark(words.separator)
    if "```json" in calls.template:
        named = writer.named(calls, "", "\n```json\n")
        call = f'{begin} "function" {separator} {named} "\\n```" {end}'
    else:
        named = writer.rule(
            " | ".join(
                f"{literal(name)} {separator} {writer.rule(rule)}" for name, rule in calls.arguments.items()
            )
        )
        call = f"{begin} {named} {end}"
    one = writer.rule(call)
    series = _series(calls, one, _LINE, one)
    block = writer.rule(f"{series} {writer.mark(words.calls_end)}")
    return _marked(writer, attrs.evolve(calls, parallel=False), words.calls_begin, block)


def _functionary(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    segment = writer.named(calls, "", "\n")
    mark = writer.mark(FUNCTIONARY_SEPARATOR)
    first = "" if calls.prompt_end.endswith(FUNCTIONARY_SEPARATOR) else mark
    series = _series(calls, segment, mark, segment)
    later = f"({writer.up_to(FUNCTIONARY_SEPARATOR)} {segment})"
    text = f"{later}* {_TEXT}?" if calls.parallel else f"({later} | {_TEXT})?"
    return f"{first} {series}", f"""{first} ({series} | {literal("all" + chr(10))} {text})"""


def _function_tag(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    block = writer.rule(f"{writer.named(calls, '', '>')} {writer.mark('</function>')}")
    return _marked(writer, calls, FUNCTION_TAG, block, _LINE)


def _generic(writer: _Writer, calls: CallRules) -> tuple[str, str]:
    item = writer.objects(calls)
    items = _series(calls, item, _COMMA, item)
    sequence = writer.rule(f'{literal(_TOOL_CALLS)} {items} "]}}"')
    return sequence, f"({sequence} | {writer.plain()})?"


def _harmony(writer: _Writer, calls: CallRules, answer: str) -> str:
    """A whole answer: thoughts, then what is for the user, or a call; its end mark ends the generation."""
    turn = writer.frame(HARMONY_TURN)
    rest = f"{writer.up_to(HARMONY_END)} {turn}"
    before, behind = (
        f"{HARMONY_CHANNEL}commentary {HARMONY_TOOLS}",
        f" {HARMONY_CONSTRAIN}json{HARMONY_MESSAGE}",
    )
    bodies = [
        f"{writer.frame(before + name + behind)} {writer.rule(rule)}"
        for name, rule in calls.arguments.items()
    ]
    call = writer.rule(" | ".join(bodies)) if bodies else ""
    if calls.prompt_end.endswith(HARMONY_FINAL):
        return f"{rest} {call}" if calls.required else answer
    said = f"{writer.frame(HARMONY_FINAL)} {answer}"
    if call:
        preamble = writer.frame(f"{HARMONY_CHANNEL}commentary{HARMONY_MESSAGE}")
        said = call if calls.required else f"(({preamble} {rest})? {call} | {said})"
    if calls.prompt_end.endswith(HARMONY_ANALYSIS.begin):
        return f"{rest} {said}"
    return f"({writer.frame(HARMONY_ANALYSIS.begin)} {rest})? {said}"


_LAYOUTS: Final[dict[ToolFormat, Callable[[_Writer, CallRules], tuple[str, str]]]] = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA3: _llama3,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.DEEPSEEK: _deepseek,
    ToolFormat.FUNCTIONARY: _functionary,
    ToolFormat.FUNCTION_TAG: _function_tag,
    ToolFormat.GENERIC: _generic,
}
