"""What one stage observes on one lane, until a reply may carry it.

An early ACK leaves before anything was computed, and predictions pass by the stages in between. So what
was observed waits for the next reply that carries statistics.
"""

from __future__ import annotations

from typing import Final

import attrs

from skippy.protocol import EMPTY_STATS, Message, MessageKind, Reply, ReplyStats
from skippy.protocol.stats import merge, observe_compute, observe_edge_transport, observe_verify_window

from .clock import microseconds

OBSERVED: Final = frozenset(
    {MessageKind.PREFILL_EMBD, MessageKind.PREFILL_FINAL_EMBD, MessageKind.VERIFY_WINDOW}
)
"""Kinds that the statistics speak of. Decode steps are not among them, and cost nothing here."""


@attrs.define(slots=True)
class Times:
    """How one frame's time on a stage was spent, in µs.

    Attributes:
        write_us: handing the frame over, waiting for room included.
        wait_us: waiting for what the next stage owes: credit, or a prediction.
        sent_at: when the frame was handed over.
    """

    compute_us: int = 0
    write_us: int = 0
    wait_us: int = 0
    sent_at: int = 0


@attrs.define(slots=True)
class PromptTimes:
    """What the prefill chunks of one request took one stage, in µs, together.

    Attributes:
        request_id: of ConfigureGeneration.
        write_us, wait_us: handing chunks to the next stage, and waiting for room to send more.
        activation_bytes: what was handed on.
    """

    request_id: int = 0
    chunks: int = 0
    tokens: int = 0
    compute_us: int = 0
    write_us: int = 0
    wait_us: int = 0
    activation_bytes: int = 0

    def add(self, frame: Message, times: Times, *, sent: bool) -> None:
        """Count one more, which was handed on where ``sent``."""
        self.chunks += 1
        self.tokens += frame.token_count
        self.compute_us += times.compute_us
        self.write_us += times.write_us
        self.wait_us += times.wait_us
        self.activation_bytes += len(frame.activation) if sent else 0


@attrs.define(slots=True)
class LastPrompt:
    """The prompt that a stage has computed a chunk of last; None before the first."""

    times: PromptTimes | None = None


class LaneStats:
    """The observations that no reply has carried yet.

    Args:
        last: is told of the prompts on this lane.
    """

    def __init__(self, stage_index: int, last: LastPrompt | None = None) -> None:
        self._stage_index = stage_index
        self._last = LastPrompt() if last is None else last
        self._prompt = PromptTimes()
        self._pending = EMPTY_STATS
        self._request = EMPTY_STATS
        self._times: Times | None = None

    def begin_request(self, request_id: int) -> None:
        """What is observed from here on is of another request."""
        self._prompt = PromptTimes(request_id)

    def measure(self, message: Message) -> Times | None:
        """To be filled in while ``message`` is carried out; None where its kind is not observed."""
        self._times = Times() if message.kind in OBSERVED else None
        return self._times

    def take_times(self) -> Times | None:
        """How the time of the message that was carried out last was spent, where that was observed; once."""
        times, self._times = self._times, None
        return times

    def add(self, stats: ReplyStats) -> None:
        """Statistics of an acknowledgement that ends here."""
        if stats is not EMPTY_STATS:
            self._pending = merge(self._pending, stats)

    def take(self, below: ReplyStats = EMPTY_STATS) -> ReplyStats:
        """All that is pending, merged with what a later stage's reply says; nothing is pending then."""
        pending, self._pending = self._pending, EMPTY_STATS
        if pending is EMPTY_STATS and below is EMPTY_STATS:
            return below
        stats = below if pending is EMPTY_STATS else merge(pending, below)
        if self._stage_index == 0:
            self._request = merge(self._request, stats)
        return stats

    def take_request(self) -> ReplyStats:
        """Stage 0: all that replies have carried since this was asked last."""
        request, self._request = self._request, EMPTY_STATS
        return request

    def complete(self, reply: Reply) -> Reply:
        """A reply that has come up to this stage, with what is pending here."""
        stats = self.take(reply.stats)
        return reply if stats is reply.stats else attrs.evolve(reply, stats=stats)

    def complete_window(self, message: Message, times: Times, reply: Reply) -> Reply:
        """As ``complete``, for a verify window whose answer this stage has waited for."""
        times.wait_us = microseconds() - times.sent_at
        self.observe(message, times, sent=True)
        return self.complete(reply)

    def observe(self, frame: Message, times: Times, *, sent: bool) -> None:
        """A frame of an :data:`OBSERVED` kind was carried out, and passed on where ``sent``."""
        index, count, stats = self._stage_index, frame.token_count, self._pending
        if frame.kind is MessageKind.VERIFY_WINDOW:
            stats = observe_verify_window(stats, times.compute_us, times.write_us, times.wait_us, count)
        else:
            self._prompt.add(frame, times, sent=sent)
            self._last.times = self._prompt
            stats = observe_compute(stats, index, times.compute_us, count)
            if sent:
                stats = observe_edge_transport(
                    stats, index, times.write_us, times.wait_us, len(frame.activation)
                )
        self._pending = stats
