"""How an answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .formats import ReasoningTags, ToolFormat
from .parser import OutputParser


@attrs.frozen(slots=True, kw_only=True)
class AnswerReading:
    """What a parser of one answer has to know; see :class:`OutputParser`.

    Attributes:
        texts: of each tool, the parameters that are texts.
        opened: the beginning of the answer that the prompt ends with, where that is only marks.
        shown: control tokens that the parser looks for, so their texts must be in what it is fed. All other
            control tokens have no text.
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: ReasoningTags | None = None
    thinks: bool = False
    texts: Mapping[str, frozenset[str]] = attrs.field(factory=dict)
    opened: str = ""
    shown: frozenset[int] = frozenset()

    def parser(self) -> OutputParser:
        return OutputParser(
            self.tools,
            self.names,
            parallel=self.parallel,
            reasoning=self.reasoning,
            thinks=self.thinks,
            texts=self.texts,
            opened=self.opened,
        )
