"""The verify pipeline: by hand, then long random lives against a plain model, then a pair of peers."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy.protocol import (
    Message,
    MessageKind,
    PredictionReturn,
    RemoteProtocolError,
    Reply,
    Session,
    UpstreamConnection,
    Verb,
    VerifyPipeline,
    VerifyWindowRange,
    WindowState,
    stale_reply,
)
from skippy.protocol.kinds import MAX_VERIFY_WINDOW_PIPELINE_DEPTH

from .strategies import message

K = MessageKind


def span(window_id: int, base: int, count: int = 1) -> VerifyWindowRange:
    return VerifyWindowRange(window_id, base, count)


def retire(start: int, count: int) -> Message:
    return message(K.RETIRE_VERIFY_WINDOW, pos_start=start, token_count=count)


def seen(pipeline: VerifyPipeline) -> list[tuple[int, WindowState]]:
    return [(window.id, window.state) for window in pipeline.windows]


def pipeline_of(*windows: VerifyWindowRange, committed: int = 0) -> VerifyPipeline:
    pipeline = VerifyPipeline()
    for window in windows:
        pipeline.open(window)
    for window in windows[:committed]:
        pipeline.resolve(window.window_id, window.token_count)
    return pipeline


OPEN, COMMITTED, STALE, RETIRED = WindowState


def test_windows_are_answered_first_in_first_out() -> None:
    pipeline = pipeline_of(span(3, 10, 4), span(4, 14, 4))
    assert pipeline.unresolved == 2
    assert pipeline.resolve(3, 4) is COMMITTED
    assert pipeline.resolve(4, 1) is COMMITTED, "a short answer counts"
    assert pipeline.unresolved == 0
    pipeline.open(span(9, 15, 2))
    assert seen(pipeline) == [(3, COMMITTED), (9, OPEN)], "what was taken back is gone"


@pytest.mark.parametrize(
    ("window_id", "predictions", "text"),
    [
        (4, 1, "answer for verify window 4, but window 3 is next"),
        (3, 5, "5 predictions for verify window 3, which has 4 tokens"),
        (3, 0, "verify window 3 is open: discard does not fit"),
    ],
)
def test_answers_that_do_not_fit(window_id: int, predictions: int, text: str) -> None:
    pipeline = pipeline_of(span(3, 10, 4), span(4, 14, 4))
    with pytest.raises(RemoteProtocolError) as caught:
        pipeline.resolve(window_id, predictions)
    assert str(caught.value) == text
    assert seen(pipeline) == [(3, OPEN), (4, OPEN)]


def test_an_answer_that_nothing_is_owed_for() -> None:
    with pytest.raises(RemoteProtocolError, match="answer for verify window 3, but none is unresolved"):
        pipeline_of(span(3, 10), committed=1).resolve(3, 1)


@pytest.mark.parametrize("window_id", [7, 6, -1])
def test_ids_rise(window_id: int) -> None:
    pipeline = pipeline_of(span(7, 10))
    text = f"verify window {window_id} is out of order: window 7 came before it"
    with pytest.raises(RemoteProtocolError, match=text):
        pipeline.open(span(window_id, 11))
    pipeline.resolve(7, 1)
    with pytest.raises(RemoteProtocolError, match=text):
        pipeline.open(span(window_id, 11))
    assert seen(pipeline) == [(7, COMMITTED)]
    pipeline.clear()
    pipeline.open(span(window_id, 11))
    assert seen(pipeline) == [(window_id, OPEN)]


def test_at_most_64_are_unresolved() -> None:
    depth = MAX_VERIFY_WINDOW_PIPELINE_DEPTH
    assert depth == 64
    pipeline = pipeline_of(*(span(index, index) for index in range(depth - 1)))
    pipeline.skip(5)
    for call in (lambda: pipeline.open(span(900, 64)), lambda: pipeline.skip(900)):
        with pytest.raises(RemoteProtocolError, match="verify window 900 is one too many: 64 are unresolved"):
            call()
    assert pipeline.unresolved == depth
    pipeline.resolve(0, 1)
    pipeline.open(span(900, 64))
    assert pipeline.unresolved == depth


def test_a_rewind_undoes_what_reaches_beyond_it() -> None:
    pipeline = pipeline_of(span(1, 0, 4), span(2, 4, 4), span(3, 8, 4), span(4, 12, 4), committed=2)
    pipeline.rewind(12)
    assert seen(pipeline) == [(1, COMMITTED), (2, COMMITTED), (3, OPEN), (4, STALE)]
    pipeline.rewind(12)
    pipeline.rewind(7)
    assert seen(pipeline) == [(1, COMMITTED), (3, STALE), (4, STALE)]
    pipeline.open(span(5, 4))
    assert seen(pipeline) == [(1, COMMITTED), (3, STALE), (4, STALE), (5, OPEN)]
    assert pipeline.resolve(3, 4) is RETIRED
    assert pipeline.resolve(4, 0) is RETIRED
    assert pipeline.resolve(5, 1) is COMMITTED


def test_a_new_window_undoes_what_it_overlaps() -> None:
    pipeline = pipeline_of(span(1, 0, 4), span(2, 4, 4), committed=1)
    pipeline.open(span(3, 2, 2))
    assert seen(pipeline) == [(2, STALE), (3, OPEN)]


def test_skipped_windows_wait_for_their_answer_in_any_order_of_ids() -> None:
    pipeline = pipeline_of(span(7, 10, 2))
    pipeline.skip(3)
    pipeline.open(span(8, 12))
    pipeline.retire(retire(0, 10))  # a skipped one spans no positions
    assert seen(pipeline) == [(7, OPEN), (3, STALE), (8, OPEN)]
    pipeline.resolve(7, 2)
    assert pipeline.resolve(3, 0) is RETIRED
    assert seen(pipeline) == [(7, COMMITTED), (8, OPEN)]


def test_retiring() -> None:
    pipeline = pipeline_of(span(1, 0, 4), span(2, 4, 4), span(3, 8, 4), span(4, 12, 4), committed=3)
    pipeline.retire(retire(4, 3))
    assert seen(pipeline) == [(2, COMMITTED), (3, COMMITTED), (4, OPEN)], "all before the range, too"
    pipeline.retire(retire(4, 4))
    pipeline.retire(retire(4, 4))
    assert seen(pipeline) == [(3, COMMITTED), (4, OPEN)]
    pipeline.retire(retire(12, 0))
    assert seen(pipeline) == [(4, OPEN)], "an empty range, too"


@pytest.mark.parametrize("start", [12, 11, 15])
@pytest.mark.parametrize("stale", [True, False])
def test_neither_open_nor_stale_windows_are_retired(start: int, stale: bool) -> None:
    pipeline = pipeline_of(span(1, 0, 4), span(4, 12, 4), committed=1)
    if stale:
        pipeline.rewind(12)
    state = "stale" if stale else "open"
    with pytest.raises(RemoteProtocolError, match=f"verify window 4 is {state}: retire does not fit"):
        pipeline.retire(retire(start, 2))
    assert seen(pipeline) == [(1, COMMITTED), (4, STALE if stale else OPEN)]
    pipeline.retire(retire(16, 2)) if not stale else None


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (-2, -3)])
def test_a_range_is_not_negative(start: int, count: int) -> None:
    text = f"RETIRE_VERIFY_WINDOW of {count} positions from {start} on: neither may be negative"
    with pytest.raises(RemoteProtocolError, match=text):
        VerifyPipeline().retire(retire(start, count))


def test_the_session_drives_its_windows() -> None:
    def frame(kind: MessageKind, position: int, count: int, **fields: Any) -> Message:
        return message(kind, pos_start=position, token_count=count, request_id=1, session_id=2, **fields)

    windows = VerifyPipeline()
    session = Session(windows)
    assert session.windows is windows
    session.accept(frame(K.PREFILL_EMBD, 0, 4))
    session.accept(frame(K.VERIFY_WINDOW, -1, 4, seq_id=1))
    session.accept(frame(K.VERIFY_WINDOW, 8, 2, seq_id=2))
    with pytest.raises(RemoteProtocolError, match="out of order"):
        session.accept(frame(K.VERIFY_WINDOW, 4, 2, seq_id=2))
    assert session.length == 10
    assert [(w.id, w.base, w.end) for w in windows.windows] == [(1, 4, 8), (2, 8, 10)]
    session.accept(frame(K.DECODE_EMBD, 9, 1, checkpoint_generation=1))
    assert seen(windows) == [(1, OPEN), (2, STALE)]
    session.accept(frame(K.VERIFY_WINDOW, 10, 3, seq_id=1))
    assert seen(windows) == [(1, OPEN), (2, STALE), (1, STALE)]
    assert session.stale_frames == 1
    session.trim(frame(K.TRIM_SESSION, 0, 5))
    assert seen(windows) == [(1, STALE), (2, STALE), (1, STALE)]
    session.stop()
    assert seen(windows) == []


class PipelineMachine(RuleBasedStateMachine):
    """The pipeline against two plain lists: what is unresolved, and what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = VerifyPipeline()
        self.unresolved: list[list[int]] = []  # id, base, end; end 0 for a stale one
        self.committed: list[list[int]] = []
        self.length = 0
        self.next_id = 0

    def undo(self, length: int) -> None:
        self.length = min(self.length, length)
        self.committed = [w for w in self.committed if w[2] <= length]
        for window in self.unresolved:
            if window[2] > length:
                window[2] = 0

    @precondition(lambda self: len(self.unresolved) < 64)
    @rule(back=st.integers(0, 4), count=st.integers(1, 4), gap=st.integers(0, 2))
    def open(self, back: int, count: int, gap: int) -> None:
        base = max(0, self.length - back)
        window_id = self.next_id + gap
        self.pipeline.open(span(window_id, base, count))
        self.undo(base)
        self.unresolved.append([window_id, base, base + count])
        self.length = base + count
        self.next_id = window_id + 1

    @precondition(lambda self: self.next_id > 0)
    @rule(back=st.integers(1, 3))
    def an_older_id(self, back: int) -> None:
        with pytest.raises(RemoteProtocolError, match=r"out of order|one too many"):
            self.pipeline.open(span(self.next_id - back, self.length))

    @precondition(lambda self: len(self.unresolved) < 64)
    @rule(window_id=st.integers(0, 30))
    def skip(self, window_id: int) -> None:
        self.pipeline.skip(window_id)
        self.unresolved.append([window_id, 0, 0])

    @precondition(lambda self: self.unresolved)
    @rule(predictions=st.integers(0, 5))
    def resolve(self, predictions: int) -> None:
        window_id, base, end = self.unresolved[0]
        if end and not 1 <= predictions <= end - base:
            with pytest.raises(RemoteProtocolError):
                self.pipeline.resolve(window_id, predictions)
            return
        assert self.pipeline.resolve(window_id, predictions) is (COMMITTED if end else RETIRED)
        window = self.unresolved.pop(0)
        if end:
            self.committed.append(window)

    @rule(window_id=st.integers(0, 40))
    def another_answer(self, window_id: int) -> None:
        if self.unresolved and self.unresolved[0][0] == window_id:
            return
        with pytest.raises(RemoteProtocolError, match="answer for verify window"):
            self.pipeline.resolve(window_id, 1)

    @rule(back=st.integers(0, 6))
    def rewind(self, back: int) -> None:
        length = max(0, self.length - back)
        self.pipeline.rewind(length)
        self.undo(length)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def retire_committed(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.committed) - 1))
        _, base, end = self.committed[index]
        if any(
            window.base < end and base < window.end for window in self.pipeline.windows[len(self.committed) :]
        ):
            with pytest.raises(RemoteProtocolError, match="retire does not fit"):
                self.pipeline.retire(retire(base, end - base))
            return
        self.pipeline.retire(retire(base, end - base))
        del self.committed[: index + 1]

    @rule()
    def stop(self) -> None:
        self.pipeline.clear()
        self.unresolved, self.committed = [], []
        self.length = self.next_id = 0

    @invariant()
    def model_agrees(self) -> None:
        expected = [(w[0], COMMITTED) for w in self.committed]
        expected += [(w[0], OPEN if w[2] else STALE) for w in self.unresolved]
        assert seen(self.pipeline) == expected
        assert self.pipeline.unresolved == len(self.unresolved) <= 64


class _Peer:
    """One stage: its connection, its session, its windows. The last one answers, the first one is asked."""

    def __init__(self) -> None:
        self.connection = UpstreamConnection()
        self.session = Session()
        self.executed: list[tuple[int, int]] = []

    def take(self, frame: Message) -> Verb:
        stale = self.session.is_stale(frame)
        self.connection.receive(frame, stale=stale)
        action = self.session.accept(frame)
        assert (action.verb is Verb.STALE) == stale
        if not stale:
            self.executed.append((action.position, action.count))
        return action.verb


class PairMachine(RuleBasedStateMachine):
    """Stage 0 and the last stage, with frames and replies under way between them, and a driver that guesses.

    Whatever is sent, both stages execute the same rows, skip the same frames, and every reply answers the
    oldest frame that is owed one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Peer(), _Peer()
        self.returns = PredictionReturn(1, 2)
        self.down: deque[Message] = deque()
        self.up: deque[Reply] = deque()
        self.generation = 0
        self.window_id = 0
        self.send(K.PREFILL_EMBD, 0, 4)

    def send(self, kind: MessageKind, position: int, count: int, **fields: Any) -> None:
        words = {"checkpoint_generation": self.generation, "request_id": 1, "session_id": 2, **fields}
        frame = message(kind, pos_start=position, token_count=count, **words)
        verb = self.first.take(frame)
        if kind is not K.PREFILL_EMBD:
            self.returns.expect(kind)
        self.down.append(frame.skipped(0) if verb is Verb.STALE else frame.forwarded(0, b""))

    @property
    def length(self) -> int:
        return self.first.session.length

    @rule(back=st.integers(0, 5), count=st.integers(1, 4))
    def verify(self, back: int, count: int) -> None:
        if self.first.session.windows.unresolved < MAX_VERIFY_WINDOW_PIPELINE_DEPTH:
            self.window_id += 1
            position = max(1, self.length - back)
            self.send(K.VERIFY_WINDOW, position, count, seq_id=self.window_id)

    @rule(back=st.integers(0, 5), kind=st.sampled_from([K.DECODE_EMBD, K.DECODE_LIGHT_CTX, K.DECODE_READOUT]))
    def decode(self, back: int, kind: MessageKind) -> None:
        self.send(kind, max(1, self.length - back), 1)

    @rule()
    def a_new_generation(self) -> None:
        self.generation += 1
        self.send(K.DECODE_EMBD, max(1, self.length - 2), 1)

    @precondition(lambda self: self.generation > 0)
    @rule(
        kind=st.sampled_from([K.VERIFY_WINDOW, K.DECODE_EMBD, K.PREFILL_FINAL_EMBD, K.PREFILL_EMBD]),
        position=st.integers(0, 50),
        window_id=st.integers(0, 50),
    )
    def a_late_frame(self, kind: MessageKind, position: int, window_id: int) -> None:
        if self.first.session.windows.unresolved < MAX_VERIFY_WINDOW_PIPELINE_DEPTH:
            session = self.first.session
            before = (session.length, session.epoch, self.first.connection.state)
            generation = session.epoch.checkpoint_generation - 1 if session.epoch else -1
            self.send(kind, position, 2, seq_id=window_id, checkpoint_generation=generation)
            assert (session.length, session.epoch, self.first.connection.state) == before

    @precondition(lambda self: self.down)
    @rule()
    def the_last_stage_takes_a_frame(self) -> None:
        frame = self.down.popleft()
        verb = self.last.take(frame)
        assert (verb is Verb.STALE) == (frame.token_count == 0)
        if frame.kind is K.PREFILL_EMBD:
            return
        if verb is Verb.STALE:
            reply = stale_reply(frame)
        elif frame.kind is K.VERIFY_WINDOW:
            reply = Reply.of_predicted_tokens(range(frame.token_count), frame.state.seq_id)
        else:
            reply = Reply.predicted_token(7)
        if frame.kind is K.VERIFY_WINDOW:
            self.last.session.windows.resolve(frame.state.seq_id, len(reply.predicted_tokens))
        self.up.append(reply)

    @precondition(lambda self: self.up)
    @rule()
    def stage_zero_reads_a_reply(self) -> None:
        if self.returns.bound and self.returns.state.value == "opening":
            self.returns.opened(message(K.PREDICTION_RETURN_OPEN, request_id=1, session_id=2))
        reply = self.up.popleft()
        if self.returns.receive(reply) is K.VERIFY_WINDOW:
            self.first.session.windows.resolve(reply.window_id, len(reply.predicted_tokens))

    @invariant()
    def the_last_stage_follows(self) -> None:
        done = self.last.executed
        assert self.first.executed[: len(done)] == done
        assert self.last.session.windows.unresolved == 0
        assert self.returns.owed == len(self.up) + sum(f.kind is not K.PREFILL_EMBD for f in self.down)

    def teardown(self) -> None:
        while self.down:
            self.the_last_stage_takes_a_frame()
        while self.up:
            self.stage_zero_reads_a_reply()
        assert self.last.executed == self.first.executed
        assert self.last.session.length == self.first.session.length
        assert self.last.session.stale_frames == self.first.session.stale_frames
        assert self.first.session.windows.unresolved == self.returns.owed == 0


TestPipeline = PipelineMachine.TestCase
TestPair = PairMachine.TestCase
TestPipeline.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPair.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
