"""Drives one generation through the chain: its prompt, then one decode step per token."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

import attrs

from skippy.config import OpenAIOptions
from skippy.engine import Vocabulary
from skippy.protocol import (
    FinishHint,
    Message,
    MessageKind,
    PositionLogProbabilities,
    StageState,
    default_state,
)
from skippy.stage import LaneLost, SettingsRefused, Stage, StageError
from skippy.telemetry import Level, Telemetry, names

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

_DECODE_STATE = default_state(MessageKind.DECODE_EMBD)


class ChainGenerator:
    """Serves generations over a lane pool. Implements :class:`skippy.frontend.generation.Generator`.

    Attributes:
        prefill: how prompts are cut, and what they have taught.
    """

    def __init__(
        self, stage: Stage, pool: LanePool, model_id: str, options: OpenAIOptions | None = None
    ) -> None:
        vocabulary = stage.vocabulary
        if vocabulary is None or not stage.info.is_first:
            raise ValueError("only the stage that owns layer 0 can serve generations")
        self._stage = stage
        self._pool = pool
        self._model_id = model_id
        self._vocabulary = vocabulary
        self.prefill = Prefill(stage, options or OpenAIOptions())
        pool.on_request_over = self.prefill.learn

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
            pooled = await self._pool.lease()
        try:
            stream = ChainStream(pooled, request, self._vocabulary, self.prefill, telemetry)
            with telemetry.span(
                names.STAGE_OPENAI_DECODE, level=Level.SUMMARY, prompt_token_count=count
            ) as span:
                try:
                    yield stream
                finally:
                    span["completion_token_count"] = stream.generated
                    span["finish_reason"] = stream.finish_reason
        finally:
            self.prefill.ended(pooled)
            pooled.give_back()


class ChainStream:
    """The tokens of one generation. Cancelling an iteration step ends the generation."""

    def __init__(
        self,
        pooled: PooledLane,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        prefill: Prefill,
        telemetry: Telemetry,
    ) -> None:
        self._pooled = pooled
        self._request = request
        self._vocabulary = vocabulary
        self._prefill = prefill
        self._telemetry = telemetry
        self._request_id = secrets.randbits(64) or 1
        self._session_id = secrets.randbits(64) or 1
        self._current: int | None = None
        self._finish_reason: FinishReason | None = None
        self._logprobs: PositionLogProbabilities | None = None
        self._complete = False
        """The last stage has said that nothing may follow."""
        self.generated = 0
        pooled.request = (self._request_id, self._session_id)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def logprobs(self) -> PositionLogProbabilities | None:
        return self._logprobs

    def __aiter__(self) -> ChainStream:
        return self

    async def __anext__(self) -> int:
        if self._finish_reason is None and self.generated >= self._request.max_tokens:
            self._finish_reason = "length"
        if self._finish_reason is not None:
            raise StopAsyncIteration
        try:
            if self._current is None:
                await self._prefill.run(self._pooled, self._request)
                self._current = self._request.prompt[-1]
            with self._telemetry.span(
                names.STAGE_OPENAI_DECODE_TOKEN, request_id=self._request_id, decode_step=self.generated
            ):
                token = await self._decode(self._current)
        except SettingsRefused as exc:
            raise InvalidSampling(str(exc)) from exc
        except LaneLost as exc:
            raise ChainUnavailable(f"a stage of the chain was lost: {exc}") from exc
        except StageError as exc:
            raise GenerationError(str(exc)) from exc
        if self._vocabulary.is_end_of_generation(token) and not self._ignores_eos:
            self._finish_reason = "stop"
            raise StopAsyncIteration
        if self._complete:
            self._finish_reason = "stop"
        self._current = token
        self.generated += 1
        return token

    @property
    def _ignores_eos(self) -> bool:
        return self._request.sampling is not None and self._request.sampling.ignores_eos

    async def _decode(self, token: int) -> int:
        count, step = len(self._request.prompt), self.generated
        # Spelled out: this runs for every token.
        state = StageState(
            phase=_DECODE_STATE.phase, prompt_token_count=count, decode_step=step, current_token=token
        )
        message = Message(
            MessageKind.DECODE_EMBD,
            state,
            pos_start=count - 1 + step,
            token_count=1,
            request_id=self._request_id,
            session_id=self._session_id,
            tokens=(token,),
        )
        place = await self._pooled.handle(message)
        prediction = await place.wait()
        if prediction.predicted < 0:
            raise self._lose("the last stage predicted nothing")
        if place.annex is not None:
            self._complete = place.annex.finish_hint is FinishHint.MUST_END
        if self._request.top_logprobs is not None:
            scores = () if place.annex is None else place.annex.log_probabilities
            wanted = min(self._request.top_logprobs, self._vocabulary.size)
            if [(s.chosen.token, len(s.top)) for s in scores] != [(prediction.predicted, wanted)]:
                raise self._lose("the last stage did not send the log-probabilities that were asked for")
            self._logprobs = scores[0]
        return prediction.predicted

    def _lose(self, reason: str) -> LaneLost:
        """End a lane whose last stage does not answer what was asked: its next answer is worth no more."""
        lost = LaneLost(reason)
        self._pooled.lane.fail(lost)
        return lost
