"""Which rows run together, in what order, and what becomes of each work: no threads, exact engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import trio

from skippy.config import ConfigError
from skippy.engine import EngineError, Segment, StageEngine
from skippy.engine.toy import ToyEngine
from skippy.frontend.generation import GenerationRequest
from skippy.protocol import ReplyAnnex
from skippy.stage.iterations import LEAST_PREFILL_ROWS, MOST_PREFILL_ROWS, Iterations
from skippy.stage.local_run import MAX_AHEAD, LocalRun
from skippy.stage.waves import WaveQueue
from skippy.stage.work import Work, WorkCancelled
from skippy.telemetry import Level, MemorySink, Telemetry, names
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens
from tests.support.cluster import toy_cluster

SLICE = LEAST_PREFILL_ROWS

Call = list[tuple[int, int]]
"""Sequence and rows of each segment of one native batch."""


class RecordingEngine(ToyEngine):
    """Keeps what it is asked to decode; fails for sequences in ``bad``; each batch takes its time."""

    def __init__(self, layer_end: int = 4, *, can_mix: bool = True, max_batch: int = 2048) -> None:
        super().__init__(0, layer_end, 4, context_length=4096, max_sequences=16, max_batch=max_batch)
        self._info = attrs.evolve(self._info, can_mix=can_mix)
        self.calls: list[Call] = []
        self.bad: set[int] = set()
        self.now_us = 0
        self.step_us = self.slice_us = 1000
        self.during: Callable[[], object] = lambda: None
        """Called while the first segment of each batch is computed."""

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        self.calls.append([(segment.sequence, segment.count) for segment in segments])
        rows = sum(segment.count for segment in segments)
        self.now_us += self.step_us if rows == len(segments) else self.slice_us
        for segment in segments:
            if segment.sequence in self.bad:
                raise EngineError(f"sequence {segment.sequence} is bad")
        super().decode(segments, output)

    def _run(self, *args: Any) -> Any:
        self.during()
        return super()._run(*args)


@attrs.define
class Bench:
    """Iterations over a recording engine, and works made by hand."""

    engine: RecordingEngine
    iterations: Iterations
    ended: list[Work] = attrs.field(factory=list)
    logits: dict[int, list[bytes]] = attrs.field(factory=dict)
    places: dict[int, int] = attrs.field(factory=dict)

    def work(self, sequence: int, count: int, *, decodes: bool = False, logits: int = 0) -> Work:
        """The next ``count`` rows of a sequence; boundaries or logits are kept."""
        position = self.places.get(sequence, 0)
        self.places[sequence] = position + count
        tokens = [(sequence * 31 + place) % 250 for place in range(position, position + count)]
        segment = Segment(sequence, position, count, tokens=tokens, logits=logits)
        middle = self.engine.info.output_width
        output = memoryview(bytearray(count * middle * 4)) if middle else None

        def after(engine: StageEngine, first: int) -> bool:
            got = self.logits.setdefault(sequence, [])
            got += [engine.logits(first + row).tobytes() for row in range(logits)]
            self.ended.append(work)
            return False

        work = Work(segment, output, after, decodes=decodes)
        self.iterations.add(work)
        return work

    def step_of(self, sequence: int) -> Work:
        return self.work(sequence, 1, decodes=True, logits=1 if self.engine.info.is_last else 0)

    def steps(self, *sequences: int) -> list[Work]:
        return [self.step_of(sequence) for sequence in sequences]

    def run(self, times: int = 1) -> list[Call]:
        """So many iterations; returns the native batches they took."""
        before = len(self.engine.calls)
        for _ in range(times):
            assert self.iterations.wait_secs() == 0
            self.iterations.step()
        return self.engine.calls[before:]

    def run_all(self) -> list[Call]:
        before = len(self.engine.calls)
        while self.iterations.wait_secs() == 0:
            self.iterations.step()
        assert self.iterations.wait_secs() is None
        return self.engine.calls[before:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[RecordingEngine]:
    """Compute times are those of the last engine in the list, and 0 without one."""
    engines: list[RecordingEngine] = []
    monkeypatch.setattr("skippy.stage.iterations.microseconds", lambda: engines[-1].now_us if engines else 0)
    return engines


def bench(
    engine: RecordingEngine | None = None, *, mixed_rows: int | None = None, safe: bool = False
) -> Bench:
    engine = engine or RecordingEngine()
    iterations = Iterations(engine, WaveQueue(), mixed_rows=mixed_rows, safe=safe, clock=lambda: 0.0)
    return Bench(engine, iterations)


def ended_well(*works: Work) -> bool:
    return all(work.over and work.error is None for work in works)


# -- who runs when --------------------------------------------------------------------------------------


def test_steps_of_several_sessions_share_a_call() -> None:
    b = bench()
    works = b.steps(0, 1, 2)
    assert b.run() == [[(0, 1), (1, 1), (2, 1)]]
    assert ended_well(*works)
    assert [work.batch_size for work in works] == [3, 3, 3]
    assert b.iterations.wait_secs() is None


def test_steps_go_first_and_prefill_has_its_turn_between_them() -> None:
    b = bench()
    prompt = b.work(9, 40)
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1)]]
    b.steps(0, 1)
    assert b.run() == [[(9, SLICE)]]  # the steps that were ready have run, so these come second
    assert b.run() == [[(0, 1), (1, 1)]]
    assert b.run() == [[(9, SLICE)]]  # no step is there, so nothing is waited for
    assert not prompt.over
    b.steps(1)
    assert b.run() == [[(1, 1)]]
    b.steps(1)
    assert b.run(2) == [[(9, 40 - 2 * SLICE)], [(1, 1)]]
    assert ended_well(prompt)
    assert b.iterations.wait_secs() is None


def test_chunks_run_whole_while_nobody_else_decodes() -> None:
    b = bench()
    b.work(9, 700)
    assert b.run() == [[(9, 700)]]
    b.steps(9)
    b.run()
    b.work(9, 40)  # its own steps do not count
    assert b.run() == [[(9, 40)]]
    b.steps(0)
    b.run()
    b.work(9, 40)
    assert b.run() == [[(9, SLICE)]]
    b.iterations.leave(0)
    b.iterations.leave(9)
    assert b.run() == [[(9, 40 - SLICE)]]


def test_prefill_of_several_sessions_shares_a_call() -> None:
    b = bench()
    works = [b.work(sequence, 200) for sequence in range(3)]
    rest = 600 - MOST_PREFILL_ROWS
    assert b.run_all() == [[(0, 200), (1, 200), (2, 200 - rest)], [(2, rest)]]
    assert ended_well(*works)
    assert [work.batch_size for work in works] == [3, 3, 1]


def test_a_long_chunk_runs_alone_and_a_session_is_in_a_call_once() -> None:
    b = bench()
    b.work(0, MOST_PREFILL_ROWS + 1)
    b.work(1, 5)
    b.work(1, 6)
    b.work(2, 7)
    assert b.run_all() == [[(0, MOST_PREFILL_ROWS + 1)], [(1, 5)], [(1, 6), (2, 7)]]


def test_no_batch_is_larger_than_the_engine_takes() -> None:
    b = bench(RecordingEngine(max_batch=32))
    b.work(0, 20)
    b.work(1, 20)
    assert b.run_all() == [[(0, 20), (1, 12)], [(1, 8)]]


def test_rows_that_want_logits_each_are_not_cut() -> None:
    b = bench()
    b.steps(0)
    b.run()
    b.work(1, 10)
    b.work(2, 30, logits=30)
    b.work(3, 4)
    assert b.run_all() == [[(1, 10)], [(2, 30)], [(3, 4)]]
    assert len(b.logits[2]) == 30


# -- both in one batch ----------------------------------------------------------------------------------


def test_prefill_beside_steps() -> None:
    b = bench(mixed_rows=24)
    prompt = b.work(9, 40, logits=1)
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1), (9, 22)]]
    b.steps(0, 1)
    assert b.run() == [[(0, 1), (1, 1), (9, 18)]]
    assert ended_well(prompt)
    alone = bench()
    alone.work(9, 40, logits=1)
    alone.run_all()
    assert b.logits[9] == alone.logits[9]


def test_an_engine_that_cannot_mix_is_not_asked_to() -> None:
    b = bench(RecordingEngine(can_mix=False), mixed_rows=24)
    b.work(9, 20)
    b.steps(0, 1)
    assert b.run_all() == [[(0, 1), (1, 1)], [(9, SLICE)], [(9, 20 - SLICE)]]


def test_where_steps_fill_the_batch_prefill_still_has_its_turn() -> None:
    b = bench(mixed_rows=2)
    b.work(9, 2 * SLICE)
    b.steps(0, 1)
    for _ in range(2):
        assert b.run() == [[(0, 1), (1, 1)]]
        b.steps(0, 1)  # there are always as many as fit
        assert b.run() == [[(9, SLICE)]]


# -- what goes wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_end", [2, 4], ids=["middle", "last"])
def test_a_bad_row_fails_alone(layer_end: int) -> None:
    b, undisturbed = bench(RecordingEngine(layer_end)), bench(RecordingEngine(layer_end))
    b.engine.bad = {1}
    works, others = b.steps(0, 1, 2), undisturbed.steps(0, 2)
    assert b.run() == [[(0, 1), (1, 1), (2, 1)], [(0, 1)], [(1, 1)], [(2, 1)]]
    undisturbed.run_all()
    assert isinstance(works[1].error, EngineError)
    assert str(works[1].error) == "sequence 1 is bad"
    assert ended_well(works[0], works[2])
    assert b.logits == undisturbed.logits
    assert [works[0].output, works[2].output] == [other.output for other in others]
    assert [b.engine.length(sequence) for sequence in range(3)] == [1, 0, 1]


def test_a_chunk_that_fails_in_the_middle_does_not_go_on() -> None:
    b = bench()
    b.steps(0)
    b.run()
    prompt = b.work(9, 40)
    b.run()
    b.engine.bad = {9}
    assert b.run_all() == [[(9, SLICE)]]
    assert isinstance(prompt.error, EngineError)


def test_what_must_come_first_may_fail() -> None:
    def before(_: StageEngine) -> None:
        raise EngineError("cannot be trimmed")

    b = bench()
    segment = Segment(3, 0, 1, tokens=[1], logits=1)
    work = Work(segment, None, lambda *_: False, before=before, decodes=True)
    b.iterations.add(work)
    others = b.steps(0)
    assert b.run_all() == [[(0, 1)]]
    assert str(work.error) == "cannot be trimmed"
    assert ended_well(*others)


def test_what_nobody_wants_any_more_does_not_run() -> None:
    b = bench()
    step, other = b.steps(0, 1)
    prompt = b.work(9, 40)
    step.cancelled = prompt.cancelled = True
    assert b.run_all() == [[(1, 1)]]
    assert isinstance(step.error, WorkCancelled)
    assert isinstance(prompt.error, WorkCancelled)
    assert b.ended == [other]


def test_a_chunk_cancelled_between_its_slices_ends() -> None:
    b = bench()
    b.steps(0)
    b.run()
    prompt = b.work(9, 40)
    b.run()
    prompt.cancelled = True
    assert b.run_all() == []
    assert isinstance(prompt.error, WorkCancelled)
    assert b.engine.length(9) == SLICE


def test_a_batch_is_interrupted_when_nobody_wants_any_of_it() -> None:
    b = bench()
    works = b.steps(0, 1, 2)
    waiting = b.work(9, 40)

    def leave() -> None:
        for work in works:
            work.cancelled = True
            b.iterations.interrupt(work)

    b.engine.during = leave
    assert b.run() == [[(0, 1), (1, 1), (2, 1)]]
    assert all(isinstance(work.error, WorkCancelled) for work in works)
    assert [b.engine.length(sequence) for sequence in range(3)] == [0, 0, 0]
    b.engine.during = lambda: b.iterations.interrupt(works[0])  # it is not in this batch
    assert b.run() == [[(9, 40)]]
    assert ended_well(waiting)


def test_a_batch_goes_on_while_one_of_it_is_wanted() -> None:
    b = bench()
    gone, wanted = b.steps(0, 1)

    def leave() -> None:
        gone.cancelled = True
        b.iterations.interrupt(gone)

    b.engine.during = leave
    assert b.run() == [[(0, 1), (1, 1)]]
    assert ended_well(gone, wanted)
    b.iterations.interrupt(gone)  # over long since


def test_the_end_cancels_what_waits() -> None:
    b = bench()
    waiting = [*b.steps(0, 1), b.work(8, 40), b.work(9, 40)]
    woken = b.iterations.end()
    assert sorted(map(id, woken)) == sorted(map(id, waiting))
    assert all(isinstance(work.error, WorkCancelled) for work in waiting)
    assert b.engine.calls == []
    assert b.iterations.wait_secs() is None


# -- whose rows are whose -------------------------------------------------------------------------------


def test_boundary_rows_land_in_each_works_own_output() -> None:
    b = bench(RecordingEngine(2), mixed_rows=24)
    works = [b.work(9, 40), *b.steps(0, 1), b.work(8, 5)]
    assert b.run_all()[0] == [(0, 1), (1, 1), (9, 22)]
    assert ended_well(*works)
    for work in works:
        assert work.output is not None
        expected = memoryview(bytearray(len(work.output)))
        ToyEngine(0, 2, 4, max_sequences=16).decode([work.segment], expected)
        assert work.output == expected


def test_logits_rows_are_those_of_the_work() -> None:
    b, alone = bench(), bench()
    b.steps(0)
    b.work(1, 3, decodes=True, logits=3)
    b.work(2, 2, decodes=True)
    b.steps(3)
    assert b.run() == [[(0, 1), (1, 3), (2, 2), (3, 1)]]
    alone.steps(0)
    alone.run()
    alone.work(1, 3, decodes=True, logits=3)
    alone.run()
    alone.steps(3)
    alone.run()
    assert b.logits == alone.logits | {2: []}


# -- how much at a time ---------------------------------------------------------------------------------


def test_slices_grow_while_they_are_cheap_and_shrink_again(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.steps(0)
    b.run()
    b.work(9, 1000)
    b.engine.slice_us = b.engine.step_us // 2
    assert b.run(3) == [[(9, 16)], [(9, 32)], [(9, 64)]]
    b.engine.slice_us = b.engine.step_us + 1
    assert b.run(5) == [[(9, 128)], [(9, 64)], [(9, 32)], [(9, 16)], [(9, 16)]]
    b.engine.slice_us = b.engine.step_us  # neither cheap nor dear
    assert b.run(2) == [[(9, 16)], [(9, 16)]]


def test_slices_do_not_grow_beyond_a_batch(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.steps(0)
    b.run()
    b.work(9, 2000)
    b.engine.slice_us = 1
    assert [call[0][1] for call in b.run(7)] == [16, 32, 64, 128, 256, 512, 512]


def test_time_is_shared_out_by_rows(clock: list[RecordingEngine]) -> None:
    b = bench()
    clock.append(b.engine)
    b.engine.slice_us = 1000
    works = [b.work(0, 30), b.work(1, 10)]
    b.run_all()
    assert [work.compute_us for work in works] == [750, 250]


# -- steps that follow each other -----------------------------------------------------------------------


def run_of(b: Bench, sequence: int, run: LocalRun) -> Work:
    work = Work(
        Segment(sequence, 0, 1, tokens=[65], logits=1),
        None,
        lambda engine, row: run.made(int(engine.logits(row).argmax()), None, work),
        decodes=True,
    )
    work.report = run.report
    b.iterations.add(work)
    return work


def local_run(steps: int, taken: int = 1000) -> tuple[LocalRun, list[tuple[int, bool]]]:
    told: list[tuple[int, bool]] = []

    def arrived(token: int, _: ReplyAnnex | None, goes_on: bool) -> None:
        told.append((token, goes_on))

    return LocalRun(steps, lambda _: False, arrived, taken=taken), told


def test_steps_that_follow_by_themselves_join_those_of_others() -> None:
    b = bench()
    (one, told), (other, _) = local_run(3), local_run(4)
    works = [run_of(b, 0, one), run_of(b, 1, other)]
    prompt = b.work(9, 40)
    both = [(0, 1), (1, 1)]
    assert b.run(6) == [both, [(9, SLICE)], both, [(9, SLICE)], both, [(9, 40 - 2 * SLICE)]]
    assert b.run_all() == [[(1, 1)]]
    assert ended_well(prompt, *works)
    one.report()
    assert [goes_on for _, goes_on in told] == [True, True, False]
    engine, token = ToyEngine(), 65
    for position, (drawn, _) in enumerate(told):
        engine.decode([Segment(0, position, 1, tokens=[token], logits=1)])
        token = int(engine.logits(0).argmax())
        assert drawn == token


def test_a_run_does_not_run_away_from_its_reader() -> None:
    b = bench()
    run, told = local_run(100, taken=0)
    work = run_of(b, 0, run)
    assert b.run_all() == [[(0, 1)]] * MAX_AHEAD
    assert ended_well(work)
    run.report()
    assert [goes_on for _, goes_on in told] == [True] * (MAX_AHEAD - 1) + [False]


def test_a_run_that_nobody_wants_ends() -> None:
    b = bench()
    (stopped, _), (cancelled, _) = local_run(100), local_run(100)
    one, other = run_of(b, 0, stopped), run_of(b, 1, cancelled)
    b.run()
    stopped.stopped = other.cancelled = True
    assert b.run_all() == [[(0, 1)]]
    assert ended_well(one)
    assert isinstance(other.error, WorkCancelled)


# -- safe mode ------------------------------------------------------------------------------------------


def test_safe_mode_runs_one_work_at_a_time_whole_in_order_of_arrival() -> None:
    b = bench(mixed_rows=64, safe=True)
    works = [b.work(0, 40), b.step_of(1), b.work(2, 600), *b.steps(3, 4)]
    assert b.run_all() == [[(0, 40)], [(1, 1)], [(2, 600)], [(3, 1)], [(4, 1)]]
    assert b.ended == works


def test_safe_mode_lets_others_go_on_between_the_steps_of_a_run() -> None:
    b = bench(safe=True)
    run_of(b, 0, local_run(3)[0])
    b.steps(1)
    b.work(2, 40)
    assert b.run_all() == [[(0, 1)], [(1, 1)], [(2, 40)], [(0, 1)], [(0, 1)]]


@pytest.mark.parametrize(("text", "safe"), [("1", True), ("off", False)])
async def test_safe_mode_is_reported(monkeypatch: pytest.MonkeyPatch, text: str, safe: bool) -> None:
    monkeypatch.setenv("SKIPPY_ITERATION_SCHEDULER_SAFE_MODE", text)
    sink = MemorySink()
    telemetry = Telemetry(Level.SUMMARY, sink)
    answers: list[list[int]] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(telemetry.serve)
            async with toy_cluster(2, telemetry=telemetry) as cluster, generator_over(cluster) as generator:
                assert [stage.context.scheduler.safe for stage in cluster.stages] == [safe, safe]

                async def ask() -> None:
                    answers.append(await generate(generator, GenerationRequest(prompt=PROMPT, max_tokens=6)))

                async with trio.open_nursery() as askers:
                    askers.start_soon(ask)
                    askers.start_soon(ask)
            nursery.cancel_scope.cancel()
    assert answers == [unsplit_tokens(PROMPT, 6)] * 2
    started = [event for event in sink.events if event.name == names.STAGE_SCHEDULER_START]
    assert [event.attributes["safe_mode"] for event in started] == [safe, safe]


async def test_a_switch_that_says_nothing_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_ITERATION_SCHEDULER_SAFE_MODE", "maybe")
    with (
        trio.fail_after(20),
        pytest.raises(ConfigError, match="SKIPPY_ITERATION_SCHEDULER_SAFE_MODE: is 'maybe', must be one of"),
    ):
        async with toy_cluster(1):
            pytest.fail("it started")
