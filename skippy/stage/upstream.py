"""An accepted connection: its handshake, its role, and for a lane its reader, executor and reply writer."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import trio

from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    RESTORE_EXTENSION,
    WAVES_EXTENSION,
    ConnectionRole,
    ListenerHandshake,
    Message,
    MessageDecoder,
    MessageKind,
    ProtocolError,
    RemoteProtocolError,
    encode_annexed_reply,
    encode_reply,
    estimated_wire_bytes,
)
from skippy.telemetry import Level, names

from .context import HANDSHAKE_SECS, LAST_WORDS_SECS, StageContext, log
from .errors import DownstreamRefused, LaneLost, StageError
from .framing import FRAME_SECS, receive_message, send_frame
from .lane import Lane
from .links import Link, LinkClosed
from .liveness import Pulse
from .memory import FrameMemory
from .nurseries import leaves
from .queues import PendingReply
from .reasons import encode_reason
from .turns import take_turns
from .writer import LinkWriter

MAX_DROPPED_BYTES = 64 * 1024 * 1024
"""What a peer may still send while it is told why its connection ends."""
MAX_QUEUED_REPLIES = 64
NO_TOKEN = "showed no link token"
SAME_TOKEN = "; all stages need the same token (--link-token-file)"
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Activation bytes that received, not yet executed frames of one lane may hold."""


async def serve_connection(
    context: StageContext, link: Link, on_admitted: Callable[[], object] = lambda: None
) -> None:
    """Serve one accepted link until either side ends it. Failures of the connection stay in it.

    ``on_admitted`` is called, perhaps more than once, when the peer has shown that it belongs to the chain.
    """
    replies = _ReplyChannel(link)
    try:
        try:
            with contextlib.closing(FrameMemory(context.frame_budget)) as memory:
                await _serve(context, link, memory, replies, on_admitted)
        except* (LinkClosed, ProtocolError, StageError) as group:
            context.telemetry.emit(
                names.STAGE_BINARY_CONNECTION_ERROR, peer_addr=link.peer, error=_texts(group)
            )
            await _tell_why(link, replies, group)
    except* Exception as group:
        # A fault of ours: it must not take the other connections with it, and must not stay unseen.
        context.telemetry.emit(
            names.STAGE_CONNECTION_WORKER_PANIC, failure_contained=True, error=_texts(group)
        )
        log.error("connection failed by a fault of this program", peer=link.peer, exc_info=group)
    finally:
        link.close()


async def _tell_why(link: Link, replies: _ReplyChannel, group: BaseException) -> None:
    """Send why the request, or the lane, has failed ahead of the end, where the annex was agreed."""
    failure = next((exc for exc in leaves(group) if isinstance(exc, StageError)), None)
    if failure is None or not replies.annexed or not replies.writer.idle:
        return
    await _say_last(link, encode_reason(replies.request_id, failure))


async def _say_last(link: Link, data: bytes) -> None:
    """Send what explains the end of a connection, and let the peer be the one that closes it.

    Closing a TCP connection with data that was not read resets it, and a reset may overtake what was sent
    before it. So what the peer still sends is read and dropped, within LAST_WORDS_SECS and MAX_DROPPED_BYTES.
    """
    with trio.move_on_after(LAST_WORDS_SECS), contextlib.suppress(LinkClosed):
        await link.send([data])
        scratch, dropped = memoryview(bytearray(64 * 1024)), 0
        while dropped < MAX_DROPPED_BYTES and (count := await link.receive_into(scratch)):
            dropped += count


async def _serve(
    context: StageContext,
    link: Link,
    memory: FrameMemory,
    replies: _ReplyChannel,
    on_admitted: Callable[[], object],
) -> None:
    plain_too = context.options.allow_plain_generation_8
    handshake = ListenerHandshake(context.token, context.admission.loaded, allow_plain=plain_too)
    await _authenticate(context, link, handshake)
    if context.token is not None:
        on_admitted()  # before the wait for the stages below
    async with trio.open_nursery() as nursery:
        # Ready is a promise about the whole chain below, so the chain comes first. Stage 0 cannot do so:
        # what connects to it may be a return stream, which needs no chain.
        lane = None
        if context.stage_index > 0:
            lane = await _open_chain(context, replies, nursery, handshake)
        if lane is not None and plain_too:
            on_admitted()  # before the wait for a frame that may come much later
        await _admit(context, link, handshake)
        replies.annexed = ANNEX_EXTENSION in handshake.extensions
        heartbeats = LIVENESS_EXTENSION in handshake.extensions
        if heartbeats:
            replies.writer.accept_secs = min(FRAME_SECS, context.liveness.timeout_secs)
        decoder = _decoder_after(handshake, context, memory)
        nursery.start_soon(replies.writer.run)
        watch = functools.partial(context.liveness.watch, link, writer=replies.writer, agreed=heartbeats)
        context.telemetry.emit(
            names.STAGE_CONNECTION_SETUP_READY, peer_addr=link.peer, downstream_agreed=lane is not None
        )
        if handshake.request is not None:
            on_admitted()
        with watch(decoder, memory=memory) as pulse:
            # A lane may stay idle for as long as it likes; a return stream says at once whose it is.
            patience = HANDSHAKE_SECS if lane is None else math.inf
            first = await _receive_first(link, handshake, decoder, memory, patience)
            on_admitted()
            pulse.reading = False
            returns = lane is None and first is not None and first.kind is MessageKind.PREDICTION_RETURN_OPEN
            if first is not None and not returns:
                nursery.start_soon(_write_replies, context, replies)
                lane = lane or await _open_lane(context, replies, nursery)
                _meet_peer(lane, handshake)
                await _execute(context, link, lane, decoder, first, memory, replies, pulse)
        if first is not None and returns:
            await context.hub.serve(
                link,
                decoder,
                first,
                watch,
                annexed=replies.annexed,
                heartbeats=heartbeats,
                plain=handshake.request is None,
            )
        nursery.cancel_scope.cancel()


async def _open_lane(context: StageContext, replies: _ReplyChannel, nursery: trio.Nursery) -> Lane:
    """A lane that is run in ``nursery``, and ends it."""
    lane = Lane(context, replies)
    await nursery.start(lane.run)
    nursery.start_soon(_end_with_lane, lane)
    return lane


async def _open_chain(
    context: StageContext, replies: _ReplyChannel, nursery: trio.Nursery, handshake: ListenerHandshake
) -> Lane | None:
    """A lane through all stages below; None where they do not admit each other, which the peer is told."""
    try:
        return await _open_lane(context, replies, nursery)
    except DownstreamRefused as exc:
        if context.options.allow_plain_generation_8:
            raise  # a plain peer would take the ready word as the promise that it is
        handshake.refuse("downstream", "stages below that admit each other", str(exc))
        return None


async def _authenticate(context: StageContext, link: Link, handshake: ListenerHandshake) -> None:
    """Complete the link, and read the preamble where a token is asked for, all within HANDSHAKE_SECS."""
    missing = "did not finish the handshake of its link"
    with trio.move_on_after(HANDSHAKE_SECS):
        await link.handshake()
        missing = NO_TOKEN
        while not handshake.authenticated:
            await _receive(context, link, handshake)
        return
    if missing == NO_TOKEN:
        context.refusals.tell(link.peer, NO_TOKEN + SAME_TOKEN)
    raise LinkClosed(f"{link.peer} {missing} within {HANDSHAKE_SECS:g} s")


async def _admit(context: StageContext, link: Link, handshake: ListenerHandshake) -> None:
    """Say that this stage is ready, and answer the peer's admission request.

    A peer that only knows the ready word, where such are allowed, may say nothing until it has a request.
    """
    await send_frame(link, [handshake.data_to_send()], HANDSHAKE_SECS)
    may_be_plain = context.options.allow_plain_generation_8 and context.stage_index > 0
    with trio.move_on_after(math.inf if may_be_plain else HANDSHAKE_SECS):
        while not handshake.admitted:
            await _receive(context, link, handshake)
            if answer := handshake.data_to_send():
                await link.send([answer])
        context.refusals.forget(link.peer)
        return
    raise LinkClosed(f"{link.peer} did not ask for admission within {HANDSHAKE_SECS:g} s")


async def _receive(context: StageContext, link: Link, handshake: ListenerHandshake) -> None:
    """Feed the handshake; a peer that is refused is told why, where it may know."""
    buffer = bytearray(4096)
    count = await link.receive_into(memoryview(buffer))
    if count == 0:
        raise LinkClosed(f"{link.peer} closed the connection during the handshake")
    try:
        handshake.receive_data(buffer[:count])
    except RemoteProtocolError as exc:
        context.refusals.tell(link.peer, str(exc) if handshake.authenticated else f"{exc}{SAME_TOKEN}")
        if answer := handshake.data_to_send():
            await _say_last(link, answer)
        raise RemoteProtocolError(f"{link.peer}: {exc}") from exc


def _decoder_after(
    handshake: ListenerHandshake, context: StageContext, memory: FrameMemory
) -> MessageDecoder:
    """What reads the messages behind the handshake, the first of which may have come with it."""
    decoder = MessageDecoder(
        context.info.input_width,
        max_activation_bytes=context.max_activation_bytes,
        max_state_import_bytes=0,
        allocate=memory.allocate,
        heartbeats=LIVENESS_EXTENSION in handshake.extensions,
    )
    decoder.receive_data(handshake.trailing_data)
    return decoder


async def _receive_first(
    link: Link, handshake: ListenerHandshake, decoder: MessageDecoder, memory: FrameMemory, patience: float
) -> Message | None:
    """The first message, which must be of the role that the peer was admitted in; None at the end of stream.

    Raises LinkClosed if there is none within ``patience`` seconds, RemoteProtocolError if it is of another.
    """
    with trio.move_on_after(patience) as scope:
        first = await receive_message(link, decoder, memory)
    if scope.cancelled_caught:
        raise LinkClosed(f"{link.peer} sent no message within {patience:g} s")
    request = handshake.request
    if first is None or request is None:
        return first
    opens = first.kind is MessageKind.PREDICTION_RETURN_OPEN
    if opens is not (request.role is ConnectionRole.RETURN):
        raise RemoteProtocolError(
            f"{link.peer} was admitted in the role {request.role.value!r}, but starts with {first.kind.name}"
        )
    return first


def _meet_peer(lane: Lane, handshake: ListenerHandshake) -> None:
    """Tell the lane what the peer upstream of it can do."""
    if handshake.request is None:
        lane.meet_plain_peer()
    if RESTORE_EXTENSION not in handshake.extensions:
        lane.meet_whole_restores()
    if WAVES_EXTENSION in handshake.extensions:
        lane.meet_waves()


async def _end_with_lane(lane: Lane) -> None:
    """Raise the lane's failure when it ends, idle or not: whoever is upstream must not count on it."""
    await lane.wait_ended()
    raise lane.failure or LaneLost("the lane ended")


async def _execute(
    context: StageContext,
    link: Link,
    lane: Lane,
    decoder: MessageDecoder,
    first: Message,
    memory: FrameMemory,
    replies: _ReplyChannel,
    pulse: Pulse,
) -> None:
    """Read ahead, within bounds, and execute in order; returns at the end of the peer's stream.

    An end of stream while a request is live drops what was read ahead and raises LinkClosed.
    """
    unhandled = 1
    pulse.live = first.kind is not MessageKind.STOP

    async def read() -> Message | None:
        nonlocal unhandled
        pulse.reading = True
        with context.telemetry.span(names.STAGE_BINARY_RECV, level=Level.DEBUG, peer=link.peer) as span:
            message = None
            if not unhandled and (relay := lane.open_relay(link, decoder, memory)) is not None:
                pulse.live = False  # a relay that brings no frames ends soon
                message = await relay.run()
                pulse.live = pulse.moved = True
            if message is None:
                message = await receive_message(link, decoder, memory)
            if message is not None:
                unhandled += 1
                if context.telemetry.enabled(Level.DEBUG):
                    span["message_kind"] = message.kind.name
                    span["activation_bytes"] = len(message.activation)
                    span["message_wire_bytes"] = estimated_wire_bytes(message)
                pulse.live = message.kind is not MessageKind.STOP
                pulse.moved = True
            elif pulse.live:
                # Nobody wants the rest, and the lane may be waiting for a stalled downstream.
                raise LinkClosed(f"{link.peer} closed the connection while a request was live")
        pulse.reading = False
        return message

    async def handle(message: Message) -> None:
        nonlocal unhandled
        replies.request_id = message.request_id
        await lane.handle(message)
        unhandled -= 1
        memory.release(len(message.activation))

    def handle_now(message: Message) -> bool:
        nonlocal unhandled
        if not lane.handle_now(message):
            return False
        unhandled -= 1
        replies.request_id = message.request_id
        # The frame may still be with the engine. Its few kilobytes are all that is given back early.
        memory.release(len(message.activation))
        return True

    await take_turns(read, handle, first=first, ahead=_frames_ahead(context), handle_now=handle_now)


def _frames_ahead(context: StageContext) -> int:
    """How many frames of a lane may be received and not yet executed."""
    frames = context.options.max_inflight
    if not context.max_activation_bytes:
        return frames
    return max(1, min(frames, MAX_QUEUED_BYTES // context.max_activation_bytes))


class _ReplyChannel:
    """Owed replies on their way to the writer task.

    Attributes:
        annexed: the reply annex was agreed on this connection.
        writer: what sends them; the only sender on an upstream link once it is ready.
        request_id: of the message executed last.
    """

    def __init__(self, link: Link) -> None:
        self.annexed = False
        # Whoever waits for replies does nothing else, so these must be taken at once.
        self.writer = LinkWriter(link, accept_secs=FRAME_SECS)
        self.request_id = 0
        self._send, self._receive = trio.open_memory_channel[PendingReply](MAX_QUEUED_REPLIES)

    async def put(self, reply: PendingReply) -> None:
        await self._send.send(reply)

    @property
    def full(self) -> bool:
        return self._send.statistics().current_buffer_used >= MAX_QUEUED_REPLIES

    def put_nowait(self, reply: PendingReply) -> None:
        self._send.send_nowait(reply)

    async def get(self) -> PendingReply:
        return await self._receive.receive()


async def _write_replies(context: StageContext, replies: _ReplyChannel) -> None:
    """Send each reply, whole, before the next one is waited for, which may fail."""
    while True:
        place = await replies.get()
        reply = await place.wait()
        data = encode_reply(reply) if place.annex is None else encode_annexed_reply(reply, place.annex)
        with context.telemetry.span(
            names.STAGE_BINARY_UPSTREAM_REPLY_WRITE,
            reply_kind=reply.kind.name,
            predicted_token_count=len(reply.predicted_tokens),
            reply_wire_bytes=len(data),
        ):
            replies.writer.put([data])
            await replies.writer.wait_flushed()


def _texts(group: BaseException) -> str:
    return "; ".join(dict.fromkeys(map(str, leaves(group))))
