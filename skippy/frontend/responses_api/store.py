"""Responses that can be asked for, and gone on with, later: in memory, as many as fit."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import attrs

from ..responses import dump


@attrs.frozen(slots=True)
class StoredResponse:
    """A complete response. It is kept as JSON, so that its size is what it takes.

    Attributes:
        response: as its client got it.
        items: of the input that it was asked with.
        messages: the conversation up to and with it, without instructions, as chat has it.
    """

    response: bytes
    items: bytes
    messages: bytes

    @classmethod
    def of(
        cls, response: dict[str, Any], items: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]
    ) -> StoredResponse:
        return cls(dump(response), dump(items), dump(messages))

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items) + len(self.messages)

    def load_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.items)
        return items

    def load_messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = json.loads(self.messages)
        return messages


class ResponseStore:
    """The responses used last, each seen by its owner alone.

    Args:
        max_entries, max_bytes: of all owners together; what was not used for longest goes first. A response
            larger than all of it is not kept.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        if stored.size > self._max_bytes:
            return
        self._entries[owner, response_id] = stored
        self._bytes += stored.size
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """That response of ``owner``; None: there is none, or none any more."""
        key = owner, response_id
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget it; whether there was one."""
        found = self._entries.pop((owner, response_id), None)
        if found is not None:
            self._bytes -= found.size
        return found is not None
