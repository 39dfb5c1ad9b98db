"""Native sequences that cannot be emptied: nobody gets them any more, and no client hears of it."""

from __future__ import annotations

import pytest

from skippy.engine import EngineError
from tests.frontend.test_restoring import caching_chain, request
from tests.stage.test_chain import PROMPT, unsplit_tokens

PROMPTS = [[*f"{name} asks for something else: ".encode(), *PROMPT] for name in ("Ann", "Bob", "Cy", "Di")]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_sequence_that_cannot_be_dropped_is_used_no_more(
    stages: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if index >= stages:
        return
    async with caching_chain(stages, lanes=3) as chain:
        engine = chain.cluster.engines[index]
        broken: list[int] = []

        def drop(sequence: int) -> None:
            if not broken:
                broken.append(sequence)
            if sequence in broken:
                raise EngineError("it does not let go")
            type(engine).drop(engine, sequence)

        monkeypatch.setattr(engine, "drop", drop)
        for _ in range(3):
            for prompt in PROMPTS:
                tokens, _ = await chain.generate(request(prompt, 5))
                assert tokens == unsplit_tokens(prompt, 5)
        cache = chain.cluster.stages[index].context.cache
        assert cache is not None
        assert cache.index.quarantined == {*broken}
        assert len(broken) == 1
        assert not cache.scheduler._broken
        assert not any(entry.sequence in broken for entry in cache.index.entries())
        assert cache.scheduler.free_sequences == 2
        monkeypatch.undo()
        cache.scheduler._free.add(broken[0])  # the chain's own check wants all of them
        engine.drop(broken[0])
