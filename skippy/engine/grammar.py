"""Grammars over what a session generates: which tokens may come next, and what has come so far.

The matcher is llguidance's: an Earley parser over a lexer of regular expressions, in memory-safe code which
answers with an error where llama.cpp's own grammar code would end the process. Its own limits bound the work
on a token, but for an ambiguous grammar that bound is seconds. So it works beside the engine's thread, which
does not wait for long. The language of a grammar's text is llguidance's variant of Lark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher

from skippy.workers.grammar import MASK_SECS, TOO_SLOW, Tokens, make_limits, make_tokenizer

from .base import BoolArray, EngineError, Vocabulary
from .beside import Beside, RanAway

MEAN_MASK_SECS: Final = 0.01
"""Processor time for a token, on average; what people use takes up to 3 ms with 50,000 tokens."""
FREE_SECS: Final = 0.25
"""Processor time above that average which a session's grammar may take in all."""
TAKE_SECS: Final = 0.001
"""Processor time to take a token in, which costs little: the mask that allowed it has looked at it."""
MAX_RUNAWAYS: Final = 2
"""Grammars that may be at work on a token that is not waited for any more, while new ones begin."""
RUNAWAY_SECS: Final = 30.0
"""How long new ones wait for that; longer than any token takes."""


class GrammarFailed(EngineError):
    """A session's grammar cannot go on: it has become too complex, or nothing can follow."""


class GrammarMismatch(GrammarFailed):
    """The session holds a token that its grammar does not allow there."""


def read_tokens(vocabulary: Vocabulary) -> Tokens:
    """A model's tokens as grammars see them. Reads every token, see :meth:`Vocabulary.pieces`.

    Raises:
        ValueError: a vocabulary in which no token ends a generation.
    """

    def encode(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_special=False, parse_special=False)

    ends = [token for token in range(vocabulary.size) if vocabulary.is_end_of_generation(token)]
    if not ends:
        raise ValueError("this model has no token that ends a generation, which a grammar needs")
    return Tokens(vocabulary.pieces(), special_tokens(vocabulary), ends, encode)


class GrammarVocabulary:
    """The tokens over which grammars are compiled.

    Making it takes a tenth of a second and more, in which no other thread can run Python.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.size = len(tokens.tokens)
        self._ends = frozenset(tokens.ends)
        self._tokenizer = make_tokenizer(tokens)
        self._beside = Beside()

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> GrammarVocabulary:
        """That of a model. Raises ValueError as :func:`read_tokens` does."""
        return cls(read_tokens(vocabulary))

    def compile(self, grammar: str, start: int, too_slow: Callable[[str], object] | None = None) -> Grammar:
        """A grammar over what follows the first ``start`` tokens of a session. Any thread.

        Give it only what :class:`skippy.workers.grammar.Checker` has let through, which bounds what it takes.
        Where grammars have run away, it waits for them.

        Args:
            too_slow: is told why this grammar is not fit for use, if that turns out; in the engine's thread.

        Raises:
            ValueError: why it is no grammar of this vocabulary.
        """
        if not self._beside.settle(MAX_RUNAWAYS, RUNAWAY_SECS):
            raise ValueError(f"other grammars have kept this stage busy for {RUNAWAY_SECS:g} s; try again")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=make_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Grammar(matcher, self.size, self._ends, start, self._beside, too_slow)

    def close(self) -> None:
        """Its thread ends. Does not wait."""
        self._beside.close()


def special_tokens(vocabulary: Vocabulary) -> dict[int, str]:
    """Tokens that are no text, and their names: a grammar may ask for one as ``<|name|>``."""
    found: dict[int, str] = {}
    for name in vocabulary.special_tokens:
        tokens = vocabulary.tokenize(name, add_special=False, parse_special=True)
        if len(tokens) == 1 and not vocabulary.piece(tokens[0]):
            found[tokens[0]] = name
    return found


class Grammar:
    """One session's place in its grammar. One thread at a time.

    Tokens are taken in when somebody asks what may follow, not as they come: those that are rewound before
    that cost nothing.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        size: int,
        ends: frozenset[int],
        start: int,
        beside: Beside,
        too_slow: Callable[[str], object] | None,
    ) -> None:
        self._matcher = matcher
        self._size = size
        self._ends = ends
        self._start = start
        self._beside = beside
        self._too_slow = too_slow
        self._failed = ""
        """Why it is not used any more; its matcher may be at work still."""
        self._taken = 0
        """Tokens behind the first ``start`` that the matcher has taken."""
        self._masks = 0
        self.spent = 0.0
        """Processor time that it has taken so far."""

    def rewind(self, length: int) -> None:
        """What the session holds from position ``length`` on is forgotten."""
        surplus = self._taken - max(0, length - self._start)
        if surplus > 0 and not self._failed:
            self._matcher.rollback(surplus)
            self._taken -= surplus

    def allowed(self, history: Sequence[int]) -> BoolArray:
        """Which tokens may follow ``history``, all that the session holds: shape ``[vocab_size]``.

        Where the text is complete, the tokens that end a generation are among them.

        Raises:
            GrammarMismatch: a token behind the first ones does not fit the grammar; those before it do.
            GrammarFailed: the grammar has become too complex here, or takes too long, or nothing can follow.
        """
        if self._failed:
            raise GrammarFailed(self._failed)
        new = history[self._start + self._taken :]
        try:
            mask, spent = self._beside.run(lambda: self._mask(new), MASK_SECS + TAKE_SECS * len(new))
        except RanAway:
            raise self._give_up(TOO_SLOW) from None
        self._masks += 1
        self.spent += spent
        if self.spent > FREE_SECS + MEAN_MASK_SECS * (self._masks + self._taken):
            mean = 1000 * self.spent / self._masks
            raise self._give_up(
                f"it is too complex, or too ambiguous: it has taken {mean:.0f} ms for each of {self._masks} "
                f"tokens; {1000 * MEAN_MASK_SECS:.0f} ms is the most it may take on average"
            )
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def _mask(self, new: Sequence[int]) -> bytes:
        matcher = self._matcher
        for token in new:
            # The end is no part of the text, and nothing comes behind it.
            if token in self._ends or not matcher.try_consume_tokens([token]):
                self._check()
                position = self._start + self._taken
                raise GrammarMismatch(f"grammar: token {token} at position {position} does not fit it")
            self._taken += 1
        mask = matcher.compute_bitmask()
        self._check()  # in an error it would allow the end
        return mask

    def _give_up(self, why: str) -> GrammarFailed:
        self._failed = f"grammar: {why}"
        if self._too_slow is not None:
            self._too_slow(why)
        return GrammarFailed(self._failed)

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
            raise GrammarFailed(f"grammar: it cannot go on behind {self._taken} tokens: {why}")
