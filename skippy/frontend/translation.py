"""Requests of other routes in the words of chat completions, and the errors about them back again.

What a request asks for is read and checked in one place, the chat schema. A route with other names translates
its bodies first, and remembers which of its parameters became which of chat's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from .errors import ApiError
from .fields import Fields, describe
from .sampling import parse_sampling

T = TypeVar("T")


def _sampling_fields() -> tuple[str, ...]:
    fields = Fields({})
    parse_sampling(fields)
    return tuple(sorted(fields.known))


SAMPLING_FIELDS: Final = _sampling_fields()
"""Parameters of sampling, which every route has under the same names."""


class ChatBody:
    """The body of a chat request that is being put together, with where its parts come from.

    Attributes:
        data: the body.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"messages": []}
        self._names: dict[str, str] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self.data["messages"]
        return messages

    def put(self, name: str, value: Any, origin: str) -> None:
        """A parameter that ``origin`` became; None: the request does not have it."""
        if value is not None:
            self.data[name] = value
        self.came_from(name, origin)

    def say(self, message: dict[str, Any], origin: str) -> None:
        """A message more."""
        self.came_from(f"messages[{len(self.messages)}]", origin)
        self.messages.append(message)

    def call(self, call: dict[str, Any], origin: str, id_name: str = "id") -> None:
        """A call more in the last message, whose id is called ``id_name`` in ``origin``."""
        calls = self.messages[-1].setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.came_from(place, origin)
        self.came_from(f"{place}.function", origin)
        self.came_from(f"{place}.id", f"{origin}.{id_name}")
        calls.append(call)

    def came_from(self, name: str, origin: str) -> None:
        """Errors about ``name`` and what is in it are errors about ``origin``."""
        if name != origin:
            self._names[name] = origin

    def read(self, parse: Callable[[dict[str, Any]], T]) -> T:
        """What ``parse`` makes of the body.

        Raises:
            ApiError: as ``parse`` does, in the words of the route.
        """
        with self.renaming():
            return parse(self.data)

    @contextlib.contextmanager
    def renaming(self) -> Iterator[None]:
        """A block whose errors are about chat's parameters; outside of it they are about the route's."""
        try:
            yield
        except ApiError as error:
            raise self.renamed(error) from error

    def renamed(self, error: ApiError) -> ApiError:
        """The error of a chat request in the route's words."""
        param = error.param
        names = sorted(self._names, key=len, reverse=True)
        known = next((name for name in names if param is not None and _is_in(param, name)), None)
        if param is None or known is None:
            return error
        origin = self._names[known] + param[len(known) :]
        return ApiError(
            error.message.replace(param, origin),
            status=error.status,
            param=origin,
            code=error.code,
            retry_after_secs=error.retry_after_secs,
        )


def _is_in(param: str, name: str) -> bool:
    return param.startswith(name) and param[len(name) : len(name) + 1] in ("", ".", "[")


def required_text(fields: Fields, name: str) -> str:
    """A string that must be there."""
    value = fields.text(name)
    if value is None:
        raise fields.error(name, "is missing; a string is needed")
    return value


def objects(fields: Fields, name: str) -> list[Fields]:
    """The objects of an array, to be read; empty where it is absent."""
    values = fields.array(name) or []
    return [Fields.of(value, f"{fields.path(name)}[{index}]") for index, value in enumerate(values)]


def text_or_parts(fields: Fields, name: str, read: Callable[[Fields], str]) -> str | None:
    """A member that is a string or an array of parts, each of which ``read`` makes text of; None: absent.

    Parts are joined as chat joins them, by newlines.
    """
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.error(name, f"must be a string or an array of parts, not {describe(value)}")
    return "\n".join(map(read, objects(fields, name)))
