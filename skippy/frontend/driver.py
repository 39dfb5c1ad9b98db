"""Drives one generation through the chain: its prompt, then one decode step per token."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import attrs
import trio

from skippy.config import OpenAIOptions
from skippy.engine import Vocabulary
from skippy.protocol import PositionLogProbabilities, ReplyStats
from skippy.stage import LaneLost, SettingsRefused, Stage, StageError, Tokenizer
from skippy.telemetry import Level, Telemetry, names

from .admission import Admission, AdmissionGate
from .cache_view import ChainCaches
from .constraints import check_constraint, refusal
from .decoding import DecodeLoop, Token
from .embedding import Embedder, Vector
from .generation import (
    ContextLengthExceeded,
    FinishReason,
    GenerationError,
    GenerationRequest,
    HitKind,
    Timings,
)
from .lanes import LanePool, PooledLane
from .prefill import Prefill
from .recovery import Recovery
from .restoring import Restored, Restorer
from .sharing import PromptSharer
from .status import ChainStatus, LastRequest, StageTimes, chain_status, stage_times

TIMING_SECS: Final = 0.5
"""How long stages may take to say how long the last prompt took them."""


def random_id() -> int:
    """For a request or a session: nobody guesses it, and it is never 0."""
    return secrets.randbits(64) or 1


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
        self.restorer = Restorer(stage, pool)
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
            admission = await self.gate.acquire(count, request.max_tokens)
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


class ChainStream:
    """The tokens of one generation. Cancelling an iteration step ends the generation.

    A lane that is lost in the middle is replaced (:mod:`skippy.frontend.recovery`): the tokens go on.

    Attributes:
        express: see :class:`skippy.frontend.generation.TokenStream`.
        generated: tokens so far.
        timings: see :class:`skippy.frontend.generation.TokenStream`.
    """

    def __init__(
        self,
        admission: Admission,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        prefill: Prefill,
        restorer: Restorer,
        options: OpenAIOptions,
        telemetry: Telemetry,
        *,
        new_id: Callable[[], int] = random_id,
    ) -> None:
        self._admission = admission
        self._request = request
        self._vocabulary = vocabulary
        self._prefill = prefill
        self._restorer = restorer
        self._telemetry = telemetry
        self._new_id = new_id
        self._request_id = new_id()
        self._recovery = Recovery(admission, options, telemetry, self._request_id, request.sampling)
        self._decoding: DecodeLoop | None = None
        """On the present lane; None before its prompt is in."""
        self._fed = False
        """Its prompt was in a lane once."""
        self._audited = restorer.chosen_for_audit()
        known = () if self._audited else restorer.known_answer(request)
        self._known = deque(known[: request.max_tokens])
        """First tokens of the answer that were given to an equal request, and not yet to this one."""
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._logprobs: PositionLogProbabilities | None = None
        self.express: Callable[[int], bool] | None = None
        self.timings = Timings()
        self._begin_session(admission.lane, 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def logprobs(self) -> PositionLogProbabilities | None:
        return self._logprobs

    @property
    def generated(self) -> int:
        return len(self._tokens)

    def __aiter__(self) -> ChainStream:
        return self

    async def __anext__(self) -> int:
        if self._known:
            return self._tell_known()
        if self._decoding is None and self.generated == self._request.max_tokens:  # all of it was known
            self._finish_reason = "length"
            raise StopAsyncIteration
        try:
            try:
                step = await (self._decoding or await self._feed()).next()
            except LaneLost as lost:
                step = await self._replay(lost)
        except SettingsRefused as exc:
            raise refusal(exc, self._request.constraint) from exc
        except StageError as exc:
            raise GenerationError(str(exc)) from exc
        if step is None:
            assert self._decoding is not None
            self._finish_reason = self._decoding.finish_reason
            raise StopAsyncIteration
        self._count(step)
        return step[0]

    def _tell_known(self) -> int:
        if not self._tokens:
            whole: HitKind = "chain_full_prompt_first_token"
            if len(self._known) > 1:
                whole = "chain_exact_replay"
            self.timings.hit_kind, self._admission.work.replayed = whole, True
            self.timings.cached_tokens = len(self._request.prompt)  # unless the rest of the answer needs it
        token = self._known.popleft()
        self._count((token, None))
        return token

    def _count(self, step: Token) -> None:
        token, self._logprobs = step
        self._tokens.append(token)
        self._admission.lane.token_received()

    def _express(self, step: Token) -> bool:
        # The end of a replay is for the iteration to tell.
        if self.express is None or self._recovery.under_way or not self.express(step[0]):
            return False
        self._count(step)
        return True

    async def _feed(self) -> DecodeLoop:
        """Put all that is known of the generation into its lane, and begin to decode."""
        lane, request, prefill, restorer = self._admission.lane, self._request, self._prefill, self._restorer
        is_replay = self._recovery.count > 0
        plan = await restorer.plan(request, self._tokens, audit=self._audited and not is_replay)
        if not is_replay:
            await prefill.configure(lane, request, audit=plan.audit, checkpoints=plan.checkpoints)
        times = [trio.current_time()]
        restored = await restorer.restore(lane, request, self._tokens, plan)
        times.append(trio.current_time() if plan.length else times[0])
        ends = () if is_replay else plan.checkpoints  # whose settings were sent before anything was known
        first = await prefill.run(
            lane,
            request,
            self._tokens,
            restored.length,
            plan.schedule,
            ends,
            joined=restorer.joins(request, plan, restored),
        )
        times.append(trio.current_time())
        first = restored.first or first
        if not self._fed:
            self._fed = True
            self._account(restored, times)
        self._decoding = DecodeLoop(
            lane, request, self._vocabulary, self._telemetry, self.generated, self._express
        )
        self._decoding.begin(first)
        return self._decoding

    def _account(self, restored: Restored, times: Sequence[float]) -> None:
        """The prompt is in the lane; ``times``: before the restore, after it, and now."""
        timings, count = self.timings, len(self._request.prompt)
        timings.hit_kind = timings.hit_kind or restored.kind
        timings.cached_tokens = self._admission.work.cached_tokens = min(restored.length, count)
        timings.prefill_tokens = max(0, (count if self._tokens else count - 1) - restored.length)
        timings.restore_ms, timings.prefill_ms = (1000 * (b - a) for a, b in itertools.pairwise(times))

    async def _replay(self, lost: LaneLost) -> Token | None:
        """What comes next, from another lane."""
        while True:
            self.stop()
            self._decoding = None
            await self._recovery.take_lane(lost, self.generated, self._configure)
            try:
                step = await (await self._feed()).next()
            except LaneLost as again:
                lost = again
            else:
                self._recovery.caught_up()
                return step

    async def _configure(self, lane: PooledLane) -> None:
        self._begin_session(lane, self._recovery.count + 1)
        place = await self._prefill.configure(lane, self._request)
        await place.wait()

    def _begin_session(self, lane: PooledLane, generation: int) -> None:
        """Name what runs on a lane. What comes too late for a lost one must not meet its name again."""
        lane.request = self._request_id, self._new_id()
        lane.generation = generation

    def summarise(self) -> None:
        """Tell what the generation was, once it is over."""
        timings = attrs.asdict(self.timings)
        self._telemetry.emit(
            names.STAGE_OPENAI_GENERATION_SUMMARY,
            request_id=self._request_id,
            prompt_token_count=len(self._request.prompt),
            completion_token_count=self.generated,
            finish_reason=self._finish_reason,
            replay_count=self._recovery.count,
            **timings,
        )

    def stop(self) -> None:
        """Begin no further decode step on the present lane. Never waits."""
        if self._decoding is not None:
            self._decoding.stop()
        self._prefill.ended(self._admission.lane)

    def close(self) -> None:
        """The generation is over. Never waits."""
        self.stop()
        self._recovery.close()
        lane = self._admission.lane
        lane.left = self._request.namespace, [*self._request.prompt, *self._tokens]
        self._restorer.record_answer(self._request, self._tokens)
        work, now = self._admission.work, trio.current_time()
        first = now if work.first_token_at is None else work.first_token_at
        self.timings.prompt_ms, self.timings.answer_ms = 1000 * (first - work.began), 1000 * (now - first)
