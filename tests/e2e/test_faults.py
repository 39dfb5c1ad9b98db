"""A sample of the failure table, on real processes: ``python -m bench.faults --whole`` is all of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.faults import Case, run_table, sample_of
from skippy.sim.lies import Failure


@pytest.mark.slow
@pytest.mark.parametrize("replay", [True, False])
async def test_a_sample_of_the_failure_table_is_green(bundled_model: Path, replay: bool) -> None:
    """Each failure twice, once with replay."""

    def choose(cases: list[Case]) -> list[Case]:
        return sample_of(cases, len(Failure), random.Random(replay))

    results = await run_table(bundled_model, choose, seed=5, replay=replay)
    assert {result.case.failure for result in results} == set(Failure)
    assert [f"{result.case}: {reason}" for result in results for reason in result.wrong] == []
