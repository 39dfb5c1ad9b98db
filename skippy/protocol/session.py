"""What a stage holds for one request: its length and its epoch, and what an arriving frame means for both.

Source of the rules: ``docs/protocol.md``, section "Sessions".
"""

from __future__ import annotations

import enum

import attrs

from .epochs import EPOCH_KINDS, RequestEpoch, VerifyWindowRange, is_skipped
from .errors import LocalProtocolError, RemoteProtocolError
from .kinds import MessageKind
from .machines import Machine
from .messages import Message
from .rules import DATA_KINDS, POSITIONED_KINDS
from .states import SESSION, SessionEvent, SessionState
from .verify import VerifyPipeline


class Verb(enum.Enum):
    """What to do with an accepted frame."""

    RUN = "run"
    """Execute its rows; the session's end is where they start."""
    REWIND = "rewind"
    """Trim the engine's sequence to ``position`` first, then execute."""
    STALE = "stale"
    """Do not execute. Answer in order all the same (forward it empty, reply as the kind requires)."""


@attrs.frozen(slots=True)
class Action:
    """What an accepted data frame asks for: rows ``[position, position + count)``.

    ``verb`` says whether to trim to ``position`` before; for STALE, position and count are 0.
    """

    verb: Verb
    position: int
    count: int


_STALE = Action(Verb.STALE, 0, 0)


class Session(Machine[SessionState, SessionEvent]):
    """Length and epoch of one request on one stage.

    The length is what the engine's sequence will hold once every accepted frame has run, so call ``accept``
    in arrival order, once per data frame, and drop the session when an accepted frame could not be run.

    Attributes:
        windows: the request's verify windows, which ``accept`` and ``trim`` open, skip and rewind.
        stale_frames: how many frames were not executed.
    """

    def __init__(self, windows: VerifyPipeline | None = None) -> None:
        super().__init__("session", SESSION, SessionState.NEW)
        self.windows = VerifyPipeline() if windows is None else windows
        self._length = 0
        self._epoch: RequestEpoch | None = None
        self._ids: tuple[int, int] | None = None
        self.stale_frames = 0

    @property
    def length(self) -> int:
        """Positions the session holds, counting accepted frames that still run."""
        return self._length

    @property
    def epoch(self) -> RequestEpoch | None:
        """Epoch of the last frame that was accepted to run; None before the first."""
        return self._epoch

    def is_stale(self, message: Message) -> bool:
        """Whether ``message`` is not to be executed.

        So is a frame of a generation that a rewind, trim or replay has left behind, and one that an earlier
        stage has skipped. Only kinds with a usable epoch are compared, by ``checkpoint_generation``: within
        one generation the position decides, so that rejected speculation can be undone by the next frame.
        """
        epoch = self._epoch
        if epoch is not None and message.state.checkpoint_generation < epoch.checkpoint_generation:
            return message.kind in EPOCH_KINDS and epoch.same_flow(RequestEpoch.of(message))
        return is_skipped(message)

    def skip(self, message: Message) -> None:
        """Count a stale frame. Nothing else changes, but that a verify window waits for its answer."""
        if message.kind is MessageKind.VERIFY_WINDOW:
            self.windows.skip(message.state.seq_id)
        self.stale_frames += 1

    def accept(self, message: Message) -> Action:
        """Decide what a data frame (kinds 1, 2, 4, 5, 6, 8, 9, 21) means, and step.

        A frame of a lower generation, or one that an earlier stage found stale and forwarded with
        ``token_count`` 0, is STALE and changes nothing. Otherwise its rows start at ``pos_start`` (at the
        session's end when that is negative): the end is RUN; below it is REWIND for the kinds with an
        authoritative position and for any frame of a higher generation.

        Raises:
            RemoteProtocolError: a gap (position ahead of what the session holds), a prefill over positions
                already held, a decode without a position before anything was prefilled, other ids, a verify
                window out of order or one too many.
            LocalProtocolError: not a data kind.
        """
        kind = message.kind
        if kind not in DATA_KINDS:
            raise LocalProtocolError(f"{kind.name} carries no rows for a session")
        ids = (message.request_id, message.session_id)
        if self._ids is not None and ids != self._ids:
            raise RemoteProtocolError(f"{kind.name} for {ids} on the session of {self._ids}")
        if self.is_stale(message):
            self.skip(message)
            return _STALE
        if message.token_count < 0:
            raise RemoteProtocolError(f"{kind.name} with token_count {message.token_count}")
        action = self._place(message)
        if kind is MessageKind.VERIFY_WINDOW:
            self.windows.open(VerifyWindowRange(message.state.seq_id, action.position, action.count))
        elif action.verb is Verb.REWIND:
            self.windows.rewind(action.position)
        self._remote(SessionEvent.DATA)
        self._ids = ids
        self._epoch = RequestEpoch.of(message)
        self._length = action.position + action.count
        return action

    def advance(self) -> None:
        """One decode step has followed the last accepted one by itself, with no frame of its own.

        Raises:
            LocalProtocolError: the last accepted frame was no decode step.
        """
        epoch = self._epoch
        if epoch is None or epoch.decode_step < 0:
            raise LocalProtocolError("no decode step to follow")
        self._length += 1
        # Spelled out: this runs for every token.
        self._epoch = RequestEpoch(
            epoch.request_id,
            epoch.session_id,
            epoch.checkpoint_generation,
            epoch.prompt_token_count,
            epoch.decode_step + 1,
        )

    def _place(self, message: Message) -> Action:
        kind, position = message.kind, message.pos_start
        if position < 0:
            if kind in POSITIONED_KINDS and self._state is SessionState.NEW:
                raise RemoteProtocolError(f"{kind.name} without a position before any prefill or restore")
            position = self._length
        if position > self._length:
            raise RemoteProtocolError(
                f"gap: {kind.name} starts at position {position}, the session holds {self._length}"
            )
        if position == self._length:
            return Action(Verb.RUN, position, message.token_count)
        # What was restored, and has no row behind it, is of no epoch; a request's first generation is 0.
        before = 0 if self._epoch is None else self._epoch.checkpoint_generation
        newer = message.state.checkpoint_generation > before
        if kind not in POSITIONED_KINDS and not newer:
            raise RemoteProtocolError(
                f"{kind.name} starts at position {position}, but the session already holds {self._length}"
            )
        return Action(Verb.REWIND, position, message.token_count)

    def trim(self, message: Message) -> int:
        """A TrimSession arrived: returns the length to trim the engine to, at most the present one."""
        if message.kind is not MessageKind.TRIM_SESSION:
            raise LocalProtocolError(f"{message.kind.name} is not a trim")
        self._remote(SessionEvent.TRIM)
        self._length = min(self._length, max(message.token_count, 0))
        self.windows.rewind(self._length)
        return self._length

    def restored(self, message: Message, length: int) -> None:
        """A cached prefix of ``length`` positions was put into the session for ``message``.

        Raises:
            LocalProtocolError: the session already holds something, or ``length`` is negative.
        """
        if length < 0:
            raise LocalProtocolError(f"restored length {length}")
        self._local(SessionEvent.RESTORED)
        self._ids = (message.request_id, message.session_id)
        self._length = length

    def stop(self) -> None:
        """The request ended or was dropped: the session is new again. Works in every state."""
        self._local(SessionEvent.STOP)
        self._length = 0
        self._epoch = None
        self._ids = None
        self.windows.clear()
