"""A connection to the next stage that is made before it is needed, at most one of a stage at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from skippy.protocol import LIVENESS_EXTENSION, ProtocolError, ReplyDecoder

from .dialing import Admitted
from .errors import StageError
from .framing import receive_reply
from .links import LinkClosed
from .liveness import Liveness
from .writer import LinkWriter

RETRY_SECS = 0.5
"""Pause after a spare could not be made, or has died."""


class _Spare:
    """A connection that nobody uses, and the task that watches it."""

    __slots__ = ("admitted", "alive", "released", "scope", "taken")

    def __init__(self, admitted: Admitted) -> None:
        self.admitted = admitted
        self.scope = trio.CancelScope()
        self.taken = False
        self.alive = False
        self.released = trio.Event()

    async def watch(self, liveness: Liveness) -> None:
        """Return when it is taken, or has ended; only heartbeats may arrive before something was asked."""
        link, extensions = self.admitted
        agreed = LIVENESS_EXTENSION in (extensions or ())
        decoder, writer = ReplyDecoder(heartbeats=agreed), LinkWriter(link)
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(writer.run)
                    with liveness.watch(link, decoder, writer, agreed=agreed):
                        await receive_reply(link, decoder)
                    nursery.cancel_scope.cancel()
            # Half a heartbeat, in either direction, would have to be known to who goes on with it.
            self.alive = self.scope.cancelled_caught and decoder.at_boundary and writer.idle
        except* (LinkClosed, ProtocolError):
            pass
        finally:
            self.released.set()
            if not (self.taken and self.alive):
                link.close()


class WarmSlot:
    """Holds the spare; empty unless :meth:`serve` runs.

    The original keeps a connection on which nothing was said yet. Stages close those after a while, since
    strangers make such ones too, so the spare here is admitted, and with that a promise about the whole chain
    below; whoever takes it can use it at once.
    """

    def __init__(self) -> None:
        self._spare: _Spare | None = None

    async def serve(self, dial: Callable[[], Awaitable[Admitted]], liveness: Liveness) -> None:
        """Make a spare, and another one as soon as it is taken or has ended, until cancelled."""
        while True:
            try:
                spare = self._spare = _Spare(await dial())
            except StageError:
                await trio.sleep(RETRY_SECS)  # the lanes, which dial too, say why
                continue
            try:
                await spare.watch(liveness)
            finally:
                self._spare = None
            if not spare.taken:
                await trio.sleep(RETRY_SECS)

    async def take(self) -> Admitted | None:
        """The spare, which is the caller's from here on; None where there is none that lives.

        Cancelled, the spare is closed.
        """
        spare = self._spare
        if spare is None or spare.taken:
            return None
        spare.taken = True
        spare.scope.cancel()
        try:
            await spare.released.wait()
        except BaseException:
            spare.admitted[0].close()
            raise
        return spare.admitted if spare.alive else None
