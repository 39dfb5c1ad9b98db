"""The ``prompt`` of the completions route, in all the forms that OpenAI's has."""

from __future__ import annotations

from typing import Any

from .fields import I32_MAX, Fields, describe

Prompt = str | tuple[int, ...]
"""Text, or token ids that are taken as they are."""


def parse_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """One or several prompts, in their order: text, token ids, a list of texts, or one of token-id lists."""
    value = fields.get("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        found = "missing" if value is None else describe(value)
        text = f"must be text, token ids, or an array of several of either; it is {found}"
        raise fields.error("prompt", text)
    if not value:
        raise fields.error("prompt", "is empty; at least one prompt is needed")
    if isinstance(value[0], str):
        for index, item in enumerate(value):
            if not isinstance(item, str):
                text = f"must be a string, as the first is; it is {describe(item)}"
                raise fields.error(f"prompt[{index}]", text)
        return tuple(value)
    if isinstance(value[0], list):
        return tuple(_token_ids(fields, f"prompt[{index}]", item) for index, item in enumerate(value))
    return (_token_ids(fields, "prompt", value),)


def _token_ids(fields: Fields, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise fields.error(name, f"must be an array of token ids, as the first is; it is {describe(value)}")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= I32_MAX:
            raise fields.error(f"{name}[{index}]", "must be a token id, an integer from 0")
    if not value:
        raise fields.error(name, "is empty; at least one token id is needed")
    return tuple(value)
