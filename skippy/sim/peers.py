"""Peers that speak the protocol to stage 0 by themselves, and do whatever is allowed, at random.

The front end sends only what one generation after the other needs. A peer also verifies windows, rewinds,
trims and replays, and sends frames of a past that was rewound; each reply must be what one engine would give.
What is remembered it asks for in every way that there is; half of all peers agree to settle on a length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import trio

from skippy.protocol import (
    RESTORE_EXTENSION,
    AdmissionRequest,
    ConnectionRole,
    Message,
    MessageKind,
    ProtocolError,
    Reply,
    ReplyDecoder,
    ReplyKind,
    SamplingConfig,
    default_state,
    encode_frame,
    is_hit,
)
from skippy.stage import DownstreamUnavailable, Stage
from skippy.stage.dialing import dial_admitted
from skippy.stage.framing import receive_reply
from skippy.stage.links import Link, LinkClosed, Transport

from .oracle import RowOracle, ToyModel
from .prefixes import begin
from .trace import Trace
from .violation import require

K = MessageKind
Expected = tuple[ReplyKind, tuple[int, ...]]
ACK: Final[Expected] = (ReplyKind.ACK, ())
ONE_TOKEN: Final = (K.DECODE_EMBD, K.DECODE_LIGHT_CTX, K.DECODE_READOUT)
QUESTIONS: Final = (
    K.TRY_RESTORE_PREFILL,
    K.TRY_RESTORE_PREFILL,
    K.TRY_RESTORE_PREFILL_DECODE,
    K.TRY_RESTORE_PREFILL_DECODE,
    K.RESTORE_PREFILL,
    K.PROBE_PREFILL,
)
LATE: Final = (
    K.PREFILL_EMBD,
    K.DECODE_REPLAY_EMBD,
    K.DECODE_EMBD,
    K.VERIFY_WINDOW,
    K.TRY_RESTORE_PREFILL_DECODE,
)
IN_FLIGHT: Final = 6
PATIENCE_SECS: Final = 20.0
"""How long a peer tries to connect."""
ASKING_SECS: Final = 60.0
"""So long after its beginning a peer asks nothing more: over a link that trickles a frame takes seconds."""
SEEDED: Final = SamplingConfig(
    flags=1, seed=5, temperature=0.8, top_k=20, repeat_penalty=1.2, presence_penalty=0.3
)


def lane_request(stage: Stage) -> AdmissionRequest:
    """What ``stage`` admits as a lane: the request of the stage before it, or of a driver."""
    loaded = stage.context.admission.loaded
    return AdmissionRequest(
        role=ConnectionRole.LANE,
        sender_id="peer",
        sender_index=loaded.stage_index - 1,
        target_id=None,
        target_index=loaded.stage_index,
        layer_start=loaded.descriptor.layer_start,
        layer_end=None,
        run_id=loaded.run_id,
        topology_id=loaded.topology_id,
        model_id=loaded.model_id,
        layer_count=None,
        package_id=None,
        activation_width=loaded.input_width,
        cache_type_k=None,
        cache_type_v=None,
        context_length=loaded.context_length,
        batch_rows=1,
    )


@attrs.define(eq=False)
class Peer:
    """One connection to stage 0, and requests on it. :meth:`run` is its task; it raises Violation.

    Attributes:
        places: the dice for whether a frame at the session's end says its position.
        may_differ: as for :class:`Client`. An answer that is wrong for this reason ends the peer.
        ended: why it has ended: ``done``, or the text of what ended its connection.
    """

    name: str
    chance: random.Random
    places: random.Random
    model: ToyModel
    trace: Trace
    sessions: int
    frames: int
    may_differ: Callable[[float], bool]
    texts: Sequence[tuple[int, ...]] = ()
    ended: str | None = None
    _left: tuple[int, ...] = ()
    """What the request before has run."""
    _settles: bool = False
    """Whether an Ack may settle on less of a prefix than was asked for."""
    _link: Link | None = None
    _replies: ReplyDecoder = attrs.field(factory=ReplyDecoder)
    _oracle: RowOracle = attrs.field(init=False)
    _owed: list[Expected] = attrs.field(factory=list)
    _request_id: int = 0
    _generation: int = 0
    _prompt: list[int] = attrs.field(factory=list)
    _window: int = 0
    _asks_until: float = 0.0
    _began: float = 0.0

    async def run(self, stage: Stage, transport: Transport) -> None:
        """Live until everything is asked and answered, or the connection ends."""
        self._settles = bool(self.texts) and self.chance.random() < 0.5
        extensions = (RESTORE_EXTENSION,) if self._settles else ()
        self._began = trio.current_time()
        try:
            self._link, _ = await dial_admitted(
                transport,
                stage.endpoint,
                token=stage.context.token,
                source_host=None,
                timeout_secs=PATIENCE_SECS,
                request=attrs.evolve(lane_request(stage), extensions=extensions),
            )
            self._asks_until = trio.current_time() + ASKING_SECS
            for number in range(self.sessions):
                await self._converse(number)
            self.ended = "done"
        except (LinkClosed, ProtocolError, DownstreamUnavailable) as error:
            self.ended = f"{type(error).__name__}: {error}"
        finally:
            if self._link is not None:
                self._link.close()
        self.trace(f"{self.name} ended: {self.ended}")

    async def _converse(self, number: int) -> None:
        """One request from its settings to its Stop."""
        chance = self.chance
        sampling = SEEDED if chance.random() < 0.5 else None
        self._request_id, self._generation = 1000 + number, 0
        self._oracle = RowOracle(self.model, sampling)
        self._prompt = [chance.randrange(32, 127) for _ in range(chance.randint(2, 16))]
        if self.texts:
            # One token alone behind a text: all that is asked for may be there.
            own = self._prompt[: chance.choice([1, len(self._prompt)])]
            again = self._left and chance.random() < 0.7
            self._prompt = begin(chance, [self._left] if again else self.texts, own)
        await self._send(K.CONFIGURE_GENERATION, sampling=sampling)
        self._owed.append(ACK)
        self._oracle.run(self._prompt[:-1])
        start = await self._restore() if self.texts and chance.random() < 0.7 else 0
        if start < len(self._prompt) - 1:
            await self._send(K.PREFILL_EMBD, start, self._prompt[start:-1])
            self._owed.append(ACK)
        actions = [
            self._decode,
            self._decode,
            self._decode_on,
            self._verify,
            self._verify,
            self._trim_and_replay,
            self._late,
        ]
        for _ in range(self.frames):
            if trio.current_time() >= self._asks_until:
                break
            await chance.choice(actions)()
            while len(self._owed) > chance.randrange(IN_FLIGHT):
                await self._read()
        await self._read_all()
        await self._send(K.STOP)
        self._owed.append(ACK)
        await self._read()
        self._left = tuple(self._oracle.held)

    async def _restore(self) -> int:
        """Ask for all of the prompt but its last token, once or twice; how much of it has run then."""
        length = 0
        for kind in self.chance.choices(QUESTIONS, k=self.chance.choice([1, 1, 2])):
            await self._read_all()
            if kind is not K.TRY_RESTORE_PREFILL_DECODE:
                found = await self._ask_for(kind, self._prompt[:-1])
                length = length if kind is K.PROBE_PREFILL else found
            elif await self._restore_and_decode():
                return len(self._prompt)
            else:
                length = 0
        return length

    async def _ask_for(self, kind: MessageKind, prefix: list[int]) -> int:
        """How much of a prefix there is, says the Ack: one that must be of all of it says no length."""
        await self._send(kind, 0, prefix)
        self._owed.append(ACK)
        reply = await self._read()
        asked, hit, said = len(prefix), is_hit(reply.stats), reply.predicted
        if not (hit and self._settles):
            right = said == 0
        else:
            right = said == asked if kind is K.RESTORE_PREFILL else 1 <= said <= asked
        what = f"{kind.name} for {asked} tokens, a {'hit' if hit else 'miss'}"
        self._check(right, f"{self.name} was told {said} by {what}")
        return said if self._settles else asked * hit

    async def _restore_and_decode(self) -> bool:
        """All of the prompt in one frame: whether it has run, and if not, nothing of it."""
        last = len(self._prompt) - 1
        await self._send(
            K.TRY_RESTORE_PREFILL_DECODE, last, self._prompt, token_count=1, decode_step=self._step(last)
        )
        self._owed.append((ReplyKind.PREDICTED_TOKEN, self._oracle.run(self._prompt[-1:], self._step(last))))
        reply = await self._read(or_miss=True)
        if reply.kind is ReplyKind.ACK:
            self._oracle.cut(last)
        return reply.kind is not ReplyKind.ACK

    # -- frames ----------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        await self._decode_at(self._position(), self.chance.choice(ONE_TOKEN))

    async def _decode_on(self) -> None:
        """Steps of one kind that each wait for the one before, which engines' threads receive by themselves.

        What comes behind the last one need not wait.
        """
        kind = self.chance.choice(ONE_TOKEN)
        for _ in range(self.chance.randint(3, 6)):
            await self._read_all()
            await self._decode_at(self._end(), kind)

    async def _decode_at(self, position: int, kind: MessageKind) -> None:
        token, place = self._tokens(1)[0], self._place(position)
        self._oracle.cut(position)
        self._owed.append((ReplyKind.PREDICTED_TOKEN, self._oracle.run([token], self._step(position))))
        await self._send(kind, place, [token], decode_step=self._step(position))

    async def _verify(self) -> None:
        position, tokens = self._position(), self._tokens(4)
        self._oracle.cut(position)
        self._owed.append((ReplyKind.PREDICTED_TOKENS, self._oracle.run(tokens, self._step(position))))
        self._window += self.chance.randint(1, 3)
        await self._send_window(position, tokens)
        if self.chance.random() < 0.3:
            await self._read_all()
            await self._send(K.RETIRE_VERIFY_WINDOW, position, token_count=len(tokens))

    async def _send_window(self, position: int, tokens: list[int]) -> None:
        await self._send(
            K.VERIFY_WINDOW, position, tokens, seq_id=self._window, decode_step=self._step(position)
        )

    async def _trim_and_replay(self) -> None:
        held = min(len(self._oracle.held), self.model.context_length - 8)
        length = max(1, held - self.chance.randrange(6))
        await self._send(K.TRIM_SESSION, token_count=length)
        self._oracle.cut(length)
        self._generation += 1
        position, tokens = max(1, length - self.chance.randrange(2)), self._tokens(3)
        place = self._place(position)
        self._oracle.cut(position)
        self._oracle.run(tokens)
        await self._send(K.DECODE_REPLAY_EMBD, place, tokens)
        self._owed += [ACK, ACK]

    async def _late(self) -> None:
        """A frame of a generation before, of any kind that has an epoch: answered, and not carried out."""
        if self._generation == 0:
            return
        current, self._generation = self._generation, self.chance.randrange(self._generation)
        kind = self.chance.choice(LATE)
        position = self.chance.randrange(max(1, self.model.context_length - 8))
        if kind is K.VERIFY_WINDOW:
            self._window += 1
            await self._send_window(position, self._tokens(4))
            self._owed.append((ReplyKind.PREDICTED_TOKENS, ()))
        elif kind is K.TRY_RESTORE_PREFILL_DECODE:
            await self._send(kind, position, [*self._tokens(4), *self._tokens(1)], token_count=1)
            self._owed.append(ACK)
        else:
            await self._send(kind, position, self._tokens(1))
            self._owed.append((ReplyKind.PREDICTED_TOKEN, ()) if kind is K.DECODE_EMBD else ACK)
        self._generation = current

    async def _read_all(self) -> None:
        while self._owed:
            await self._read()

    async def _read(self, *, or_miss: bool = False) -> Reply:
        """The next reply, which must be the one that is owed, or with ``or_miss`` the Ack of a miss."""
        assert self._link is not None
        wanted = self._owed.pop(0)
        reply = await receive_reply(self._link, self._replies)
        if reply is None:
            raise LinkClosed("stage 0 has closed the lane")
        got = (reply.kind, tuple(reply.predicted_tokens))
        self.trace(f"{self.name} {reply.kind.name} {list(reply.predicted_tokens)}")
        missed = or_miss and got == ACK and not is_hit(reply.stats) and not reply.predicted
        self._check(missed or got == wanted, f"{self.name} got {got}, and must get {wanted}")
        return reply

    def _check(self, holds: bool, text: str) -> None:
        """LinkClosed where changed bytes may be why something does not hold, nor what follows."""
        if not holds and self.may_differ(self._began):
            raise LinkClosed(f"{text}, but for bytes that were changed")
        require(holds, text)

    async def _send(
        self,
        kind: MessageKind,
        pos_start: int = 0,
        tokens: list[int] | None = None,
        *,
        sampling: SamplingConfig | None = None,
        token_count: int | None = None,
        **state: Any,
    ) -> None:
        assert self._link is not None
        tokens = tokens or []
        words = {
            "checkpoint_generation": self._generation,
            "prompt_token_count": len(self._prompt),
            "current_token": tokens[0 if kind is K.VERIFY_WINDOW else -1] if tokens else -1,
            **state,
        }
        if len(tokens) > 1 and kind not in (K.VERIFY_WINDOW, K.TRY_RESTORE_PREFILL_DECODE):
            words["current_token"] = -1
        message = Message(
            kind,
            attrs.evolve(default_state(kind), **words),
            pos_start=pos_start,
            token_count=len(tokens) if token_count is None else token_count,
            request_id=self._request_id,
            session_id=self._request_id + 1,
            sampling=sampling,
            tokens=tuple(tokens),
        )
        await self._link.send(encode_frame(message, 0))

    def _tokens(self, most: int) -> list[int]:
        """1 to ``most`` of them, as far as there is room for more."""
        return [self.chance.randrange(32, 127) for _ in range(self.chance.randint(1, most))]

    def _position(self) -> int:
        """Mostly the end, sometimes up to five positions back; never the first one, nor near the last."""
        end = self._end()
        if end < len(self._oracle.held) or self.chance.random() < 0.6:
            return end
        return max(1, end - self.chance.randint(1, 5))

    def _place(self, position: int) -> int:
        """What a frame says of it: nothing, at times, where it is the session's end."""
        return -1 if position == len(self._oracle.held) and self.places.random() < 0.2 else position

    def _end(self) -> int:
        """The end; far back where there is no room behind it."""
        held = len(self._oracle.held)
        return self.chance.randint(1, 8) if held > self.model.context_length - 8 else held

    def _step(self, position: int) -> int:
        return position - (len(self._prompt) - 1)
