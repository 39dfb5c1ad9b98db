"""Tool calls and reasoning in what models write: formats, and an incremental parser. Knows no route."""

from .deltas import (
    Answer,
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Content,
    Delta,
    Reasoning,
    ToolCall,
    collect,
)
from .formats import HARMONY_ANALYSIS, THINK, ReasoningTags, ToolFormat, marks, reasoning_tags, tool_format
from .parser import OutputParser
from .reading import AnswerReading

__all__ = [
    "HARMONY_ANALYSIS",
    "THINK",
    "Answer",
    "AnswerReading",
    "CallArguments",
    "CallBegin",
    "CallBroken",
    "CallEnd",
    "Content",
    "Delta",
    "OutputParser",
    "Reasoning",
    "ReasoningTags",
    "ToolCall",
    "ToolFormat",
    "collect",
    "marks",
    "reasoning_tags",
    "tool_format",
]
