"""Grammars over what a session generates: which tokens may come next, and what has come so far.

The matcher is llguidance's: an Earley parser over a lexer of regular expressions, in memory-safe code whose
work on each token is bounded, and which answers with an error where llama.cpp's own grammar code would end
the process. The language of a grammar's text is llguidance's variant of Lark.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from skippy.workers.grammar import TokenTable, make_limits

from .base import BoolArray, EngineError, Vocabulary


class GrammarFailed(EngineError):
    """A session's grammar cannot go on: it has become too complex, or nothing can follow."""


class GrammarMismatch(GrammarFailed):
    """The session holds a token that its grammar does not allow there."""


class GrammarVocabulary:
    """A model's tokens as grammars see them. Making it reads every token, which takes up to a second.

    Raises (when made): ValueError, a vocabulary in which no token ends a generation.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        def encode(text: str) -> list[int]:
            return vocabulary.tokenize(text, add_special=False, parse_special=False)

        self.size = vocabulary.size
        ends = [token for token in range(self.size) if vocabulary.is_end_of_generation(token)]
        if not ends:
            raise ValueError("this model has no token that ends a generation, which a grammar needs")
        tokens = [vocabulary.piece(token) for token in range(self.size)]
        table = TokenTable(tokens, special_tokens(vocabulary), ends, encode)
        self._ends = frozenset(ends)
        self._tokenizer = LLTokenizer(table, eos_token=ends)

    def compile(self, grammar: str, start: int) -> Grammar:
        """A grammar over what follows the first ``start`` tokens of a session. Any thread.

        Give it only what :func:`skippy.workers.grammar.check` has let through, which bounds what it takes.

        Raises:
            ValueError: why it is no grammar of this vocabulary.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=make_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Grammar(matcher, self.size, self._ends, start)


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

    def __init__(self, matcher: LLMatcher, size: int, ends: frozenset[int], start: int) -> None:
        self._matcher = matcher
        self._size = size
        self._ends = ends
        self._start = start
        self._taken = 0
        """Tokens behind the first ``start`` that the matcher has taken."""

    def rewind(self, length: int) -> None:
        """What the session holds from position ``length`` on is forgotten."""
        surplus = self._taken - max(0, length - self._start)
        if surplus > 0:
            self._matcher.rollback(surplus)
            self._taken -= surplus

    def allowed(self, history: Sequence[int]) -> BoolArray:
        """Which tokens may follow ``history``, all that the session holds: shape ``[vocab_size]``.

        Where the text is complete, the tokens that end a generation are among them.

        Raises:
            GrammarMismatch: a token behind the first ones does not fit the grammar; those before it do.
            GrammarFailed: the grammar has become too complex here, or nothing can follow.
        """
        matcher = self._matcher
        for position in range(self._start + self._taken, len(history)):
            token = history[position]
            # The end is no part of the text, and nothing comes behind it.
            if token in self._ends or not matcher.try_consume_tokens([token]):
                self._check()
                raise GrammarMismatch(f"grammar: token {token} at position {position} does not fit it")
            self._taken += 1
        mask = matcher.compute_bitmask()
        self._check()  # in an error it would allow the end
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().partition("\n")[0] or self._matcher.stop_reason()
            raise GrammarFailed(f"grammar: it cannot go on behind {self._taken} tokens: {why}")
