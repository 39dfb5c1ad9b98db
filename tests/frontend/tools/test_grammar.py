"""Grammars that hold answers to calls: what they let through is what the parsers read."""

from __future__ import annotations

import functools
import itertools
import json

import pytest

from skippy.engine.grammar import GrammarVocabulary, read_tokens
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.json_schema import schema_rule
from skippy.frontend.tools import (
    HARMONY_ANALYSIS,
    THINK,
    AnswerReading,
    ReasoningTags,
    ToolFormat,
    collect,
    marks,
)
from skippy.frontend.tools.grammar import CallRules, answer_grammar
from skippy.workers.grammar import Checker

from . import templates

ARGUMENTS = {
    "weather": schema_rule(
        {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "tools[0].function.parameters",
    ),
    "add": schema_rule({"type": "object"}, ""),
}
F = ToolFormat


class Vocabulary(ToyVocabulary):
    """Bytes, and some texts as control tokens from 300 on."""

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        super().__init__(400)
        self.special = special

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*super().special_tokens, *self.special)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special and text in self.special:
            return [300 + self.special.index(text)]
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if 300 <= token < 300 + len(self.special):
            return self.special[token - 300].encode() if special else b""
        return super().piece(token, special=special)


def split(vocabulary: Vocabulary, text: str) -> list[int]:
    """``text`` in tokens, with control tokens where there are any."""
    tokens: list[int] = []
    while text:
        found = next((word for word in vocabulary.special if text.startswith(word)), None)
        tokens += [300 + vocabulary.special.index(found)] if found else list(text[0].encode())
        text = text.removeprefix(found) if found else text[1:]
    return tokens


@functools.cache
def compiler_of(vocabulary: Vocabulary) -> GrammarVocabulary:
    return GrammarVocabulary.of(vocabulary)


def fits(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole answer by the grammar."""
    history: list[int] = []
    matcher = compiler_of(vocabulary).compile(grammar, 0)
    for token in split(vocabulary, text):
        if not matcher.allowed(history)[token]:
            return False
        history.append(token)
    return bool(matcher.allowed(history)[vocabulary.EOS])


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
WRONG = '{"name": "weather", "arguments": {"town": "Rome"}}'
ADD = '{"name": "add", "arguments": {"x":1}}'
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ROME, TOWN = '{"city": "Rome"}', '{"town": "Rome"}'

# Format, template, one call of weather, a call of it with wrong arguments, two calls, text before a call.
WRITTEN = [
    (
        F.HERMES,
        templates.HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>\n{WRONG}\n</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        "So ",
    ),
    (
        F.LLAMA3,
        templates.LLAMA3,
        CALL.replace("arguments", "parameters"),
        WRONG.replace("arguments", "parameters"),
        f"{CALL}; {ADD}".replace("arguments", "parameters"),
        "",
    ),
    (
        F.MISTRAL,
        templates.MISTRAL,
        f"[TOOL_CALLS][{CALL}]",
        f"[TOOL_CALLS][{WRONG}]",
        f"[TOOL_CALLS][{CALL}, {ADD}]",
        "So ",
    ),
    (
        F.MISTRAL,
        templates.MISTRAL + "[ARGS]",
        f"[TOOL_CALLS]weather[ARGS]{ROME}",
        f"[TOOL_CALLS]weather[ARGS]{TOWN}",
        f'[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]add[ARGS]{{"x":1}}',
        "So ",
    ),
    (
        F.DEEPSEEK,
        templates.DEEPSEEK_R1,
        DEEPSEEK.format(R1.format("weather", ROME)),
        DEEPSEEK.format(R1.format("weather", TOWN)),
        DEEPSEEK.format(R1.format("weather", ROME) + "\n" + R1.format("add", "{}")),
        "So ",
    ),
    (
        F.DEEPSEEK,
        templates.DEEPSEEK_V31,
        DEEPSEEK.format(V31.format("weather", ROME)),
        DEEPSEEK.format(V31.format("weather", TOWN)),
        DEEPSEEK.format(V31.format("weather", ROME) + V31.format("add", "{}")),
        "So ",
    ),
    (
        F.FUNCTIONARY,
        templates.FUNCTIONARY,
        f"weather\n{ROME}",
        f"weather\n{TOWN}",
        f"weather\n{ROME}>>>add\n{{}}",
        "all\nSo >>>",
    ),
    (
        F.FUNCTION_TAG,
        "<function=",
        f"<function=weather>{ROME}</function>",
        f"<function=weather>{TOWN}</function>",
        f"<function=weather>{ROME}</function><function=add>{{}}</function>",
        "So ",
    ),
    (
        F.GENERIC,
        "",
        f'{{"tool_calls": [{CALL}]}}',
        f'{{"tool_calls": [{WRONG}]}}',
        f'{{"tool_calls": [{CALL}, {ADD}]}}',
        "",
    ),
]


@pytest.mark.parametrize("controls", [False, True])
@pytest.mark.parametrize(("tools", "template", "call", "wrong", "both", "before"), WRITTEN)
def test_calls(
    tools: ToolFormat, template: str, call: str, wrong: str, both: str, before: str, controls: bool
) -> None:
    vocabulary = Vocabulary(marks(tools, THINK) if controls else ())
    tokens = {word: 300 + number for number, word in enumerate(vocabulary.special)}
    checker = Checker(read_tokens(vocabulary))
    for required, parallel in itertools.product((False, True), (False, True)):
        rules = CallRules(
            format=tools,
            template=template,
            arguments=ARGUMENTS,
            required=required,
            parallel=parallel,
            prompt_end=">>>",
        )
        grammar = answer_grammar(rules, None, reasoning=None, thinks=False, tokens=tokens)
        assert checker.answer({"grammar": grammar}) == {}

        def allows(text: str, grammar: str = grammar) -> bool:
            return fits(vocabulary, grammar, text)

        assert allows(call)
        assert not allows(wrong)
        # Without several calls, what comes behind one may still be text where a mark tells them apart.
        assert allows(both) or not parallel
        text = "all\nplain text" if tools is F.FUNCTIONARY else "plain text"
        assert allows(text) is not required
        if before:
            assert allows(before + call) is not required
            assert not allows(before + wrong)
        thought = answer_grammar(rules, None, reasoning=THINK, thinks=True, tokens=tokens)
        for gap in ("", "\n", "\n\n"):
            assert fits(vocabulary, thought, f"hm <b> {CALL}</think>{gap}{call}")
        assert not fits(vocabulary, thought, f"hm</think>{wrong}")
        assert not fits(vocabulary, thought, call)
        maybe = answer_grammar(rules, None, reasoning=THINK, thinks=False, tokens=tokens)
        assert fits(vocabulary, maybe, call)
        assert fits(vocabulary, maybe, f"<think>hm</think>\n\n{call}")
        assert not fits(vocabulary, maybe, f"<think>hm</think>{wrong}")
    parsed = AnswerReading(tools=tools, names=frozenset(ARGUMENTS)).parser()
    answer = collect([*parsed.feed(both), *parsed.finish()])
    assert [made.name for made in answer.calls] == ["weather", "add"]
    assert json.loads(answer.calls[0].arguments) == {"city": "Rome"}


ANALYSIS = "<|channel|>analysis<|message|>"
TURN = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
WEATHER, NO_WEATHER = TO.format("weather", ROME), TO.format("weather", TOWN)


@pytest.mark.parametrize("controls", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("form", [None, 'start: %json {"type": "integer"}\n'])
def test_harmony(controls: bool, required: bool, form: str | None) -> None:
    vocabulary = Vocabulary(marks(F.HARMONY, None) if controls else ())
    tokens = {word: 300 + number for number, word in enumerate(vocabulary.special)}
    checker = Checker(read_tokens(vocabulary))

    def allows(text: str, end: str = "", arguments: dict[str, str] = ARGUMENTS) -> bool:
        rules = CallRules(
            format=F.HARMONY, template="", arguments=arguments, required=required, prompt_end=end
        )
        grammar = answer_grammar(rules, form, reasoning=HARMONY_ANALYSIS, thinks=False, tokens=tokens)
        assert checker.answer({"grammar": grammar}) == {}
        return fits(vocabulary, grammar, text)

    said = "7" if form else "So, <b>."
    thought = f"{ANALYSIS}hm {{}}<|end|>{TURN}"
    assert allows(WEATHER)
    assert allows(thought + WEATHER)
    assert not allows(thought + NO_WEATHER)
    assert allows(f"<|channel|>commentary<|message|>Wait.<|end|>{TURN}{WEATHER}") is not required
    assert not allows(f"<|channel|>commentary<|message|>Wait.<|end|>{TURN}{NO_WEATHER}")
    assert allows(FINAL + said) is not required
    assert allows(thought + FINAL + said) is not required
    assert allows(FINAL + "no number") is (form is None and not required)
    assert not allows(said)
    # The prompt has begun a message.
    assert allows(f"hm<|end|>{TURN}{WEATHER}", ANALYSIS)
    assert not allows(WEATHER, ANALYSIS)
    assert allows(said, FINAL) is not required
    assert allows(f"So<|end|>{TURN}{WEATHER}", FINAL) is required or form is None
    if not required:
        assert allows(thought + FINAL + said, arguments={})
        assert not allows(WEATHER, arguments={})
    parsed = AnswerReading(tools=F.HARMONY, names=frozenset(ARGUMENTS), reasoning=HARMONY_ANALYSIS).parser()
    answer = collect([*parsed.feed(thought + WEATHER), *parsed.finish()])
    assert [(made.name, made.arguments) for made in answer.calls] == [("weather", ROME)]
    assert answer.reasoning == "hm {}"


TAGS: list[tuple[ReasoningTags | None, bool, str, bool]] = [
    (None, False, "7", True),
    (None, False, "x7", False),
    (THINK, False, "7", True),
    (THINK, False, "<think>a</think>\n7", True),
    (THINK, True, "a</think>7", True),
    (THINK, True, "7", False),
]


@pytest.mark.parametrize(("reasoning", "thinks", "text", "good"), TAGS)
def test_an_answer_that_is_held_to_a_form(
    reasoning: ReasoningTags | None, thinks: bool, text: str, good: bool
) -> None:
    vocabulary = Vocabulary()
    grammar = answer_grammar(
        None,
        'start: number\nnumber: %json {"type": "integer"}\n',
        reasoning=reasoning,
        thinks=thinks,
        tokens={},
    )
    assert fits(vocabulary, grammar, text) is good


def test_an_answer_that_is_held_to_a_form_or_calls() -> None:
    vocabulary = Vocabulary()
    for tools, template, call, wrong, _, _ in WRITTEN:
        rules = CallRules(format=tools, template=template, arguments=ARGUMENTS, prompt_end=">>>")
        form = 'start: %json {"type": "integer"}\n'
        grammar = answer_grammar(rules, form, reasoning=None, thinks=False, tokens={})
        assert fits(vocabulary, grammar, call)
        assert fits(vocabulary, grammar, "7")
        assert not fits(vocabulary, grammar, wrong)
        assert not fits(vocabulary, grammar, "text")
