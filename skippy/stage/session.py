"""One logical session on one stage: its native sequence, its position, and on the last stage its sampler."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from skippy.engine import EngineError, Sampler, Segment, StageEngine
from skippy.protocol import (
    Message,
    RemoteProtocolError,
    SamplingConfig,
    Session,
    Verb,
    execution_tokens,
    requires_predicted_reply,
)

from .errors import RequestFailed, SettingsRefused
from .runtime import Finish
from .scheduler import Scheduler

EngineCall = Callable[[StageEngine], int | None]


@attrs.define(slots=True)
class _Native:
    """What only engine calls touch, in their order: the token history and the sampler over it."""

    history: list[int] = attrs.field(factory=list)
    sampler: Sampler | None = None

    def replace_sampler(self, sampler: Sampler | None) -> None:
        if self.sampler is not None:
            self.sampler.close()
        self.sampler = sampler
        if sampler is not None and self.history:
            sampler.accept(self.history)


class StageSession:
    """Runs one session's messages on the engine.

    Make one with :meth:`open`; :meth:`close` never waits and must be called on every path.
    """

    def __init__(self, scheduler: Scheduler, sequence: int) -> None:
        self._scheduler = scheduler
        self._sequence = sequence
        self._machine = Session()
        self._native = _Native()
        self._settings: tuple[SamplingConfig | None, str | None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, scheduler: Scheduler) -> StageSession:
        """A new, empty session; waits for a free sequence."""
        sequence = await scheduler.acquire_sequence()
        return cls(scheduler, sequence)

    @property
    def length(self) -> int:
        """Positions that the session holds after the messages accepted so far."""
        return self._machine.length

    async def configure(self, sampling: SamplingConfig | None, chat_metadata: str | None) -> None:
        """Set the sampler (last stage only). Raises RequestFailed for a setting the engine refuses."""
        self._settings = (sampling, chat_metadata)
        native = self._native

        def call(engine: StageEngine) -> None:
            native.replace_sampler(engine.new_sampler(sampling, chat_metadata))

        try:
            await self._scheduler.run(call)
        except (ValueError, EngineError) as exc:
            raise SettingsRefused(f"sampling settings refused: {exc}") from exc

    async def prepare(self, message: Message, output: memoryview | None) -> EngineCall:
        """Accept a data message; returns the engine call that carries it out, for :meth:`run`.

        The call gives the predicted token where this is the last stage and the kind asks for one, else None,
        and fills ``output`` with the boundary activation (non-last stages). It must be run, or the session
        dropped: from here on the session counts its positions.

        Raises:
            RemoteProtocolError: the message does not fit the session (stale, gap, counts that disagree).
            SettingsRefused: the message brings sampling settings that the engine refuses.
        """
        action = self._machine.accept(message)
        if action.verb is Verb.STALE:
            raise RemoteProtocolError(f"{message.kind.name} of a generation that has been rewound")
        info = self._scheduler.info
        tokens = execution_tokens(message) if info.is_first or info.is_last else None
        predicts = info.is_last and requires_predicted_reply(message.kind)
        if predicts and (
            self._settings is None or (message.sampling is not None and self._settings[0] is None)
        ):
            await self.configure(message.sampling, message.chat_sampling_metadata)
        segment = Segment(
            sequence=self._sequence,
            position=action.position,
            count=action.count,
            tokens=tokens if info.is_first else None,
            activation=None if info.is_first else memoryview(message.activation),
            logits=int(predicts),
        )
        step = max(0, message.state.decode_step)
        trim_to = action.position if action.verb is Verb.REWIND else None
        history = tokens if info.is_last else None

        def call(engine: StageEngine) -> int | None:
            if trim_to is not None:
                self._rewind(engine, trim_to)
            engine.decode([segment], output)
            native = self._native
            if history is not None:
                native.history.extend(history)
                if native.sampler is not None:
                    native.sampler.accept(history)
            if not predicts:
                return None
            assert native.sampler is not None
            return native.sampler.sample(engine.logits(0), step)

        return call

    async def run(self, call: EngineCall, finish: Finish | None = None) -> int | None:
        """Run what :meth:`prepare` gave. ``finish`` and cancellation: as :meth:`Runtime.run`.

        The message's activation and the output are in use until this returns or, if cancelled, until the
        call ends. Raises RequestFailed when the engine refuses or fails.
        """
        try:
            return await self._scheduler.run(call, finish)
        except (ValueError, EngineError) as exc:
            raise RequestFailed(str(exc)) from exc

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
        if native.sampler is not None and self._settings is not None:
            # A native sampler cannot forget tokens, so it is made again over what is left.
            native.replace_sampler(engine.new_sampler(*self._settings))

    def close(self) -> None:
        """Give the sequence back and free the sampler, in the engine's own order. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        native = self._native
        self._scheduler.post(lambda _: native.replace_sampler(None))
        self._scheduler.release_sequence(self._sequence)
