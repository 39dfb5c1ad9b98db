"""One logical session on one stage: its native sequence, its position, and on the last stage its sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from skippy.engine import EngineError, Segment, StageEngine
from skippy.engine.grammar import Grammar, GrammarFailed
from skippy.protocol import (
    POSITIONED_KINDS,
    Action,
    Message,
    MessageKind,
    ReplyAnnex,
    SamplingConfig,
    Session,
    Verb,
    VerifyPipeline,
    execution_tokens,
    requires_predicted_reply,
)

from .errors import LaneLost, RequestFailed, SettingsRefused
from .history import NativeHistory
from .holding import Holding
from .keeping import StageCache
from .restored import Restored
from .runs import LocalRun
from .scheduler import Scheduler
from .settings import GenerationSettings, parse_metadata
from .work import Settle, Work

Predicted = int | Sequence[int] | None
"""The token that a message's rows predict, for a verify window one for each of its rows, or nothing."""
Sink = Callable[[Predicted, Work], bool]
"""What follows a work's rows in the engine's thread. True when the event loop must hear of it soon."""


class StageSession:
    """Runs one session's messages on the engine.

    Before its first rows it needs a sequence, from :meth:`place` or :meth:`restore`. :meth:`close` never
    waits and must be called on every path.

    Args:
        windows: as :class:`Session`.
        cache: the stage's prefix cache.
    """

    def __init__(
        self, scheduler: Scheduler, windows: VerifyPipeline, cache: StageCache | None = None
    ) -> None:
        self._scheduler = scheduler
        self.sequence: int | None = None
        """The native sequence id; None before there is one."""
        self.holding = None if cache is None else Holding(cache)
        """The session's side of the prefix cache; None without one."""
        self._takes_tokens = scheduler.info.is_first or scheduler.info.takes_tokens
        self._is_first = scheduler.info.is_first
        self._is_last = scheduler.info.is_last
        self._machine = Session(windows)
        self._native = NativeHistory()
        self._sampling: SamplingConfig | None = None
        self._configured = False
        self.scores = False
        """Whether log-probabilities come with what is predicted: see :meth:`take_annex`."""
        self._work: Work | None = None
        """What ran or runs last."""
        self._closed = False

    async def place(self, wanted: int | None = None) -> None:
        """Take an empty sequence, best ``wanted``, unless the session has one. Waits until there is one."""
        if self.sequence is None:
            sequence = await self._scheduler.acquire_sequence(wanted)
            if self._closed:
                self._scheduler.release_sequence(sequence)
                self.check_open()
            self.sequence = sequence

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

    async def configure(
        self, sampling: SamplingConfig | None, settings: GenerationSettings, grammar: Grammar | None = None
    ) -> None:
        """Set the sampler (last stage only). Raises SettingsRefused for a setting the engine refuses."""
        self._sampling, self._configured = sampling, True
        self.scores = settings.top_logprobs is not None
        native = self._native

        def call(engine: StageEngine) -> None:
            native.replace_sampler(engine.new_sampler(sampling))
            native.top_logprobs = settings.top_logprobs
            native.grammar = grammar

        try:
            await self._scheduler.run(call)
        except (ValueError, EngineError) as exc:
            raise SettingsRefused(f"sampling settings refused: {exc}") from exc

    def takes_now(self, message: Message) -> bool:
        """Whether a decode step is to run, and nothing has to be prepared for it."""
        holding = self.holding
        return not (
            self.sequence is None
            or (holding is not None and message.pos_start < holding.bound)
            or self.wants_settings(message)
            or self._machine.is_stale(message)
        )

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
            if settings.top_logprobs is not None or settings.grammar:
                name = "grammar" if settings.grammar else "top_logprobs"
                raise SettingsRefused(f"{name} is asked for with ConfigureGeneration alone")
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
        first, last, holding = self._is_first, self._is_last, self.holding
        follows = last or holding is not None
        tokens = execution_tokens(message) if self._takes_tokens or follows else None
        assert self.sequence is not None, "rows before a sequence"
        predicts = last and requires_predicted_reply(message.kind)
        each = message.kind is MessageKind.VERIFY_WINDOW
        segment = Segment(
            sequence=self.sequence,
            position=action.position,
            count=action.count,
            tokens=tokens if self._takes_tokens else None,
            activation=None if first else memoryview(message.activation),
            logits=(action.count if each else 1) if predicts else 0,
        )
        step = max(0, message.state.decode_step)
        before = (
            functools.partial(self._rewind, length=action.position) if action.verb is Verb.REWIND else None
        )
        if holding is not None and action.position < holding.bound and holding.begin_rows(action.position):
            before = functools.partial(self._rewind, length=action.position)
        native = self._native

        def after(engine: StageEngine, row: int) -> bool:
            if not follows:
                return sink(None, work)
            # A work that goes on by itself, or is done again, has other rows each time.
            history = work.tokens
            assert history is not None
            if each and last:
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
        the engine refuses or fails, LaneLost where another sequence would do, or the session was closed.
        """
        try:
            await self._scheduler.carry_out(work)
        except GrammarFailed as exc:
            raise SettingsRefused(str(exc)) from exc
        except (ValueError, EngineError) as exc:
            if self._scheduler.is_broken(work.segment.sequence):
                raise LaneLost(f"a native sequence could not be emptied: {exc}") from exc
            raise RequestFailed(str(exc)) from exc
        self.check_open()

    def check_open(self) -> None:
        """LaneLost where the session was closed, after any wait: its sequence is somebody else's by now.

        A wait that is over in the same moment as the lane is not cancelled.
        """
        if self._closed:
            raise LaneLost("the lane ended, and its session with it")

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
        if self.sequence is not None:
            self._scheduler.pause(self.sequence)

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
        holding = self.holding
        if holding is not None and holding.restored is not None:
            self._recall(holding.restored, length)  # the sequence is trimmed before its first row
            return
        if holding is not None and length < holding.bound:
            holding.begin_rows(length)
        try:
            await self._scheduler.run(lambda engine: self._rewind(engine, length))
        except EngineError as exc:
            raise RequestFailed(f"trim to {length} failed: {exc}") from exc

    def _rewind(self, engine: StageEngine, length: int) -> None:
        assert self.sequence is not None
        engine.trim(self.sequence, length)
        native = self._native
        if length == len(native.history):
            return
        native.cut(length)
        if native.sampler is not None:
            # A native sampler cannot forget tokens, so it is made again over what is left.
            native.replace_sampler(engine.new_sampler(self._sampling))

    def _recall(self, restored: Restored | None, length: int) -> None:
        """Use ``length`` positions of what was restored."""
        assert restored is not None
        restored.length = min(length, len(restored.held))
        self._remember(restored.tokens)

    def _remember(self, tokens: Sequence[int]) -> None:
        """The session holds these tokens, and no others."""
        native, sampling = self._native, self._sampling
        sampled = self._is_last and self._configured
        self._scheduler.post(
            lambda engine: native.recall(tokens, engine.new_sampler(sampling) if sampled else None)
        )

    def close(self) -> None:
        """Give the sequence back and free the sampler, in the engine's own order. Safe to call twice."""
        if self._closed:
            return
        self._end()
        if self.holding is not None and self.holding.restored is not None:
            self.holding.undo()
        elif self.holding is not None and self.sequence is not None:
            self.holding.drop(self.sequence)
        elif self.sequence is not None:
            self._scheduler.release_sequence(self.sequence)

    def _end(self) -> None:
        self._closed = True
        if self._work is not None:
            self._scheduler.cancel(self._work)
        native = self._native
        self._scheduler.post(lambda _: native.replace_sampler(None))
