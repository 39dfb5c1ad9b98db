"""A sample of the failure table, on real processes: ``python -m bench.faults --whole`` is all of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.faults import Case, run_table, sample_of
from skippy.sim.lies import Failure

UNBOUNDED = {Failure.STALL, Failure.FREEZE, Failure.TRICKLE}
SAMPLE = 2 * (len(Failure) - len(UNBOUNDED))


@pytest.mark.slow
async def test_a_sample_of_the_failure_table_is_green(bundled_model: Path) -> None:
    def choose(cases: list[Case]) -> list[Case]:
        bounded = [case for case in cases if case.failure not in UNBOUNDED]
        return sample_of(bounded, SAMPLE, random.Random(5))

    results = await run_table(bundled_model, choose, seed=5)
    assert len(results) == SAMPLE
    assert [f"{result.case}: {reason}" for result in results for reason in result.wrong] == []
