"""One generation as a task: tokens in, text events out through a bounded channel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

import attrs
import trio

from skippy.engine import Vocabulary
from skippy.stage.nurseries import leaves

from .errors import ApiError, from_generation_error, internal_error
from .generation import FinishReason, GenerationError, GenerationRequest, Generator, Timings
from .text import Detokeniser, StopMatcher

logger = logging.getLogger(__name__)

Outcome = Literal["running", "completed", "failed", "cancelled", "stalled"]

SHUTTING_DOWN: Final = "the server is shutting down"


@attrs.frozen(slots=True)
class Usage:
    """Token counts of a finished generation.

    ``completion_tokens`` counts every generated token, also those whose text a stop string swallowed, but not
    the end-of-generation token. ``cached_tokens`` of the prompt were not computed for it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class GenerationTask:
    """Owns one generation from prompt to last token.

    Start :meth:`run` in the nursery of the client's connection, wait for :meth:`started`, then read
    :attr:`events` to their end and look at :attr:`error` and :attr:`finish_reason`. The lane is free as soon
    as the generation ends, whether or not its events have been read.

    Args:
        prepare: makes the request, in this task; an ApiError from it is the generation's.
        stall_secs: a reader that leaves a full channel alone for this long loses the generation.
        buffer: events the channel holds.

    Attributes:
        express: takes a piece of text in place of a reader that waits for one, which saves the switch to the
            reader's task with every token. False: the reader must go on, and gets an empty piece.
        timings: of the generation, complete once it has ended.
        finishing: all tokens have come; what is left is to hand the last text over.
    """

    def __init__(
        self,
        generator: Generator,
        prepare: Callable[[], Awaitable[GenerationRequest]],
        stops: Sequence[str],
        *,
        stall_secs: float,
        buffer: int,
    ) -> None:
        self._generator = generator
        self._prepare = prepare
        self._prompt_tokens = 0
        self._vocabulary: Vocabulary = generator.vocabulary
        self._detokeniser = Detokeniser()
        self._matcher = StopMatcher(stops)
        self._stall_secs = stall_secs
        self._send, self._receive = trio.open_memory_channel[str | None](buffer)
        self._scope = trio.CancelScope()
        self._begun = trio.Event()
        self._pause = trio.lowlevel.ParkingLot()
        self._generated = 0
        self.express: Callable[[str], bool] | None = None
        self.outcome: Outcome = "running"
        self.finish_reason: FinishReason | None = None
        self.error: ApiError | None = None
        self.timings = Timings()
        self.finishing = False

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._generated, self.timings.cached_tokens)

    @property
    def begun(self) -> bool:
        """Whether there has been a token, or an end without one."""
        return self._begun.is_set()

    async def wait_begun(self, secs: float) -> None:
        """Wait for :attr:`begun` to come true, but only for ``secs`` or until :meth:`probe`."""
        if not self.begun:
            with trio.move_on_after(secs):
                await self._pause.park()

    async def started(self) -> None:
        """Wait for the first token, or for the end if there is none.

        Raises:
            ApiError: the generation failed before its first token.
        """
        await self._begun.wait()
        if self.error is not None and self._generated == 0:
            raise self.error

    @property
    def events(self) -> trio.MemoryReceiveChannel[str | None]:
        """Pieces of text; an empty one says that :attr:`express` has left something to the reader.

        None: nothing has come for a while (:meth:`keep_alive`). Ends with the generation, however that ends.
        """
        return self._receive

    def shut_down(self) -> None:
        """End the generation with an error that says why. Does not wait."""
        if self.outcome == "running":
            self.error = ApiError(SHUTTING_DOWN, status=503)
            self._scope.cancel()

    async def run(self) -> None:
        """Run to the end. Never raises but for cancellation from outside; that frees the lane too."""
        try:
            with self._scope:
                await self._generate()
            if self.outcome == "running":
                self.outcome = "cancelled"
        except Exception as error:
            self.outcome, self.error = "failed", _shown(error)
        finally:
            if self.outcome == "running":
                self.outcome = "cancelled"
            if self.outcome == "cancelled" and self.error is None:
                self.error = ApiError("the request was cancelled", status=500, code="cancelled")
            self._begin()
            self._send.close()

    async def keep_alive(self, secs: float) -> None:
        """Tell the reader, after its first token, of each ``secs`` in which none came; until cancelled."""
        generated = 0
        while True:
            await trio.sleep(secs)
            if generated == self._generated > 0:
                self.probe()
            generated = self._generated

    def probe(self) -> None:
        """Tell a reader that has nothing to do that nothing has come; also one in :meth:`wait_begun`."""
        if not self.begun:
            self._pause.unpark_all()
        elif not self._send.statistics().current_buffer_used:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                self._send.send_nowait(None)

    async def _generate(self) -> None:
        with self._generator.preparing():
            request = await self._prepare()
            self._prompt_tokens = len(request.prompt)
        async with self._generator.generate(request) as stream:
            stream.express, self.timings = self._take_now, stream.timings
            async for token in stream:
                self._generated += 1
                if not self.begun:
                    self._begin()
                text = self._detokeniser.feed(self._vocabulary.piece(token))
                if not await self._emit(self._matcher.feed(text)):
                    return
                if self._matcher.stopped:
                    break
            if not self._matcher.stopped:
                self.finish_reason = stream.finish_reason
        self.finishing = True
        if not self._matcher.stopped:
            rest = self._matcher.feed(self._detokeniser.finish()) + self._matcher.finish()
            if not await self._emit(rest):
                return
        if self._matcher.stopped:
            self.finish_reason = "stop"
        if self.finish_reason is None:
            raise RuntimeError("the token stream ended without a finish reason")
        self.outcome = "completed"

    def _begin(self) -> None:
        self._begun.set()
        self._pause.unpark_all()

    def _take_now(self, token: int) -> bool:
        """Take a token in place of :meth:`_generate`; False, and nothing has happened, where that must."""
        if self.express is None or self._matcher.seeks or not self._reader_waits:
            return False
        text = self._detokeniser.feed(self._vocabulary.piece(token))
        self._generated += 1
        if text and not self.express(text):
            self._send.send_nowait("")
        return True

    @property
    def _reader_waits(self) -> bool:
        """Whether the reader has taken all there was, and waits."""
        return self._send.statistics().tasks_waiting_receive > 0

    async def _emit(self, text: str) -> bool:
        """Hand over a piece of text; False if the reader has stalled or is gone: the generation must end."""
        if not text:
            return True
        if self.express is not None and self._reader_waits:
            if self.express(text):
                return True
            text = ""
        try:
            self._send.send_nowait(text)
            return True
        except trio.WouldBlock:
            pass
        except trio.BrokenResourceError:
            self.outcome = "cancelled"
            return False
        with trio.move_on_after(self._stall_secs):
            await self._send.send(text)
            return True
        self.outcome = "stalled"
        self.error = ApiError("the client stopped reading its stream", status=408)
        return False


def _shown(error: BaseException) -> ApiError:
    """What the client is told, also out of the groups that nurseries wrap errors in."""
    for leaf in leaves(error):
        if isinstance(leaf, ApiError):
            return leaf
        if isinstance(leaf, GenerationError):
            return from_generation_error(leaf)
    logger.error("a generation failed", exc_info=error)
    return internal_error()
