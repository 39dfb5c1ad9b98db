"""Serves generations over the chain: admits each, and opens the stream of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import attrs
import trio

from skippy.config import OpenAIOptions
from skippy.engine import Vocabulary
from skippy.protocol import ReplyStats
from skippy.stage import Stage, Tokenizer
from skippy.telemetry import Level, names

from .admission import AdmissionGate
from .cache_view import ChainCaches
from .chain_stream import ChainStream, random_id
from .constraints import check_constraint
from .embedding import Embedder, Vector
from .generation import ContextLengthExceeded, GenerationError, GenerationRequest
from .lanes import LanePool
from .prefill import Prefill
from .restoring import Restorer
from .sharing import PromptSharer
from .status import ChainStatus, LastRequest, StageTimes, chain_status, stage_times

TIMING_SECS: Final = 0.5
"""How long stages may take to say how long the last prompt took them."""


class ChainGenerator:
    """Serves generations over a lane pool. Implements :class:`skippy.frontend.generation.Generator`.

    Args:
        new_id: makes the ids of requests and sessions.

    Attributes:
        prefill: how prompts are cut, and what they have taught.
        restorer: what of them the stages still have.
        gate: who may run, and who waits.
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
        self._options = options
        self._pool = pool
        self._model_id = model_id
        self._new_id = new_id
        self._vocabulary = vocabulary
        self.prefill = Prefill(stage, options)
        self.restorer = Restorer(stage, pool, self.prefill.chunks)
        self._embedder = Embedder(stage)
        pool.on_request_over = self._learn
        # What is kept in the cache gives way to lanes, so it takes nothing from them.
        kv_tokens = stage.info.context_length * stage.config.lane_count
        self.gate = AdmissionGate(pool, kv_tokens, options, stage.context.telemetry)
        self._sharer = PromptSharer(self.gate, pool, self.prefill, self.restorer, new_id)
        self._cache = ChainCaches(stage, self.restorer, self.gate, new_id)
        self._last_request: LastRequest | None = None
        self._timed: LastRequest | None = None
        self._times: list[StageTimes] = []

    def _learn(self, stats: ReplyStats) -> None:
        self.prefill.learn(stats)
        self.restorer.learn(stats)

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
    def tokenizer(self) -> Tokenizer:
        return self._stage.tokenizer

    @property
    def lanes(self) -> int:
        return self._pool.size

    @property
    def unready(self) -> str | None:
        return self._pool.unready

    def status(self) -> ChainStatus:
        return chain_status(
            self._stage,
            self._pool,
            self.gate,
            self.restorer,
            self.prefill,
            self._last_request,
            self._times,
        )

    async def time_stages(self) -> None:
        last = self._last_request
        if last is self._timed or not self._pool.idle or self.gate.queue_depth:
            return
        self._timed = last
        with trio.move_on_after(TIMING_SECS), contextlib.suppress(GenerationError):
            self._times = stage_times(await self._cache.prompt_times())

    async def cache_report(self) -> dict[str, Any]:
        return await self._cache.report()

    async def drop_cache(self, namespace: str) -> int:
        return await self._cache.drop(namespace)

    @property
    def embedding_size(self) -> int | None:
        info = self._stage.info
        return None if info.pooling is None else info.hidden_size

    async def embed(self, tokens: Sequence[int]) -> Vector:
        admission = await self.gate.acquire(len(tokens), 0)
        with admission.running():
            return await self._embedder.embed(tokens, admission.work)

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        return self.gate.preparing()

    async def _check(self, request: GenerationRequest) -> int:
        """How many tokens the prompt has. Raises ContextLengthExceeded, or as :func:`check_constraint`."""
        count, limit = len(request.prompt), self.context_length
        if not 0 < count < limit:
            raise ContextLengthExceeded(
                f"the prompt has {count} tokens; the context holds {limit}, one of them for the answer"
                if count
                else "the prompt is empty"
            )
        if request.constraint is not None:
            await check_constraint(request.constraint, self._stage.context.grammars, request.client)
        return count

    async def share(self, request: GenerationRequest) -> int:
        await self._check(request)
        return await self._sharer.share(request)

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChainStream]:
        count = await self._check(request)
        request = attrs.evolve(request, max_tokens=min(request.max_tokens, self.context_length - count))
        telemetry = self._stage.context.telemetry
        asked = trio.current_time()
        with telemetry.span(names.STAGE_OPENAI_DOWNSTREAM_CONNECT):
            admission = await self.gate.acquire(count, request.max_tokens, promised=request.admitted)
        admission.work.request_id = request.request_id
        with admission.running():
            stream = ChainStream(
                admission,
                request,
                self._vocabulary,
                self.prefill,
                self.restorer,
                self._options,
                telemetry,
                new_id=self._new_id,
            )
            stream.timings.queue_ms = 1000 * (admission.work.began - asked)
            with telemetry.span(
                names.STAGE_OPENAI_DECODE, level=Level.SUMMARY, prompt_token_count=count
            ) as span:
                try:
                    yield stream
                finally:
                    stream.close()
                    self._last_request = LastRequest.of(request, stream.generated, stream.timings)
                    span["completion_token_count"] = stream.generated
                    span["finish_reason"] = stream.finish_reason
                    stream.summarise()
