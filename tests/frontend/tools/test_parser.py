"""Tool calls and reasoning out of answers, however their text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from skippy.frontend.tools import (
    HARMONY_ANALYSIS,
    THINK,
    Answer,
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Delta,
    OutputParser,
    Reasoning,
    ReasoningTags,
    ToolCall,
    ToolFormat,
    collect,
)

NAMES = ("weather", "add", "python")
F = ToolFormat


def parser(
    tools: ToolFormat | None,
    *,
    parallel: bool = True,
    reasoning: ReasoningTags | None = None,
    thinks: bool = False,
) -> OutputParser:
    ids = itertools.count()
    return OutputParser(
        tools,
        NAMES,
        parallel=parallel,
        reasoning=reasoning,
        thinks=thinks,
        new_id=lambda: f"id{next(ids)}",
    )


def run(one: OutputParser, pieces: Iterable[str]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in one.feed(piece)]
    return deltas + one.finish()


def answer(tools: ToolFormat | None, text: str, **more: bool) -> Answer:
    return collect(run(parser(tools, **more), [text]))


def call(name: str, arguments: str, number: int = 0) -> ToolCall:
    return ToolCall(f"id{number}", name, arguments)


PARIS = '{"city": "Paris", "days": [1, 2.5e3, -0], "ok": true}'
TWO = (call("weather", PARIS), call("add", '{"a":1}', 1))

DEEPSEEK_R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n%s\n```<｜tool▁call▁end｜>\n"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a":1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)

# Each writes the calls of TWO.
WRITTEN: list[tuple[ToolFormat, str]] = [
    (
        F.HERMES,
        '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a":1}, "name": "add"}\n</tool_call>',
    ),
    (F.HERMES, '<tool_call>{"name":"weather","arguments":%s}{"name":"add","arguments":{"a":1}}</tool_call>'),
    (
        F.HERMES,
        '<|tool_call|>[{"name":"weather","arguments":%s},{"name":"add","arguments":{"a":1}}]<|/tool_call|>',
    ),
    (F.LLAMA3, '{"name": "weather", "parameters": %s}; {"name": "add", "parameters": {"a":1}}'),
    (
        F.LLAMA3,
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": %s}'
        '<|python_tag|>{"name": "add", "parameters": {"a":1}}',
    ),
    (
        F.MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": %s, "id": "abcdefghi"}, '
        '{"name": "add", "arguments": {"a":1}}]',
    ),
    (F.MISTRAL, '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]%s[TOOL_CALLS]add[ARGS]{"a":1}'),
    (F.MISTRAL, '[TOOL_CALLS]weather%s[TOOL_CALLS]add{"a":1}'),
    (F.DEEPSEEK, DEEPSEEK_R1),
    (F.DEEPSEEK, DEEPSEEK_V31),
    (F.DEEPSEEK, DEEPSEEK_V31.replace("▁", "_").replace("｜", "|")),
    (F.DEEPSEEK, DEEPSEEK_V31.removeprefix("<｜tool▁calls▁begin｜>")),
    (F.FUNCTIONARY, 'weather\n%s>>>add\n{"a":1}'),
    (F.FUNCTIONARY, '>>>weather\n%s\n>>>add\n{"a":1}\n'),
    (F.FUNCTION_TAG, '<function=weather>%s</function>\n<function=add>{"a":1}</function>'),
    (
        F.HARMONY,
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s<|call|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a":1}<|call|>',
    ),
    (F.HARMONY, ' to=functions.weather<|channel|>analysis<|message|>%s<|channel|> to=add<|message|>{"a":1}'),
    (
        F.GENERIC,
        '{"tool_calls": [{"name": "weather", "arguments": %s}, {"name": "add", "arguments": {"a":1}}]}',
    ),
    (
        F.GENERIC,
        '```json\n[{"name": "weather", "arguments": %s}, {"name": "add", "parameters": {"a":1}}]\n```',
    ),
]


@pytest.mark.parametrize(("tools", "text"), WRITTEN)
def test_calls_of_every_format(tools: ToolFormat, text: str) -> None:
    one = parser(tools)
    assert collect(run(one, [text % PARIS])) == Answer("", "", TWO)
    assert one.finish_reason("stop") == "tool_calls"
    assert one.finish_reason("length") == "length"


@pytest.mark.parametrize(("tools", "text"), WRITTEN)
def test_arguments_come_as_their_text_does(tools: ToolFormat, text: str) -> None:
    one = parser(tools)
    before, behind = text.split("%s")
    deltas = [delta for piece in before for delta in one.feed(piece)]
    # The brace of "weather{" is what ends the name.
    begun = [CallBegin(0, "id0", "weather")]
    assert deltas == (begun if '"name"' in text else deltas)
    for piece in PARIS:
        deltas += one.feed(piece)
        said = "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))
        assert deltas[:1] == begun
        assert PARIS.startswith(said)
        assert said.endswith(piece)
    assert deltas[-1] == CallEnd(0) or CallEnd(0) in one.feed("}" if behind.startswith("}") else behind)


@pytest.mark.parametrize(("tools", "text"), WRITTEN)
def test_only_one_call_where_they_are_not_parallel(tools: ToolFormat, text: str) -> None:
    one = parser(tools, parallel=False)
    assert collect(run(one, [text % PARIS + " and more"])) == Answer("", "", TWO[:1])
    assert one.done
    assert one.finish_reason("stop") == "tool_calls"
    # The token limit may have been reached with the call's last token, or behind it.
    assert one.finish_reason("length") == "tool_calls"
    assert one.feed("x") == one.finish() == []


CONTENT: list[tuple[ToolFormat, str, str, int]] = [
    (F.HERMES, 'Let me see.\n<tool_call>{"name": "add"}</tool_call>\n\nDone. ', "Let me see.Done.", 1),
    (F.HERMES, '<tool_call>{"name": "add"}', "", 1),
    (F.HERMES, '<tool_call>{"name": "add"}</tool_', "", 1),
    (F.HERMES, "a < b <tool>", "a < b <tool>", 0),
    (F.LLAMA3, "Paris is fine. ", "Paris is fine. ", 0),
    (F.LLAMA3, 'So: <|python_tag|>{"name": "add"}', "So:", 1),
    (F.LLAMA3, ' {"name": "add", "parameters": {}} ok', "ok", 1),
    (F.MISTRAL, 'Well [TOOL_CALLS][{"name": "add"}]', "Well", 1),
    (F.DEEPSEEK, "Well <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}", "Well", 1),
    (F.FUNCTIONARY, "all\nHello >>> you\n>>>add\n{}", "Hello >>> you", 1),
    (F.FUNCTIONARY, "Hello, no recipient.", "Hello, no recipient.", 0),
    (F.FUNCTION_TAG, "Well <function=add>{}</function> there", "Wellthere", 1),
    (F.HARMONY, "<|channel|>final<|message|> Hello there. <|return|>", " Hello there.", 0),
    (
        F.HARMONY,
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.add<|message|>{}<|call|>",
        "Let me see.",
        1,
    ),
    (
        F.HARMONY,
        "<|channel|>commentary<|message|>One. <|end|>\n<|start|>assistant<|channel|>final<|message|>\n Two",
        "One.\n\nTwo",
        0,
    ),
    (F.HARMONY, "No frames, <|message|> to=functions.", "No frames, <|message|> to=functions.", 0),
    (F.HARMONY, "<|channel|>final<|message|>a<|end|><|start|>assistant<|chann", "a", 0),
    (F.HARMONY, "<|channel|>novel<|message|>Hm<|channel|><|message|>so", "Hm\n\nso", 0),
    (F.GENERIC, "{} is empty", "{} is empty", 0),
    (F.GENERIC, '{"tool_call": {"name": "add"}} yes', "yes", 1),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CONTENT)
def test_content_beside_calls(tools: ToolFormat, text: str, content: str, calls: int) -> None:
    one = parser(tools)
    expected = Answer(content, "", (call("add", "{}"),) * calls)
    assert collect(run(one, [text])) == expected
    assert one.finish_reason("stop") == ("tool_calls" if calls else "stop")


MALFORMED: list[tuple[ToolFormat, str]] = [
    (F.HERMES, ' <tool_call> {"name": "nobody", "arguments": {}}</tool_call> '),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": {"a": bad}}</tool_call>'),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'),
    (F.HERMES, '<tool_call>{"name": "add", "name": "add"}</tool_call>'),
    (F.HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>'),
    (F.HERMES, '<tool_call>{"name": 7}'),
    (F.HERMES, "<tool_call>{}"),
    (F.HERMES, '<tool_call>{"name": "' + "x" * 1000),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200),
    (F.HERMES, '<tool_call>{"name": "add", "arguments": "\\"\\ud800\\""}'),
    (F.HERMES, '<tool_call>{"na'),
    (F.HERMES, "<tool_ca"),
    (F.HERMES, "<tool_call>\n"),
    (F.LLAMA3, '{"temperature": 21} '),
    (F.LLAMA3, '\n{"name": "Paris", "country": "France"}'),
    (F.LLAMA3, "<|python_tag|>print(1)"),
    (F.MISTRAL, "[TOOL_CALLS] []"),
    (F.MISTRAL, "[TOOL_CALLS]nobody[ARGS]{}"),
    (F.MISTRAL, "[TOOL_CALLS]" + "x" * 200),
    (F.DEEPSEEK, "<｜tool▁calls▁begin｜>text"),
    (F.DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\nprint"),
    (F.FUNCTIONARY, ">>>nobody\nhello"),
    (F.FUNCTIONARY, "add"),
    (F.FUNCTION_TAG, "<function=add>7</function>"),
    (F.HARMONY, "<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>{}"),
    (F.HARMONY, "<|channel|>commentary to=python code<|message|>print(1)"),
    (F.HARMONY, "<|channel|>commentary to=functions.add<|message|>{bad}"),
    (F.HARMONY, "<|channel|>" + "x" * 300),
    (F.GENERIC, '{"tool_calls": []}'),
    (F.GENERIC, '```json\n{"answer": 1}\n```'),
    (F.GENERIC, "[1, 2]"),
]


@pytest.mark.parametrize(("tools", "text"), MALFORMED)
def test_malformed_calls_are_content(tools: ToolFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        one = parser(tools)
        assert collect(run(one, pieces)) == Answer(text, "", ())
        assert one.finish_reason("stop") == "stop"


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    text = (
        '<tool_call>{"name": "add"}{"name": "add", "arguments": {7}}\n'
        '<tool_call>{"name": "add", "arguments": {"x": 2}}</tool_call>'
    )
    one = parser(F.HERMES)
    deltas = run(one, [text])
    assert CallBroken(1) in deltas
    first, last = call("add", "{}"), call("add", '{"x": 2}', 2)
    assert collect(deltas) == Answer('{"name": "add", "arguments": {7}}', "", (first, last))
    # A client that was told of the broken call must not take all of them for good.
    assert one.finish_reason("stop") == "stop"


def test_a_call_in_which_the_text_ends_keeps_its_arguments() -> None:
    one = parser(F.HERMES)
    deltas = run(one, ['<tool_call>{"name": "add", "arguments": {"a": "x'])
    assert collect(deltas) == Answer("", "", (call("add", '{"a": "x'),))
    assert CallEnd(0) not in deltas
    assert one.finish_reason("length") == "length"
    assert one.finish_reason("stop") == "stop"


def test_arguments_as_a_string_of_json() -> None:
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>'
    assert answer(F.HERMES, text).calls == (call("add", '{"a": "\\u00e9"}'),)


CODER_TEXTS = {"weather": ["city"]}
CODER_CALL = (
    "<function=weather>\n<parameter=city>\n%s\n</parameter>\n<parameter=days>\n%s\n</parameter>\n</function>"
)
CODER: list[tuple[str, str, str]] = [
    ("Paris", "3", '{"city": "Paris", "days": 3}'),
    (
        '"a"\n\n<b>\\ 7 </parameter',
        "[1,\n {}]",
        '{"city": "\\"a\\"\\n\\n<b>\\\\ 7 </parameter", "days": [1,\n {}]}',
    ),
    ("", "True", '{"city": "", "days": true}'),
    ("7", "so many", '{"city": "7", "days": "so many"}'),
    ("null", "NaN", '{"city": "null", "days": "NaN"}'),
    ("é🌞", "[" * 5000, '{"city": "é🌞", "days": "%s"}' % ("[" * 5000)),
]


@pytest.mark.parametrize(("city", "days", "arguments"), CODER)
@pytest.mark.parametrize("form", ["<tool_call>\n{}\n</tool_call>", "{}", "<tool_call>{}", "{}\n</tool_call>"])
def test_calls_with_tags_around_their_arguments(form: str, city: str, days: str, arguments: str) -> None:
    text = (
        "Well.\n"
        + form.replace("{}", CODER_CALL % (city, days))
        + "\n"
        + form.replace("{}", "<function=add></function>")
    )
    for pieces in ([text], list(text)):
        ids = itertools.count()
        one = OutputParser(F.CODER, NAMES, texts=CODER_TEXTS, new_id=lambda ids=ids: f"id{next(ids)}")  # type: ignore[misc]
        found = collect(run(one, pieces))
        assert found == Answer("Well.", "", (call("weather", arguments), call("add", "{}", 1)))
        assert json.loads(found.calls[0].arguments)
        assert one.finish_reason("stop") == "tool_calls"


def test_a_text_between_tags_comes_as_it_is_written() -> None:
    one = OutputParser(F.CODER, NAMES, texts=CODER_TEXTS, new_id=lambda: "id0")
    assert one.feed("<function=weather>") == [CallBegin(0, "id0", "weather"), CallArguments(0, "{")]
    assert one.feed("<parameter=city>\nPa")[-1] == CallArguments(0, "Pa")
    assert one.feed("r\n") == [CallArguments(0, "r")]
    assert one.feed("is") == [CallArguments(0, "\\nis")]
    # The answer ends in the middle of it.
    assert collect(one.finish()) == Answer("", "", ())
    assert one.finish_reason("length") == "length"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=nobody></function>\n</tool_call>",
        "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=add>{}</function>",
        "<tool_call>text",
        "<function=" + "x" * 100,
    ],
)
def test_tags_that_are_no_call_are_content(text: str) -> None:
    for pieces in ([text], list(text)):
        one = OutputParser(F.CODER, NAMES)
        assert collect(run(one, pieces)) == Answer(text, "", ())
        assert one.finish_reason("stop") == "stop"


def test_no_tools_no_calls() -> None:
    text = '<tool_call>{"name": "add"}</tool_call> [TOOL_CALLS] '
    assert answer(None, text) == Answer(text, "", ())


@pytest.mark.parametrize(
    ("text", "thinks", "content", "reasoning"),
    [
        ("<think>\nHm.\nSo.\n</think>\n\nYes. ", False, "Yes. ", "Hm.\nSo."),
        ("\n<think></think>Yes", False, "Yes", ""),
        ("Hm. </think> Yes", True, "Yes", "Hm."),
        ("<think>Hm.</think>Yes", True, "Yes", "Hm."),
        ("Hm. <thin", True, "", "Hm. <thin"),
        (" Yes <think>x</think>", False, " Yes <think>x</think>", ""),
        (" <thin", False, " <thin", ""),
        ("<think>a</think>\n", False, "", "a"),
    ],
)
def test_reasoning(text: str, thinks: bool, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        deltas = run(parser(None, reasoning=THINK, thinks=thinks), pieces)
        assert collect(deltas) == Answer(content, reasoning, ())


def test_reasoning_streams() -> None:
    one = parser(None, reasoning=THINK)
    assert one.feed("<think>\n") == []
    assert one.feed("Hm ") == [Reasoning("Hm")]
    assert one.feed("m</thin") == [Reasoning(" m")]
    assert one.feed("k>\nYes") == [Content("Yes")]


def test_reasoning_before_a_call() -> None:
    text = 'I should add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    one = parser(F.HERMES, reasoning=THINK, thinks=True)
    assert collect(run(one, [text])) == Answer("", "I should add.", (call("add", "{}"),))


def test_calls_within_reasoning_are_reasoning() -> None:
    text = '<think>maybe <tool_call>{"name": "add"}</tool_call></think>no'
    one = parser(F.HERMES, reasoning=THINK)
    assert collect(run(one, [text])) == Answer("no", 'maybe <tool_call>{"name": "add"}</tool_call>', ())


HARMONY_TURNS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|> So. <|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)


def test_harmony_reasons_on_a_channel() -> None:
    for pieces in ([HARMONY_TURNS], list(HARMONY_TURNS)):
        one = parser(F.HARMONY, reasoning=HARMONY_ANALYSIS)
        assert collect(run(one, pieces)) == Answer("Yes.", "Hm.\n\nSo.", ())
        assert one.finish_reason("stop") == "stop"
    assert answer(F.HARMONY, HARMONY_TURNS) == Answer("Hm.\n\nSo.\n\nYes.", "", ())


def test_harmony_says_while_it_thinks() -> None:
    one = parser(F.HARMONY, reasoning=HARMONY_ANALYSIS)
    assert one.feed("<|channel|>analysis<|message|>") == []
    assert one.thinking
    assert one.feed("Hm") == [Reasoning("Hm")]
    assert one.feed("<|end|>") == []
    assert not one.thinking
    assert one.feed("<|start|>assistant<|channel|>final<|message|>Y") == [Content("Y")]
    assert one.feed("es<|ret") == [Content("es")]


def test_what_the_prompt_has_opened() -> None:
    one = OutputParser(F.HARMONY, opened="<|channel|>final<|message|>")
    assert one.feed(" Yes") == [Content(" Yes")]
    one = OutputParser(F.HARMONY, reasoning=HARMONY_ANALYSIS, opened="<|channel|>analysis<|message|>")
    assert one.thinking
    assert one.feed("Hm<|end|>") == [Reasoning("Hm")]


def test_ids_are_unique_and_those_that_mistral_takes() -> None:
    text = '[TOOL_CALLS][{"name": "add"}, {"name": "add"}]'
    first, second = collect(run(OutputParser(F.MISTRAL, NAMES), [text])).calls
    assert first.id != second.id
    assert len(first.id) == 9
    assert first.id.isalnum()
    one = collect(run(OutputParser(F.HERMES, NAMES), ['<tool_call>{"name": "add"}'])).calls[0]
    assert one.id.startswith("call_")


# Words that matter to some format, and text that does not.
_WORDS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            ">>>",
            "all\n",
        ),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", "function", "weather\n", "add", "```json\n", "```", "<function=", ">"),
        *(
            "</function>",
            "<think>",
            "</think>",
            '{"name": "add", "arguments": ',
            '{"tool_calls": [',
            "{",
            "}",
        ),
        *(
            '"name"',
            ":",
            '"add"',
            ",",
            "[",
            "]",
            '"arguments"',
            '"x\\u00e9"',
            "1.5",
            "-",
            "null",
            " ",
            "\n",
            "a",
        ),
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "assistant", "analysis", "to=functions.add"),
        *("é", "<", "�", ";", '{"a": [1, {}]}', '"id": 7', '{"name": "add"}'),
    ]
)
_TEXTS = st.lists(_WORDS, max_size=30).map("".join) | st.builds(
    lambda pair, tail: pair[1] % PARIS + tail,
    st.sampled_from(WRITTEN),
    st.lists(_WORDS, max_size=4).map("".join),
)


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind joined, which is all that cuts may change."""
    result: list[Delta] = []
    for delta in deltas:
        match (result[-1:], delta):
            case ([Content(before)], Content(text)):
                result[-1] = Content(before + text)
            case ([Reasoning(before)], Reasoning(text)):
                result[-1] = Reasoning(before + text)
            case ([CallArguments(index, before)], CallArguments(same, text)) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(delta)
    return result


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@settings(max_examples=400, deadline=None)
@given(
    _TEXTS,
    st.sampled_from([None, *ToolFormat]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_cuts_change_nothing_and_nothing_is_lost(
    text: str, tools: ToolFormat | None, reasons: bool, thinks: bool, parallel: bool, cuts: list[int]
) -> None:
    def make() -> OutputParser:
        return parser(tools, parallel=parallel, reasoning=THINK if reasons else None, thinks=thinks)

    whole, cut, letters = make(), make(), make()
    expected = run(whole, [text])
    said = collect(expected)
    for one, pieces in ((cut, pieces_of(text, cuts)), (letters, list(text))):
        deltas = run(one, pieces)
        assert collect(deltas) == said
        # How much of a call's arguments was said before it broke is of no account.
        if not any(isinstance(delta, CallBroken) for delta in expected):
            assert merged(deltas) == merged(expected)
        assert one.finish_reason("stop") == whole.finish_reason("stop")
    ended = {delta.index for delta in expected if isinstance(delta, CallEnd)}
    for number, made in enumerate(said.calls):
        assert made.name in NAMES
        if number in ended and not any(isinstance(d, CallBroken) for d in expected):
            assert isinstance(json.loads(made.arguments), dict)
    if not said.calls and not reasons and tools not in (F.FUNCTIONARY, F.HARMONY):
        assert said.content == text


@pytest.mark.parametrize("tools", [None, *ToolFormat])
@pytest.mark.parametrize(
    "filler",
    [
        "word ",
        "   ",
        "<",
        "<tool_call>",
        '<tool_call>{"name": "add", ',
        "[TOOL_CALLS]",
        ">>>",
        "<|channel|>",
        "<|start|>a<|message|>",
        "<|channel|>" + "x" * 140,
        "<|channel|>commentary to=functions.add<|message|>{}",
        "<think>",
        '<tool_call>{"name": "add", "arguments": {"x": 7}}</tool_call>\n',
        '<tool_call>{"name": "add", "arguments": {bad',
        '<tool_call>{"arguments": {"x": 7}, "name": "add"',
        "x" * 37,
        "\\u00e9",
    ],
)
@pytest.mark.parametrize(
    "start", ["", '<tool_call>{"name": "add", "arguments": {"x": "', '{"name": "add", "x": "']
)
def test_work_is_linear(tools: ToolFormat | None, filler: str, start: str) -> None:
    """Per character a bounded number of looks, letter by letter and as a whole."""
    for count in (10, 100):
        text = start + filler * count
        for pieces in ([text], list(text)):
            one = parser(tools, reasoning=THINK)
            run(one, pieces)
            # The longest mark has 24 letters; what may become one is looked at with every letter.
            assert one.examined <= 80 * len(text) + 4000
