"""The process that compiles grammars for a test.

``python -m skippy.workers.grammar CPU_SECS MEMORY_BYTES``

Grammars come from clients. What would take too long, too much memory or too deep a stack to compile does so
here, and not in a stage (:mod:`skippy.workers.child`).

A job is ``{"grammar", "size", "special"}``: the text; how many tokens the vocabulary has; and those of them
that are no text, id and name. Its answer is ``{}``, or ``{"error"}``.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from skippy.workers.child import serve

_EXCERPT: Final = re.compile(
    r"^at \d+\(\d+\): (?=failed to compile JSON)|\n *\d+ \| .*\Z|\n<non-verbose/>", re.DOTALL
)
_NAMELESS: Final = b"<[%d]>"


def make_limits() -> LLParserLimits:
    """What one grammar may take, when it is compiled and for each token."""
    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=25_000,  # of up to 2 KB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class TokenTable(TokenizerWrapper):
    """What llguidance asks of a tokenizer: tokens by id. One that is no text has a name, or gets one.

    Args:
        ends: tokens that end a generation.
        encode: text to tokens; llguidance looks at it for hints alone.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: dict[int, str],
        ends: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        names = {token: name.encode(errors="replace") for token, name in special.items()}
        self.tokens = [piece or names.get(token) or _NAMELESS % token for token, piece in enumerate(tokens)]
        self.special_token_ids = [token for token, piece in enumerate(tokens) if not piece]
        self.eos_token_id = ends[0]
        self._encode = encode

    def __call__(self, s: str) -> list[int]:
        return self._encode(s)


def check(job: dict[str, Any]) -> dict[str, Any]:
    """The answer to one job; never raises."""
    try:
        error = _check(job["grammar"], _tokenizer(job["size"], tuple(map(tuple, job["special"]))))
    except MemoryError:
        return {"kind": "memory", "error": "it needs too much memory"}
    except BaseException as exc:  # a panic of native code is no Exception
        error = f"{type(exc).__name__}: {exc}"
    return {"error": _shortened(error)} if error else {}


def _shortened(error: str) -> str:
    """Without the lines of the grammar that llguidance shows below its messages."""
    error = _EXCERPT.sub("", error)
    return error.removeprefix("failed to compile JSON schema: ").strip()[:2000]


def _check(grammar: str, tokenizer: LLTokenizer) -> str:
    """What is wrong with a grammar; "" for nothing. Its first step is taken, too."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=make_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            return f"no text fits it, or it is too complex ({matcher.stop_reason()})"
    return matcher.get_error()


@functools.lru_cache(maxsize=1)
def _tokenizer(size: int, special: tuple[tuple[int, str], ...]) -> LLTokenizer:
    """A vocabulary of single bytes, with the real one's size, and its special tokens in their places."""
    names = dict(special)
    free = [token for token in range(max(size, len(names) + 257)) if token not in names]
    tokens = [b""] * (free[-1] + 1 if free else size)
    for byte, token in enumerate(free[:256]):
        tokens[token] = bytes((byte,))
    end = min(names, default=free[256])
    return LLTokenizer(
        TokenTable(tokens, names, [end], lambda text: [free[byte] for byte in text.encode()]), slices=[]
    )


if __name__ == "__main__":
    serve(check, float(sys.argv[1]), int(sys.argv[2]))
