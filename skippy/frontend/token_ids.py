"""Token ids that clients write, in whatever field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import ApiError
from .fields import Fields, describe


def check_is_token_id(fields: Fields, name: str, value: Any) -> None:
    """Refuse what is no integer; which ids there are is for :func:`check_token_ids`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise fields.error(name, f"must be a token id, not {describe(value)}")


def check_token_ids(tokens: Iterable[str | int], size: int, param: str) -> None:
    """Refuse token ids that a vocabulary of ``size`` does not have; texts between them are passed over."""
    for index, token in enumerate(tokens):
        if isinstance(token, int) and not 0 <= token < size:
            where = f"{param}[{index}]"
            raise ApiError(f"{where} is {token}; this model's token ids are 0 to {size - 1}", param=where)
