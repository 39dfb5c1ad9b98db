"""A prompt that is computed once, for several generations that are about to continue it."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from skippy.stage import StageError

from .admission import AdmissionGate
from .generation import GenerationRequest
from .lanes import LanePool
from .prefill import Prefill
from .restoring import Restorer


@attrs.frozen
class PromptSharer:
    """Puts prompts into the stages' caches. Its parts are those of the endpoint's generations."""

    gate: AdmissionGate
    pool: LanePool
    prefill: Prefill
    restorer: Restorer
    new_id: Callable[[], int]

    async def share(self, request: GenerationRequest) -> int:
        """As :meth:`skippy.frontend.generation.Generator.share`, of a prompt that fits the context.

        Cancellation: the lane is cleaned in the background; what was computed may be kept or not.
        """
        count = len(request.prompt)
        if not self.restorer.keeps(count - 1):
            return 0
        request = attrs.evolve(request, sampling=None, top_logprobs=None, constraint=None)
        plan = await self.restorer.plan(request, (), audit=False)
        if plan.length == count - 1:
            return plan.length
        admission = await self.gate.acquire(count, 0, promised=request.admitted)
        with admission.running() as lane:
            lane.request = self.new_id(), self.new_id()
            try:
                await self.prefill.configure(lane, request, checkpoints=plan.checkpoints)
                restored = await self.restorer.restore(lane, request, (), plan)
                await self.prefill.run(lane, request, (), restored.length, plan.schedule, plan.checkpoints)
            except StageError:  # the generations find out for themselves, and can be replayed
                return 0
            finally:
                self.prefill.ended(lane)
            lane.left = request.namespace, request.prompt[:-1]
        await self.pool.wait_left(lane)
        return restored.length
