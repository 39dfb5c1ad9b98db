"""Which cases of the failure table on real processes a sample has."""

from __future__ import annotations

import random
from collections import Counter

from bench.faults import all_cases, hop_name, sample_of
from skippy.protocol import MessageKind, ReplyKind
from skippy.sim.faults import Direction
from skippy.sim.lies import Failure

FRAMES = {
    (0, Direction.FORWARD): [MessageKind.DECODE_EMBD] * 3,
    (0, Direction.BACK): [ReplyKind.ACK] * 2,
    (2, Direction.FORWARD): [ReplyKind.PREDICTED_TOKEN],
}


def test_every_failure_is_at_every_frame_and_at_the_opening_of_the_return_stream() -> None:
    cases = all_cases(FRAMES)
    assert len(set(map(str, cases))) == len(cases) == 7 * (len(Failure) - 1) + 7 * 2
    assert {hop_name(case.place) for case in cases} == {"0>1", "0<1", "2>0"}


def test_a_sample_has_each_failure_equally_often_and_on_all_hops() -> None:
    cases = all_cases(FRAMES)
    sample = sample_of(cases, 3 * len(Failure), random.Random(1))
    assert Counter(case.failure for case in sample) == dict.fromkeys(Failure, 3)
    for failure in Failure:
        assert {hop_name(c.place) for c in sample if c.failure is failure} == {"0>1", "0<1", "2>0"}


def test_a_sample_of_more_than_all_is_all() -> None:
    cases = all_cases(FRAMES)
    sample = sample_of(cases, 1000, random.Random(1))
    assert sorted(map(str, sample)) == sorted(map(str, cases))
