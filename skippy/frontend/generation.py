"""The seam between HTTP and the chain: what a generation is asked for, and what it gives.

The HTTP side (:mod:`skippy.frontend.app`) knows only this module; the chain side
(:mod:`skippy.frontend.driver`) implements it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from skippy.engine import Vocabulary
from skippy.protocol import PositionLogProbabilities, SamplingConfig
from skippy.stage import Tokenizer

from .status import ChainStatus
from .tools import AnswerReading

FinishReason = Literal["stop", "length"]


HitKind = Literal[
    "chain_exact_replay", "chain_full_prompt_first_token", "chain_fused_exact_prefix", "chain_prefix"
]
"""How a prompt, or its beginning, did not have to be computed: words of the trace points."""


class GenerationError(Exception):
    """A generation that ended without a finish reason.

    Attributes:
        status: HTTP status that fits (only of use before the first token).
        code: short machine-readable word, e.g. ``"stage_lost"``.
        param: the field of the request at fault; None: that is not known.
        retry_after_secs: when it is worth another try; None: nothing is known about that.
    """

    status = 500
    code = "internal_server_error"
    param: str | None = None
    retry_after_secs: int | None = None


class ContextLengthExceeded(GenerationError):
    """The prompt does not fit the context."""

    status = 400
    code = "context_length_exceeded"


class InvalidSampling(GenerationError):
    """A sampling setting the engine refuses, by name."""

    status = 400
    code = "invalid_value"


class InvalidGrammar(InvalidSampling):
    """The request's grammar does not compile."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ChainUnavailable(GenerationError):
    """A stage of the chain is not reachable, was lost, or sent something wrong."""

    status = 503
    code = "service_unavailable"


class ReplayRefused(ChainUnavailable):
    """A stage was lost, and this generation cannot be replayed; the text says what in it forbids that."""

    code = "replay_refused"


class TooManyRequests(GenerationError):
    """All lanes are busy, and the queue is full or the wait too long; worth another try later."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_secs: int = 1) -> None:
        super().__init__(message)
        self.retry_after_secs = retry_after_secs


class WorkTimedOut(GenerationError):
    """The chain made no progress with the generation for as long as it may."""

    status = 504
    code = "timeout"


@attrs.frozen(slots=True)
class Constraint:
    """A grammar that an answer is held to, from its first token to its last.

    Attributes:
        grammar: in llguidance's variant of Lark; it may name special tokens.
        param: the field of the request that asks for it.
    """

    grammar: str
    param: str


@attrs.frozen(slots=True, kw_only=True)
class GenerationRequest:
    """One generation.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: tokens to generate at most, at least 1. The driver stops earlier at the context's end.
        sampling: settings for the last stage; None is greedy.
        top_logprobs: with each token come its log-probability and those of this many likeliest tokens, 0 to
            20; None asks for none. A chain with a plain generation-8 peer refuses it (InvalidSampling).
        constraint: what is generated fits its grammar, which the last stage enforces; None: all may come.
            InvalidGrammar is raised for one that does not compile.
        namespace: whose cached prompts it may use (:func:`skippy.frontend.namespaces.cache_namespace`).
        request_id: the client's, for people who look at the lanes.
        client: who asks, where clients take turns.
        admitted: another generation of the same answer has had a lane, so this one is not refused for want
            of one.
        reading: how what is generated is to be read; None: it is text. Of no concern to the chain.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingConfig | None = None
    top_logprobs: int | None = None
    namespace: str = ""
    request_id: str = ""
    client: str = ""
    admitted: bool = False
    constraint: Constraint | None = None
    reading: AnswerReading | None = None


@attrs.define(slots=True)
class Timings:
    """What the parts of one generation took, in milliseconds, and how many tokens they had.

    Attributes:
        queue_ms: waiting for admission.
        cached_tokens: of the prompt, those that were not computed, because the stages still had them.
        restore_ms: asking every stage for those.
        prefill_tokens: of the prompt, those that were sent through the chain ahead of its last one.
        prefill_ms: sending them.
        prompt_ms: from admission to the first token, the two above and the first decode step included.
        answer_ms: from the first token to the end.
        hit_kind: why tokens of the prompt were not computed; None: all were.
    """

    queue_ms: float = 0.0
    cached_tokens: int = 0
    restore_ms: float = 0.0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    prompt_ms: float = 0.0
    answer_ms: float = 0.0
    hit_kind: HitKind | None = None


class TokenStream(Protocol):
    """Async iterator of generated token ids; the end-of-generation token is not among them.

    Iteration ends after a finish reason is known; it raises :class:`GenerationError` if the generation fails.

    Attributes:
        express: offered each token that a step of the iteration waits for; True: the step need not see it,
            and waits for the next one. Called by whatever has brought the token, so it must not wait. What it
            raises ends the iteration.
        timings: complete once the generation has ended.
    """

    express: Callable[[int], bool] | None
    timings: Timings

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until iteration has ended normally."""

    @property
    def logprobs(self) -> PositionLogProbabilities | None:
        """Of the token that iteration gave last, where the request asked for them."""

    def __aiter__(self) -> AsyncIterator[int]: ...

    async def __anext__(self) -> int: ...


class Generator(Protocol):
    """What serves generations: one lane each, as many at once as there are lanes, others wait."""

    @property
    def model_id(self) -> str:
        """The name clients must ask for."""

    @property
    def context_length(self) -> int:
        """Positions (prompt + generated) one request may use."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def lanes(self) -> int:
        """Generations that can run at once."""

    @property
    def unready(self) -> str | None:
        """Why the chain cannot serve now, for clients; None while every stage is connected and loaded."""

    async def cache_report(self) -> dict[str, Any]:
        """What the prefix caches of the stages hold and have counted, for people: JSON values.

        Takes a lane for a moment; says so where there is none for the question.
        """

    def status(self) -> ChainStatus:
        """What stages and lanes are doing now, and have done."""

    async def time_stages(self) -> None:
        """Have :meth:`status` know what the last prompt took each stage.

        Asks only once for each request, and only while a lane is idle and nobody waits for one; it takes that
        lane for as long as the answer does, at most half a second.
        """

    async def drop_cache(self, namespace: str) -> int:
        """Have every stage forget what it remembers, but for what running requests use.

        Takes a lane for as long as it takes, as a request does.

        Args:
            namespace: ``all``, ``common``, or the first digits of those to forget.

        Returns: entries that stage 0 has forgotten.

        Raises: TooManyRequests, ChainUnavailable, or another GenerationError: not all stages have been told.
        """

    @property
    def embedding_size(self) -> int | None:
        """How many values the embedding of a text has; None: there are no embeddings here."""

    async def embed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The embedding of a text of at least one token, a vector of length 1.

        Takes a lane, as a generation does.

        Raises:
            TooManyRequests, ChainUnavailable, WorkTimedOut, or another GenerationError.
        """

    def preparing(self) -> AbstractContextManager[None]:
        """A block in which a request's prompt is made, which counts as one that waits for a lane.

        Raises (on entering): TooManyRequests, the queue is full.
        """

    async def share(self, request: GenerationRequest) -> int:
        """Have a prompt computed once, for several generations that are about to continue it.

        Takes a lane meanwhile, as a generation does, and leaves what it computes to the stages' caches. Does
        nothing where those keep no prompts, or none so short, or have all of it.

        Returns: tokens of the prompt that the caches had before.

        Raises: as entering :meth:`generate` does. A chain that fails at it is for the generations to find.
        """

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Start a generation; leaving the block, on any path, ends it and frees its lane.

        Entering waits for a free lane. Leaving early (stop string, disconnect, cancellation) never waits
        for the chain: the lane is cleaned up in the background.

        Raises (on entering, from iteration or on leaving): ContextLengthExceeded, InvalidSampling,
        TooManyRequests, ChainUnavailable, WorkTimedOut, or another GenerationError.
        """
