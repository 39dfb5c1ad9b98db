"""Drives one generation through the chain: its prompt, then one decode step per token."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

import attrs

from skippy.config import OpenAIOptions
from skippy.engine import Vocabulary
from skippy.protocol import (
    PositionLogProbabilities,
)
from skippy.stage import LaneLost, SettingsRefused, Stage, StageError
from skippy.telemetry import Level, Telemetry, names

from .admission import AdmissionGate
from .decoding import DecodeLoop
from .generation import (
    ChainUnavailable,
    ContextLengthExceeded,
    FinishReason,
    GenerationError,
    GenerationRequest,
    InvalidSampling,
)
from .lanes import LanePool, PooledLane
from .prefill import Prefill


def random_id() -> int:
    """For a request or a session: nobody guesses it, and it is never 0."""
    return secrets.randbits(64) or 1


class ChainGenerator:
    """Serves generations over a lane pool. Implements :class:`skippy.frontend.generation.Generator`.

    Args:
        new_id: makes the ids of requests and sessions.

    Attributes:
        prefill: how prompts are cut, and what they have taught.
    """

    def __init__(
        self,
        stage: Stage,
        pool: LanePool,
        model_id: str,
        options: OpenAIOptions | None = None,
        *,
        new_id: Callable[[], int] = random_id,
    ) -> None:
        options = options or OpenAIOptions()
        vocabulary = stage.vocabulary
        if vocabulary is None or not stage.info.is_first:
            raise ValueError("only the stage that owns layer 0 can serve generations")
        self._stage = stage
        self._pool = pool
        self._model_id = model_id
        self._new_id = new_id
        self._vocabulary = vocabulary
        self.prefill = Prefill(stage, options)
        pool.on_request_over = self.prefill.learn
        kv_tokens = stage.info.context_length * stage.info.max_sequences
        self._gate = AdmissionGate(pool, kv_tokens, options, stage.context.telemetry)

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def context_length(self) -> int:
        return self._stage.info.context_length

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def unready(self) -> str | None:
        return self._pool.unready

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        return self._gate.preparing()

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChainStream]:
        count, limit = len(request.prompt), self.context_length
        if not 0 < count < limit:
            raise ContextLengthExceeded(
                f"the prompt has {count} tokens; the context holds {limit}, one of them for the answer"
                if count
                else "the prompt is empty"
            )
        request = attrs.evolve(request, max_tokens=min(request.max_tokens, limit - count))
        telemetry = self._stage.context.telemetry
        with telemetry.span(names.STAGE_OPENAI_DOWNSTREAM_CONNECT):
            admission = await self._gate.acquire(count, request.max_tokens)
        with admission.running() as pooled:
            stream = ChainStream(
                pooled, request, self._vocabulary, self.prefill, telemetry, new_id=self._new_id
            )
            with telemetry.span(
                names.STAGE_OPENAI_DECODE, level=Level.SUMMARY, prompt_token_count=count
            ) as span:
                try:
                    yield stream
                finally:
                    stream.stop()
                    span["completion_token_count"] = stream.generated
                    span["finish_reason"] = stream.finish_reason
                    self.prefill.ended(pooled)


class ChainStream:
    """The tokens of one generation. Cancelling an iteration step ends the generation."""

    def __init__(
        self,
        pooled: PooledLane,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        prefill: Prefill,
        telemetry: Telemetry,
        *,
        new_id: Callable[[], int] = random_id,
    ) -> None:
        self._pooled = pooled
        self._request = request
        self._vocabulary = vocabulary
        self._prefill = prefill
        self._telemetry = telemetry
        self._prefilled = False
        self._finish_reason: FinishReason | None = None
        self._logprobs: PositionLogProbabilities | None = None
        self.generated = 0
        pooled.request = (new_id(), new_id())
        self._decoding = DecodeLoop(pooled, request, vocabulary, pooled.request, telemetry)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def logprobs(self) -> PositionLogProbabilities | None:
        return self._logprobs

    def __aiter__(self) -> ChainStream:
        return self

    async def __anext__(self) -> int:
        try:
            if not self._prefilled:
                await self._prefill.run(self._pooled, self._request)
                self._prefilled = True
                self._decoding.begin()
            step = await self._decoding.next()
        except SettingsRefused as exc:
            raise InvalidSampling(str(exc)) from exc
        except LaneLost as exc:
            raise ChainUnavailable(f"a stage of the chain was lost: {exc}") from exc
        except StageError as exc:
            raise GenerationError(str(exc)) from exc
        if step is None:
            self._finish_reason = self._decoding.finish_reason
            raise StopAsyncIteration
        token, self._logprobs = step
        self.generated += 1
        self._pooled.token_received()
        return token

    def stop(self) -> None:
        """Begin no further decode step. Never waits."""
        self._decoding.stop()
