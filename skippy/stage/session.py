"""One logical session on one stage: its native sequence, its position, and on the last stage its sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

from skippy.engine import EngineError, Sampler, Segment, StageEngine
from skippy.protocol import (
    POSITIONED_KINDS,
    Action,
    Message,
    MessageKind,
    PositionLogProbabilities,
    ReplyAnnex,
    SamplingConfig,
    Session,
    Verb,
    VerifyPipeline,
    execution_tokens,
    requires_predicted_reply,
)

from .errors import RequestFailed, SettingsRefused
from .runs import LocalRun
from .scheduler import Scheduler
from .scoring import score
from .settings import GenerationSettings, parse_metadata
from .work import Settle, Work

Predicted = int | Sequence[int] | None
"""The token that a message's rows predict, for a verify window one for each of its rows, or nothing."""
Sink = Callable[[Predicted, Work], bool]
"""What follows a work's rows in the engine's thread. True when the event loop must hear of it soon."""


@attrs.define(slots=True)
class _Native:
    """What only engine calls touch, in their order: the token history and the sampler over it."""

    history: list[int] = attrs.field(factory=list)
    sampler: Sampler | None = None
    top_logprobs: int | None = None
    scores: list[PositionLogProbabilities] = attrs.field(factory=list)

    def replace_sampler(self, sampler: Sampler | None) -> None:
        if self.sampler is not None:
            self.sampler.close()
        self.sampler = sampler
        if sampler is not None and self.history:
            sampler.accept(self.history)

    def accept(self, tokens: Sequence[int]) -> None:
        """Rows were run."""
        self.history.extend(tokens)
        if self.sampler is not None:
            self.sampler.accept(tokens)

    def sample(self, engine: StageEngine, row: int, step: int) -> int:
        """What follows the last accepted token, from a row of the engine's logits."""
        assert self.sampler is not None
        logits = engine.logits(row)
        token = self.sampler.sample(logits, step)
        if self.top_logprobs is not None:
            self.scores.append(score(logits, token, self.top_logprobs))
        return token

    def sample_each(self, engine: StageEngine, first: int, tokens: Sequence[int], step: int) -> list[int]:
        """What follows each of the rows that were run, drawn as decoding them one by one would.

        ``first``: the engine's logits row of the first of them.
        """
        predicted = []
        for row, token in enumerate(tokens):
            self.accept((token,))
            predicted.append(self.sample(engine, first + row, step + row))
        return predicted


class StageSession:
    """Runs one session's messages on the engine.

    Make one with :meth:`open`; :meth:`close` never waits and must be called on every path.
    """

    def __init__(self, scheduler: Scheduler, sequence: int, windows: VerifyPipeline) -> None:
        self._scheduler = scheduler
        self._sequence = sequence
        self._is_first = scheduler.info.is_first
        self._is_last = scheduler.info.is_last
        self._machine = Session(windows)
        self._native = _Native()
        self._sampling: SamplingConfig | None = None
        self._configured = False
        self.scores = False
        """Whether log-probabilities come with what is predicted: see :meth:`take_annex`."""
        self._work: Work | None = None
        """What ran or runs last."""
        self._closed = False

    @classmethod
    async def open(
        cls, scheduler: Scheduler, windows: VerifyPipeline, wanted: int | None = None
    ) -> StageSession:
        """A new, empty session; waits for a free sequence, best ``wanted``. Windows: as :class:`Session`."""
        sequence = await scheduler.acquire_sequence(wanted)
        return cls(scheduler, sequence, windows)

    @property
    def sequence(self) -> int:
        """The native sequence id."""
        return self._sequence

    @property
    def length(self) -> int:
        """Positions that the session holds after the messages accepted so far."""
        return self._machine.length

    @property
    def stale_frames(self) -> int:
        """Messages that were not executed."""
        return self._machine.stale_frames

    def is_stale(self, message: Message) -> bool:
        """As :meth:`Session.is_stale`."""
        return self._machine.is_stale(message)

    def skip(self, message: Message) -> None:
        """As :meth:`Session.skip`, for a stale message that brings no rows."""
        self._machine.skip(message)

    async def configure(self, sampling: SamplingConfig | None, settings: GenerationSettings) -> None:
        """Set the sampler (last stage only). Raises SettingsRefused for a setting the engine refuses."""
        self._sampling, self._configured = sampling, True
        self.scores = settings.top_logprobs is not None
        native = self._native

        def call(engine: StageEngine) -> None:
            native.replace_sampler(engine.new_sampler(sampling))
            native.top_logprobs = settings.top_logprobs

        try:
            await self._scheduler.run(call)
        except (ValueError, EngineError) as exc:
            raise SettingsRefused(f"sampling settings refused: {exc}") from exc

    def wants_settings(self, message: Message) -> bool:
        """Whether ``message`` needs the sampler to be made first, by default or from its own settings."""
        return (
            self._is_last
            and requires_predicted_reply(message.kind)
            and (not self._configured or (message.sampling is not None and self._sampling is None))
        )

    async def prepare(self, message: Message, output: memoryview | None, sink: Sink) -> Work | None:
        """Accept a data message; returns the work that carries it out, for :meth:`run`.

        None for a stale one, which is not carried out. ``sink`` is given what is predicted where this is the
        last stage and the kind asks for it; ``output`` is filled with the boundary activation (non-last
        stages). The work must be run, or the session dropped: from here on it counts its positions.

        Raises:
            RemoteProtocolError: the message does not fit the session (a gap, counts that disagree).
            SettingsRefused: the message brings sampling settings that the engine refuses.
        """
        action = self._machine.accept(message)
        if action.verb is Verb.STALE:
            return None
        if self.wants_settings(message):
            settings = parse_metadata(message.chat_sampling_metadata)
            if settings.top_logprobs is not None:
                raise SettingsRefused("top_logprobs is asked for with ConfigureGeneration alone")
            await self.configure(message.sampling, settings)
        return self._make_work(message, action, output, sink, None)

    def prepare_now(
        self, message: Message, output: memoryview | None, sink: Sink, settle: Settle | None
    ) -> Work:
        """:meth:`prepare` for a message that is not stale and wants no settings: never waits."""
        return self._make_work(message, self._machine.accept(message), output, sink, settle)

    def _make_work(
        self,
        message: Message,
        action: Action,
        output: memoryview | None,
        sink: Sink,
        settle: Settle | None,
    ) -> Work:
        first, last = self._is_first, self._is_last
        tokens = execution_tokens(message) if first or last else None
        predicts = last and requires_predicted_reply(message.kind)
        each = message.kind is MessageKind.VERIFY_WINDOW
        segment = Segment(
            sequence=self._sequence,
            position=action.position,
            count=action.count,
            tokens=tokens if first else None,
            activation=None if first else memoryview(message.activation),
            logits=(action.count if each else 1) if predicts else 0,
        )
        step = max(0, message.state.decode_step)
        trim_to = action.position if action.verb is Verb.REWIND else None
        before = None if trim_to is None else functools.partial(self._rewind, length=trim_to)
        native = self._native

        def after(engine: StageEngine, row: int) -> bool:
            if not last:
                return sink(None, work)
            # A work that goes on by itself, or is done again, has other rows each time.
            history = work.tokens
            assert history is not None
            if each:
                return sink(native.sample_each(engine, row, history, step), work)
            native.accept(history)
            if not predicts:
                return sink(None, work)
            return sink(native.sample(engine, row, step + work.segment.position - action.position), work)

        self._work = work = Work(
            segment,
            output,
            after,
            tokens=tokens,
            before=before,
            settle=settle,
            decodes=message.kind in POSITIONED_KINDS,
        )
        return work

    async def run(self, work: Work) -> None:
        """Run what :meth:`prepare` gave. Cancelled, rows that have not begun do not run any more.

        The message's activation and the output are in use until the work is over. Raises RequestFailed when
        the engine refuses or fails.
        """
        try:
            await self._scheduler.carry_out(work)
        except (ValueError, EngineError) as exc:
            raise RequestFailed(str(exc)) from exc

    def prepare_run(self, message: Message, run: LocalRun, settle: Settle) -> Work:
        """:meth:`prepare_now` for a decode step after which the engine's thread goes on by itself.

        Only where this stage is the whole model. Call :meth:`went_on` for each step that has begun so.
        """

        def sink(predicted: Predicted, work: Work) -> bool:
            assert isinstance(predicted, int)
            return run.made(predicted, self.take_annex(), work)

        work = self.prepare_now(message, None, sink, settle)
        work.report = run.report
        return work

    def went_on(self) -> None:
        """One more step has begun by itself."""
        self._machine.advance()

    def start(self, work: Work) -> None:
        """Start what :meth:`prepare_now` gave, without waiting for its end."""
        self._scheduler.submit(work)

    def pause(self) -> None:
        """The session does not decode on for now: batches must not wait for it. Never waits."""
        self._scheduler.pause(self._sequence)

    def take_annex(self) -> ReplyAnnex | None:
        """What goes with the prediction of the work that ran last; once."""
        if not self._native.scores:
            return None
        scores, self._native.scores = self._native.scores, []
        return ReplyAnnex(log_probabilities=tuple(scores))

    async def trim(self, message: Message) -> None:
        """Shorten the session as a TrimSession asks (no effect where it is shorter already)."""
        before = self._machine.length
        length = self._machine.trim(message)
        if length == before:
            return
        try:
            await self._scheduler.run(lambda engine: self._rewind(engine, length))
        except EngineError as exc:
            raise RequestFailed(f"trim to {length} failed: {exc}") from exc

    def _rewind(self, engine: StageEngine, length: int) -> None:
        engine.trim(self._sequence, length)
        native = self._native
        del native.history[length:]
        if native.sampler is not None:
            # A native sampler cannot forget tokens, so it is made again over what is left.
            native.replace_sampler(engine.new_sampler(self._sampling))

    def close(self) -> None:
        """Give the sequence back and free the sampler, in the engine's own order. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._work is not None:
            self._scheduler.cancel(self._work)
        native = self._native
        self._scheduler.post(lambda _: native.replace_sampler(None))
        self._scheduler.release_sequence(self._sequence)
