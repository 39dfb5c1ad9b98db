"""What an answer consists of, piece by piece, for whichever route words it."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen(slots=True)
class Content:
    """More text of the answer."""

    text: str


@attrs.frozen(slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@attrs.frozen(slots=True)
class CallBegin:
    """A tool call; calls are numbered from 0."""

    index: int
    id: str
    name: str


@attrs.frozen(slots=True)
class CallArguments:
    """More of a call's arguments: the text of a JSON object."""

    index: int
    text: str


@attrs.frozen(slots=True)
class CallEnd:
    """The arguments are complete."""

    index: int


@attrs.frozen(slots=True)
class CallBroken:
    """The call is not what it began as. Its whole text follows as content; what it was is void."""

    index: int


Delta = Content | Reasoning | CallBegin | CallArguments | CallEnd | CallBroken


@attrs.frozen(slots=True)
class ToolCall:
    """A call as messages carry it; ``arguments`` is JSON text, not yet looked at."""

    id: str
    name: str
    arguments: str


@attrs.frozen(slots=True)
class Answer:
    """A whole answer. ``calls`` has no broken ones; the last one lacks its end where the text did."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def collect(deltas: Iterable[Delta]) -> Answer:
    """The answer that ``deltas`` add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[CallBegin, list[str]]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(index):
                calls[index] = (delta, [])
            case CallArguments(index, text):
                calls[index][1].append(text)
            case CallBroken(index):
                del calls[index]
            case CallEnd():
                pass
    return Answer(
        "".join(content),
        "".join(reasoning),
        tuple(ToolCall(begin.id, begin.name, "".join(texts)) for begin, texts in calls.values()),
    )
