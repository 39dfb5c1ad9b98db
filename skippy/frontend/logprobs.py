"""Log-probabilities: the fields that ask for them, and how each route words them.

They are those of the model's raw logits: what temperature, penalties or a bias did to the draw does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from skippy.engine import Vocabulary
from skippy.protocol import TokenLogProbability
from skippy.stage.settings import MAX_TOP_LOGPROBS

from .choices import ScoredToken
from .fields import Fields, describe

LEAST: Final = -9999.0
"""For a token that cannot come, whose logarithm JSON has no number for: OpenAI's value."""


def parse_chat_logprobs(fields: Fields) -> int | None:
    """``logprobs`` and ``top_logprobs`` of the chat route: how many likeliest tokens; None: none at all."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise fields.error("top_logprobs", "is only allowed when logprobs is true")
    return (top or 0) if wanted else None


def parse_completion_logprobs(fields: Fields) -> int | None:
    """``logprobs`` of the completions route, a number; some clients write false for none."""
    if fields.get("logprobs") is False:
        return None
    if fields.get("logprobs") is True:
        text = f"must be an integer from 0 to {MAX_TOP_LOGPROBS}, not {describe(True)}"
        raise fields.error("logprobs", text)
    return fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)


def token_text(data: bytes) -> str:
    """A token's text; bytes that are no UTF-8 by themselves, such as a part of a character, as ``\\xf0``."""
    return data.decode("utf-8", "backslashreplace")


def _number(scored: TokenLogProbability) -> float:
    return min(max(scored.log_probability, LEAST), 0.0)  # rounding may leave a value above 0


def chat_logprobs(vocabulary: Vocabulary, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The ``logprobs`` member of a choice on the chat route."""

    def entry(scored: TokenLogProbability) -> dict[str, Any]:
        data = vocabulary.piece(scored.token, special=True)
        return {"token": token_text(data), "logprob": _number(scored), "bytes": list(data)}

    content = [
        {**entry(token.position.chosen), "top_logprobs": [entry(top) for top in token.position.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(vocabulary: Vocabulary, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The ``logprobs`` member of a choice on the completions route."""

    def text(scored: TokenLogProbability) -> str:
        data = vocabulary.piece(scored.token, special=True)
        shown = token_text(data)
        return shown if shown.encode("utf-8", "replace") == data else f"bytes:{shown}"

    def likeliest(token: ScoredToken) -> dict[str, float]:
        found: dict[str, float] = {}
        # Several tokens may have the same text; the likeliest speaks for it. The chosen one is always there.
        for scored in (*token.position.top, token.position.chosen):
            found.setdefault(text(scored), _number(scored))
        return found

    return {
        "tokens": [text(token.position.chosen) for token in tokens],
        "token_logprobs": [_number(token.position.chosen) for token in tokens],
        "top_logprobs": [likeliest(token) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }
