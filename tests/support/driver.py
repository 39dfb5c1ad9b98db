"""A driver that speaks the stage protocol to stage 0, or a stage that speaks it to the next one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import attrs

from skippy.protocol import (
    EMPTY_STATS,
    RESTORE_EXTENSION,
    Message,
    MessageKind,
    Reply,
    ReplyDecoder,
    ReplyStats,
    SamplingConfig,
    default_state,
    encode_frame,
)
from skippy.stage import Stage
from skippy.stage.framing import receive_reply
from skippy.stage.links import Link
from tests.support.admission import lane_request
from tests.support.cluster import Cluster
from tests.support.dialing import dial_stage


def unmeasured(reply: Reply) -> Reply:
    """A reply whose statistics speak of caches alone: what is measured differs from run to run."""
    stats = {name: value for name, value in attrs.asdict(reply.stats).items() if name.startswith("kv_")}
    return attrs.evolve(reply, stats=ReplyStats(**stats))


@attrs.define
class Driver:
    """One lane into a stage, carrying one request.

    Attributes:
        prompt_tokens: tokens of the prompt, for the headers.
        generation: checkpoint generation of the frames that are sent.
        stats: the statistics of the last reply.
    """

    link: Link
    stage: Stage
    prompt_tokens: int = 0
    generation: int = 0
    request_id: int = 3
    replies: ReplyDecoder = attrs.field(factory=ReplyDecoder)
    stats: ReplyStats = EMPTY_STATS

    async def send(
        self,
        kind: MessageKind,
        pos_start: int = 0,
        tokens: Sequence[int] = (),
        *,
        sampling: SamplingConfig | None = None,
        token_count: int | None = None,
        activation: bytes = b"",
        chat_sampling_metadata: str | None = None,
        **state: Any,
    ) -> None:
        """Send a frame; ``state`` names header words that differ from the kind's own."""
        words = {
            "checkpoint_generation": self.generation,
            "prompt_token_count": self.prompt_tokens,
            "current_token": tokens[-1] if len(tokens) == 1 else -1,
            **state,
        }
        message = Message(
            kind,
            attrs.evolve(default_state(kind), **words),
            pos_start=pos_start,
            token_count=len(tokens) if token_count is None else token_count,
            request_id=self.request_id,
            session_id=self.request_id + 1,
            sampling=sampling,
            chat_sampling_metadata=chat_sampling_metadata,
            tokens=tuple(tokens),
            activation=activation,
        )
        await self.link.send(encode_frame(message, self.stage.info.input_width))

    async def reply(self) -> Reply:
        """The next reply, without what was measured."""
        reply = await receive_reply(self.link, self.replies)
        assert reply is not None, "the stage has closed the lane"
        self.stats = reply.stats
        return unmeasured(reply)

    async def ended(self) -> bool:
        """Whether the stage closes the lane instead of replying."""
        return await receive_reply(self.link, self.replies) is None

    async def ask(self, kind: MessageKind, *args: Any, **fields: Any) -> Reply:
        """Send a frame and read its reply. Only with nothing else owed."""
        await self.send(kind, *args, **fields)
        return await self.reply()

    async def start(self, prompt: Sequence[int], sampling: SamplingConfig | None = None) -> None:
        """Settings, and the prompt but for its last token."""
        self.prompt_tokens = len(prompt)
        await self.ask(MessageKind.CONFIGURE_GENERATION, sampling=sampling)
        await self.ask(MessageKind.PREFILL_EMBD, 0, prompt[:-1])

    async def decode(
        self, position: int, token: int, kind: MessageKind = MessageKind.DECODE_EMBD, **fields: Any
    ) -> int:
        """One decode step; the predicted token."""
        await self.send(kind, position, [token], decode_step=self.step(position), **fields)
        return (await self.reply()).predicted

    async def verify(self, window_id: int, position: int, tokens: Sequence[int], **fields: Any) -> None:
        """Send a verify window."""
        fields = {"current_token": tokens[0] if tokens else -1, **fields}
        step = self.step(position)
        await self.send(
            MessageKind.VERIFY_WINDOW, position, tokens, seq_id=window_id, decode_step=step, **fields
        )

    def step(self, position: int) -> int:
        return position - (self.prompt_tokens - 1)


@contextlib.asynccontextmanager
async def driver_of(cluster: Cluster, index: int = 0, **how: bool) -> AsyncIterator[Driver]:
    """A driver in front of one stage of a cluster; ``how``: as :func:`dial_driver`."""
    async with dial_driver(cluster.stages[index], **how) as driver:
        yield driver


@contextlib.asynccontextmanager
async def dial_driver(stage: Stage, *, plain: bool = False, whole: bool = False) -> AsyncIterator[Driver]:
    """A driver in front of a stage.

    Args:
        plain: one that asks for no admission.
        whole: one that takes all of a cached prefix, or nothing.
    """
    request = attrs.evolve(lane_request(stage), extensions=() if whole else (RESTORE_EXTENSION,))
    link = await dial_stage(stage.context.transport, stage.endpoint, request=None if plain else request)
    try:
        yield Driver(link, stage)
    finally:
        link.close()
