"""A conversation that ends with the assistant's own words: the answer goes on from there."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ApiError
from .schemas import ChatMessage
from .tools import ReasoningTags
from .tools.formats import HARMONY_FINAL, HARMONY_TURN


def split_beginning(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], str]:
    """The messages to render, and how the answer begins; empty: it has not begun.

    Raises:
        ApiError: 400, the last message cannot be gone on with.
    """
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return messages, ""
    place = f"messages[{len(messages) - 1}]"
    if len(messages) > 1 and messages[-2].role == "assistant":
        text = f"{place} is the second assistant message at the end; the answer can go on from one only"
        raise ApiError(f"{text}, or from none if prefill_assistant is false", param=place)
    if last.reasoning is not None:
        text = "is not supported in a message that the answer goes on from; set prefill_assistant to false"
        param = f"{place}.reasoning_content"
        raise ApiError(f"{param} {text}", param=param, code="unsupported_model_feature")
    return messages[:-1], last.content


def thinks(opening: str, beginning: str, tags: ReasoningTags) -> bool:
    """Whether an answer goes on with reasoning.

    Args:
        opening: what the template ends with.
        beginning: how the answer begins, behind that.
    """
    if opening.rstrip().endswith(tags.begin):
        return tags.end not in beginning
    return beginning.rfind(tags.begin) > beginning.rfind(tags.end)


def harmony_opening(opening: str, beginning: str) -> str:
    """The marks of a HARMONY message that the prompt begins; arguments as of :func:`thinks`."""
    return HARMONY_FINAL if beginning else opening.rpartition(HARMONY_TURN)[2]
