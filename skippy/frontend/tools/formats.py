"""The ways in which models write tool calls and reasoning, and how a chat template tells which is its own."""

from __future__ import annotations

import enum
from typing import Final

import attrs


class ToolFormat(enum.Enum):
    """How calls are written; values are the names that clients see.

    HERMES: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, once for each call.
    LLAMA3: an answer that begins with ``{"name": …, "parameters": {…}}``, perhaps behind
        ``<|python_tag|>``; further ones after ``;``.
    MISTRAL: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``.
    DEEPSEEK: ``<｜tool▁calls▁begin｜>``, then for each call ``<｜tool▁call▁begin｜>``, and
        ``function<｜tool▁sep｜>name`` with the arguments in a fence, or ``name<｜tool▁sep｜>{…}``.
    FUNCTIONARY: ``>>>name`` and ``{…}`` on the next line; ``>>>all`` comes before text.
    FUNCTION_TAG: ``<function=name>{…}</function>``.
    CODER: ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``: values of
        parameters that are texts stand as they are, others as JSON. Qwen3-Coder's.
    GENERIC: an answer that is ``{"tool_calls": [{"name": …, "arguments": {…}}, …]}``, such a list alone, or
        one call, perhaps in a fence.
    HARMONY: messages, each ``<|channel|>name<|message|>text<|end|>``: thoughts on the channel analysis, what
        is for the user on others, calls where the header says ``to=functions.name``. gpt-oss's. No answer is
        without its frames, whether or not there are tools.
    """  # noqa: RUF002 (the bar of DeepSeek's tokens is theirs)

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    FUNCTIONARY = "functionary"
    FUNCTION_TAG = "function-tag"
    CODER = "coder"
    GENERIC = "generic"
    HARMONY = "harmony"


CALL_TAGS: Final = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<TOOLCALL>": "</TOOLCALL>",
}
"""What comes before calls of the HERMES kind, and behind them; the others are Granite's and Nemotron's."""
PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"


@attrs.frozen(slots=True)
class DeepSeekWords:
    """One spelling of DeepSeek's tokens; converted models have several."""

    calls_begin: str
    call_begin: str
    separator: str
    call_end: str
    calls_end: str


def _deepseek(bar: str, space: str) -> DeepSeekWords:
    words = ("calls begin", "call begin", "sep", "call end", "calls end")
    return DeepSeekWords(*(f"<{bar}tool {word}{bar}>".replace(" ", space) for word in words))


_BAR: Final = "\uff5c"  # not the bar of ASCII
DEEPSEEK_WORDS: Final = tuple(
    _deepseek(bar, space) for bar, space in ((_BAR, "\u2581"), (_BAR, "_"), (_BAR, " "), ("|", "_"))
)

FUNCTIONARY_SEPARATOR: Final = ">>>"
FUNCTION_TAG: Final = "<function="
PARAMETER_TAG: Final = "<parameter="
PARAMETER_ENDS: Final = ("\n</parameter>", "</parameter>")

HARMONY_START: Final = "<|start|>"
HARMONY_CHANNEL: Final = "<|channel|>"
HARMONY_CONSTRAIN: Final = "<|constrain|>"
HARMONY_MESSAGE: Final = "<|message|>"
HARMONY_END: Final = "<|end|>"
HARMONY_ENDS: Final = (HARMONY_END, "<|call|>", "<|return|>")
HARMONY_TURN: Final = f"{HARMONY_START}assistant"
"""What the prompt ends with, and what comes before each further message of an answer."""
HARMONY_FINAL: Final = f"{HARMONY_CHANNEL}final{HARMONY_MESSAGE}"
"""What comes before the words that are meant for the user."""
HARMONY_TOOLS: Final = "to=functions."

# In this order: the first format of which one text stands in the template. One that has none of them is
# GENERIC, whether or not it has room for tools.
_SIGNS: Final[tuple[tuple[ToolFormat, tuple[str, ...]], ...]] = (
    (ToolFormat.HARMONY, (HARMONY_CHANNEL,)),
    (ToolFormat.DEEPSEEK, tuple(words.calls_begin for words in DEEPSEEK_WORDS)),
    (ToolFormat.MISTRAL, (TOOL_CALLS,)),
    (ToolFormat.FUNCTIONARY, (">>>all", "'>>>'", '">>>"')),
    (ToolFormat.CODER, (PARAMETER_TAG,)),
    (ToolFormat.HERMES, tuple(CALL_TAGS)),
    (ToolFormat.FUNCTION_TAG, (FUNCTION_TAG,)),
    (ToolFormat.LLAMA3, (PYTHON_TAG, '"parameters": dictionary', "<|start_header_id|>ipython")),
)


def tool_format(template: str) -> ToolFormat:
    """The format whose marks stand in a chat template's text."""
    for candidate, signs in _SIGNS:
        if any(sign in template for sign in signs):
            return candidate
    return ToolFormat.GENERIC


@attrs.frozen(slots=True)
class ReasoningTags:
    """What comes before a model's reasoning, and behind it."""

    begin: str
    end: str


THINK: Final = ReasoningTags("<think>", "</think>")
_REASONING: Final = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)
HARMONY_ANALYSIS: Final = ReasoningTags(f"{HARMONY_CHANNEL}analysis{HARMONY_MESSAGE}", HARMONY_END)


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags of a chat template's text; None: the model does not reason, as far as that shows."""
    if HARMONY_CHANNEL in template:
        return HARMONY_ANALYSIS
    return next((tags for tags in _REASONING if tags.end in template), None)


def marks(tools: ToolFormat | None, reasoning: ReasoningTags | None) -> tuple[str, ...]:
    """All texts that a parser looks for and that may be tokens of their own in a vocabulary."""
    found: list[str] = []
    if reasoning is not None:
        found += [reasoning.begin, reasoning.end]
    if tools is ToolFormat.HERMES:
        found += [*CALL_TAGS, *CALL_TAGS.values()]
    elif tools is ToolFormat.CODER:
        found += [*CALL_TAGS, *CALL_TAGS.values(), FUNCTION_TAG, "</function>", PARAMETER_TAG, "</parameter>"]
    elif tools is ToolFormat.LLAMA3:
        found.append(PYTHON_TAG)
    elif tools is ToolFormat.MISTRAL:
        found += [TOOL_CALLS, CALL_ID, ARGS]
    elif tools is ToolFormat.DEEPSEEK:
        for words in DEEPSEEK_WORDS:
            found += attrs.astuple(words)
    elif tools is ToolFormat.FUNCTIONARY:
        found.append(FUNCTIONARY_SEPARATOR)
    elif tools is ToolFormat.FUNCTION_TAG:
        found += [FUNCTION_TAG, "</function>"]
    elif tools is ToolFormat.HARMONY:
        found += [HARMONY_START, HARMONY_CHANNEL, HARMONY_CONSTRAIN, HARMONY_MESSAGE, *HARMONY_ENDS]
    return tuple(found)
