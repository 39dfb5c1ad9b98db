"""The process that compiles grammars for a test, and draws a little text from each.

``python -m skippy.workers.grammar CPU_SECS MEMORY_BYTES``

Grammars come from clients. What would take too long, too much memory or too deep a stack does so here, and
not in a stage (:mod:`skippy.workers.child`).

The first frame is the vocabulary, as :meth:`Tokens.to_json` has it. A job is ``{"grammar"}``; its answer is
``{}``, or ``{"error"}``.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from skippy.workers.child import serve

MASK_SECS: Final = 0.05
"""Processor time that finding out what may come next may take, once. What people use takes up to 5 ms."""
TOO_SLOW: Final = (
    "it is too complex, or too ambiguous: finding out what may come next takes more than "
    f"{1000 * MASK_SECS:g} ms"
)
TEST_TOKENS: Final = 16
"""Of the text that is drawn for a test."""
_TEST_SECS: Final = 0.15

_EXCERPT: Final = re.compile(
    r"^at \d+\(\d+\): (?=failed to compile JSON)|\n *\d+ \| .*\Z|\n<non-verbose/>", re.DOTALL
)
_JSON_TEXT: Final = r'[^"\\\x00-\x1F\x7F]{1,10}'
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


class Tokens(TokenizerWrapper):
    """What llguidance asks of a tokenizer: tokens by id. One that is no text has a name, or gets one.

    Args:
        pieces: the tokens' texts; those without one are no text.
        special: names of such, by which a grammar may ask for them.
        ends: tokens that end a generation, at least one.
        encode: text to tokens; llguidance looks at it for hints alone.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special: dict[int, str],
        ends: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        names = {token: name.encode(errors="replace") for token, name in special.items()}
        self.tokens = [piece or names.get(token) or _NAMELESS % token for token, piece in enumerate(pieces)]
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece]
        self.eos_token_id = ends[0]
        self.ends = tuple(ends)
        self._pieces = pieces
        self._special = special
        self._encode = encode

    def __call__(self, s: str) -> list[int]:
        return self._encode(s)

    def to_json(self) -> dict[str, Any]:
        """The vocabulary without ``encode``; bytes are characters of the same number."""
        pieces = [piece.decode("latin-1") for piece in self._pieces]
        return {"pieces": pieces, "special": list(self._special.items()), "ends": self.ends}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tokens:
        """The vocabulary that was told; ``encode`` knows single bytes alone."""
        pieces = [piece.encode("latin-1") for piece in value["pieces"]]
        single = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}

        def encode(text: str) -> list[int]:
            return [single.get(bytes((byte,)), 0) for byte in text.encode(errors="replace")]

        return cls(pieces, dict(map(tuple, value["special"])), value["ends"], encode)


def make_tokenizer(tokens: Tokens) -> LLTokenizer:
    """The vocabulary as llguidance has it.

    Of its slices, sets of tokens whose place in a mask is worked out beforehand, it gets the first: the
    others take as long to make as all the rest, and 17 MB, and save no time that could be measured.
    """
    return LLTokenizer(tokens, eos_token=list(tokens.ends), slices=[_JSON_TEXT])


class Checker:
    """Tests grammars over one vocabulary."""

    def __init__(self, tokens: Tokens) -> None:
        self._ends = tokens.ends
        self._size = len(tokens.tokens)
        self._tokenizer = make_tokenizer(tokens)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to one job; never raises."""
        try:
            error = self._error(job["grammar"])
        except MemoryError:
            return {"kind": "memory", "error": "it needs too much memory"}
        except BaseException as exc:  # a panic of native code is no Exception
            error = f"{type(exc).__name__}: {exc}"
        return {"error": _shortened(error)} if error else {}

    def _error(self, grammar: str) -> str:
        """What is wrong with a grammar; "" for nothing."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=make_limits())
        if matcher.is_error():
            return matcher.get_error()
        dice = random.Random(0)  # the same grammar has the same answer
        began = time.process_time()
        for count in range(TEST_TOKENS):
            before = time.process_time()
            mask = matcher.compute_bitmask()
            spent = time.process_time() - before
            if matcher.is_error():
                return _failed(matcher, count)
            if spent > MASK_SECS:
                return TOO_SLOW
            token = self._pick(mask, dice)
            if token is None or time.process_time() - began > _TEST_SECS:
                return ""
            if not matcher.try_consume_tokens([token]):
                return _failed(matcher, count + 1)
        return ""

    def _pick(self, mask: bytes, dice: random.Random) -> int | None:
        """One of the tokens that may follow, but the end."""
        bits = bytearray(mask)
        for end in self._ends:
            bits[end // 8] &= ~(1 << end % 8)
        start = dice.randrange(len(bits))
        for index in (*range(start, len(bits)), *range(start)):
            if bits[index]:
                tokens = [8 * index + bit for bit in range(8) if bits[index] >> bit & 1]
                token = dice.choice(tokens)
                return token if token < self._size else None
        return None


def _failed(matcher: LLMatcher, count: int) -> str:
    why = f"{matcher.get_error().partition(chr(10))[0] or matcher.stop_reason()}"
    if not count:
        return f"no text fits it, or it is too complex ({why})"
    return f"it is too complex: a text that fits it came to no more than {count} tokens ({why})"


def _shortened(error: str) -> str:
    """Without the lines of the grammar that llguidance shows below its messages."""
    error = _EXCERPT.sub("", error)
    return error.removeprefix("failed to compile JSON schema: ").strip()[:2000]


def main(arguments: list[str]) -> None:
    checker: list[Checker] = []
    serve(
        lambda job: checker[0].answer(job),
        float(arguments[0]),
        int(arguments[1]),
        prepare=lambda opening: checker.append(Checker(Tokens.from_json(opening))),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
