"""Items of a response's output while they are being said."""

from __future__ import annotations

import abc
import uuid
from typing import Any, ClassVar

Events = list[tuple[str, dict[str, Any]]]
"""Kinds of events, and their members beside those that all have."""


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OpenItem(abc.ABC):
    """An item that is not complete.

    Attributes:
        index: among those of the output.
    """

    prefix: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id(self.prefix)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abc.abstractmethod
    def item(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        """The item as JSON; not ``begun``: as it is announced."""

    @abc.abstractmethod
    def opening(self) -> Events:
        """Events behind the one that announces the item."""

    @abc.abstractmethod
    def closing(self) -> Events:
        """Events before the one that says that the item is done."""


class _Parted(OpenItem):
    """An item whose text is in a part."""

    text_event: ClassVar[str]

    @abc.abstractmethod
    def part(self) -> dict[str, Any]: ...

    def opening(self) -> Events:
        return [("response.content_part.added", {"content_index": 0, "part": self.part()})]

    def closing(self) -> Events:
        done = {"content_index": 0, "text": self.text, **self._more}
        return [
            (f"{self.text_event}.done", done),
            ("response.content_part.done", {"content_index": 0, "part": self.part()}),
        ]

    @property
    def _more(self) -> dict[str, Any]:
        return {}


class MessageItem(_Parted):
    prefix = "msg"
    text_event = "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[dict[str, Any]] = []

    def say(self, text: str, logprobs: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        self._texts.append(text)
        self._logprobs += logprobs
        return f"{self.text_event}.delta", {"content_index": 0, "delta": text, "logprobs": logprobs}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    @property
    def _more(self) -> dict[str, Any]:
        return {"logprobs": self._logprobs}

    def item(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        content = [self.part()] if begun else []
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}


class ReasoningItem(_Parted):
    prefix = "rs"
    text_event = "response.reasoning_text"

    def say(self, text: str) -> tuple[str, dict[str, Any]]:
        self._texts.append(text)
        return f"{self.text_event}.delta", {"content_index": 0, "delta": text}

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        content = [self.part()] if begun else []
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}


class CallItem(OpenItem):
    """A function call. ``call_id`` is what its output refers to."""

    prefix = "fc"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.call_id = call_id
        self.name = name

    def say(self, text: str) -> tuple[str, dict[str, Any]]:
        self._texts.append(text)
        return "response.function_call_arguments.delta", {"delta": text}

    def item(self, status: str, *, begun: bool = True) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": status,
        }

    def opening(self) -> Events:
        return []

    def closing(self) -> Events:
        return [("response.function_call_arguments.done", {"name": self.name, "arguments": self.text})]
