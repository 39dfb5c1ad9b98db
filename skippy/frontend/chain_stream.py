"""The tokens of one generation: its prompt put into a lane, then one decode step per token."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import trio

from skippy.config import OpenAIOptions
from skippy.engine import Vocabulary
from skippy.protocol import PositionLogProbabilities
from skippy.stage import LaneLost, SettingsRefused, StageError
from skippy.telemetry import Telemetry, names

from .admission import Admission
from .constraints import refusal
from .decoding import DecodeLoop, Token
from .generation import FinishReason, GenerationError, GenerationRequest, HitKind, Timings
from .lanes import PooledLane
from .prefill import Prefill
from .recovery import Recovery
from .restoring import Restored, Restorer


def random_id() -> int:
    """For a request or a session: nobody guesses it, and it is never 0."""
    return secrets.randbits(64) or 1


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
        self._era = restorer.era
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
        self._restorer.record_answer(self._request, self._tokens, self._era, audited=self._audited)
        work, now = self._admission.work, trio.current_time()
        first = now if work.first_token_at is None else work.first_token_at
        self.timings.prompt_ms, self.timings.answer_ms = 1000 * (first - work.began), 1000 * (now - first)
