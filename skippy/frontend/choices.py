"""One choice of an answer: generated tokens in, pieces of text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import attrs

from skippy.engine import Vocabulary
from skippy.protocol import PositionLogProbabilities, SamplingConfig

from .generation import FinishReason, Timings
from .text import Detokeniser, StopMatcher
from .tools import AnswerReading, Content, Delta, OutputParser

MAX_CHOICES: Final = 128
"""Choices of one request at most, those of all its prompts together. OpenAI's limit of ``n``."""


AnswerEnd = FinishReason | Literal["tool_calls"]


@attrs.frozen(slots=True)
class ScoredToken:
    """A token's log-probabilities, and where in the choice's text, in characters, the token begins."""

    start: int
    position: PositionLogProbabilities


@attrs.frozen(slots=True)
class Piece:
    """What one choice says next.

    Attributes:
        choice: its index in the answer.
        text: goes behind what it has said before; may be empty.
        scores: where they were asked for, those of the tokens whose text ends in this one.
        finish_reason: it says no more after this piece, and why; None: it goes on.
        stop: the stop string that has ended it, of such a last piece.
        deltas: what it says if that is not only content; then ``text`` is empty.
    """

    choice: int
    text: str
    scores: tuple[ScoredToken, ...] = ()
    finish_reason: AnswerEnd | None = None
    stop: str | None = None
    deltas: tuple[Delta, ...] = ()

    @property
    def is_only_text(self) -> bool:
        return not self.scores and self.finish_reason is None and not self.deltas

    @property
    def content(self) -> str:
        """What it says to the reader, without what it says besides."""
        said = [delta.text for delta in self.deltas if isinstance(delta, Content)]
        return self.text + "".join(said)

    @property
    def is_empty(self) -> bool:
        return not self.text and self.is_only_text


@attrs.define(slots=True)
class ChoiceResult:
    """A choice as a whole; see :class:`Piece`. ``text`` is all its content, ``deltas`` are all the others."""

    text: str = ""
    scores: list[ScoredToken] = attrs.field(factory=list)
    finish_reason: AnswerEnd | None = None
    stop: str | None = None
    deltas: list[Delta] = attrs.field(factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.content
        self.deltas += [delta for delta in piece.deltas if not isinstance(delta, Content)]
        self.scores += piece.scores
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop = piece.stop or self.stop


def choice_sampling(sampling: SamplingConfig | None, number: int) -> SamplingConfig | None:
    """The sampling of choice ``number`` of a prompt: its seed is the request's plus that number.

    So the first one is what the request would get with n = 1. Draws are counter-based, so neighbouring seeds
    have nothing to do with each other.
    """
    if sampling is None or not number:
        return sampling
    return attrs.evolve(sampling, seed=(sampling.seed + number) % 2**32)


class _ScoreQueue:
    """Log-probabilities that wait until the text of their tokens is let out."""

    def __init__(self) -> None:
        self._decoded = 0
        """Characters that the tokens so far have come to."""
        self._released = 0
        """Characters of those that have been let out."""
        self._incomplete: list[ScoredToken] = []
        """Tokens that end inside a character."""
        self._waiting: deque[tuple[int, ScoredToken]] = deque()
        """The others, each with the end of its text."""

    def put(self, position: PositionLogProbabilities, text: str, *, complete: bool) -> None:
        """A token was decoded to ``text``; not ``complete``: the token after it goes on with a character."""
        self._incomplete.append(ScoredToken(self._decoded, position))
        self._decoded += len(text)
        if complete:
            self._waiting += ((self._decoded, token) for token in self._incomplete)
            self._incomplete.clear()

    def take(self, text: str) -> tuple[ScoredToken, ...]:
        """Those whose text ends in ``text``, which is let out now."""
        self._released += len(text)
        taken = []
        while self._waiting and self._waiting[0][0] <= self._released:
            taken.append(self._waiting.popleft()[1])
        return tuple(taken)

    def take_rest(self, text: str, *, stopped: bool) -> tuple[ScoredToken, ...]:
        """The rest; of a text that was cut at a stop string, only those that begin before the cut."""
        self._released += len(text)
        rest = [token for _, token in self._waiting] + self._incomplete
        return tuple(token for token in rest if not stopped or token.start < self._released)


class Choice:
    """Bookkeeping of one choice. Sans-IO.

    Args:
        index: among the choices of the answer.
        scored: each token comes with log-probabilities.
        reading: how the text is to be read; None: it is content.

    Attributes:
        generated: tokens so far, also those whose text a stop string swallows.
        reasoned: of those, the ones of reasoning that is split off, the mark behind it included.
        finish_reason: None until :meth:`finish`.
        timings: of its generation, complete once that has ended.
    """

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        *,
        scored: bool = False,
        reading: AnswerReading | None = None,
    ) -> None:
        self.index = index
        self.generated = 0
        self.reasoned = 0
        self.finish_reason: AnswerEnd | None = None
        self.timings = Timings()
        self._vocabulary = vocabulary
        self._detokeniser = Detokeniser()
        self._matcher = StopMatcher(stops)
        self._scores = _ScoreQueue() if scored else None
        self._parser = None if reading is None else reading.parser()
        self._shown = frozenset[int]() if reading is None else reading.shown
        self._never_ends = reading is None or reading.tools is None or reading.parallel

    @property
    def stopped(self) -> bool:
        """A stop string has come, or the one call that was wanted: nothing more is said."""
        return self._matcher.stopped or (self._parser is not None and self._parser.done)

    @property
    def is_plain(self) -> bool:
        """Whether text goes out as it comes in, and nothing else: :meth:`take` may be used."""
        return self._scores is None and not self._matcher.seeks and self._active_parser is None

    @property
    def flows(self) -> bool:
        """Whether no token makes it :attr:`stopped`, or comes with more than its id."""
        return self._scores is None and not self._matcher.seeks and self._never_ends

    @property
    def _active_parser(self) -> OutputParser | None:
        parser = self._parser
        return None if parser is None or parser.transparent else parser

    def take(self, token: int) -> str:
        """:meth:`feed` where :attr:`is_plain`."""
        self.generated += 1
        shown = token in self._shown and self._active_parser is not None
        return self._detokeniser.feed(self._vocabulary.piece(token, special=shown))

    def _read(self, text: str, *, ends: bool = False) -> tuple[str, tuple[Delta, ...]]:
        """What ``text`` says: content, or anything."""
        parser = self._active_parser
        if parser is None:
            return text, ()
        deltas = parser.feed(text)
        if ends:
            deltas += parser.finish()
        content = [delta.text for delta in deltas if isinstance(delta, Content)]
        return ("".join(content), ()) if len(content) == len(deltas) else ("", tuple(deltas))

    def feed(self, token: int, position: PositionLogProbabilities | None) -> Piece | None:
        """What the next token lets out; None: nothing. ``position``: its log-probabilities, where scored."""
        self.reasoned += self._parser is not None and self._parser.thinking
        decoded = self.take(token)
        text = self._matcher.feed(decoded)
        scores: tuple[ScoredToken, ...] = ()
        if self._scores is not None:
            assert position is not None
            self._scores.put(position, decoded, complete=not self._detokeniser.pending)
            if not self._matcher.stopped:
                scores = self._scores.take(text)
            else:
                scores = self._scores.take_rest(text, stopped=True)
                self._scores = None
        said, deltas = self._read(text)
        return Piece(self.index, said, scores, deltas=deltas) if said or scores or deltas else None

    def finish(self, reason: FinishReason | None) -> Piece:
        """The last piece.

        Args:
            reason: why there are no more tokens; not looked at if :attr:`stopped`.
        """
        text = ""
        if not self._matcher.stopped:
            text = self._matcher.feed(self._detokeniser.finish()) + self._matcher.finish()
        scores: tuple[ScoredToken, ...] = ()
        if self._scores is not None:
            scores = self._scores.take_rest(text, stopped=self._matcher.stopped)
        said, deltas = self._read(text, ends=True)
        reason = "stop" if self.stopped else reason
        if reason is None:
            raise RuntimeError("the token stream ended without a finish reason")
        self.finish_reason = reason if self._parser is None else self._parser.finish_reason(reason)
        return Piece(self.index, said, scores, self.finish_reason, self._matcher.found, deltas)
