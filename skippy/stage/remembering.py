"""A session and the prefix cache: what is restored into it, and what stays when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from skippy.protocol import Message, RemoteProtocolError, SessionState

from .restored import RestoreFailed
from .session import StageSession


class RememberedSession(StageSession):
    """A session whose rows may be restored, and are remembered when it ends in good order.

    Instead of :meth:`close` it ends with :meth:`finish` then.

    Where it gives back what was restored it keeps its place among the sessions. The stages behind this one
    may have theirs up to the next message: if that waited here for another session, which waits there for
    this one, none would go on.
    """

    _spare: int | None = None
    """Its place: an empty sequence, while it has none with rows."""

    async def place(self, wanted: int | None = None) -> None:
        if self.sequence is None:
            self.sequence, self._spare = self._spare, None
        await super().place(wanted)

    def _end(self) -> None:
        super()._end()
        if self._spare is not None:
            self._scheduler.release_sequence(self._spare)
            self._spare = None

    @property
    def sliceable(self) -> bool:
        """Whether less of what was restored can be used than was found."""
        return self.holding is not None and self.holding.cache.sliceable

    async def restore(self, tokens: Sequence[int], *, whole: bool) -> int:
        """Look for a prefix of ``tokens`` and take it into the session; returns its length, 0 for a miss.

        What was restored before, with no row behind it, is given back. Call :meth:`complete`, and
        :meth:`settle` with what comes of it, before anything else. Raises as :meth:`StageCache.restore`.

        Raises:
            RemoteProtocolError: the session holds rows of its own.
        """
        holding, had_one = self.holding, self.sequence is not None
        self._give_back()
        if self._machine.length:
            raise RemoteProtocolError(
                f"a prefix is to be restored into a session that holds {self._machine.length} positions"
            )
        if holding is None or holding.off or holding.audit or self.sequence is not None:
            return 0
        spare, self._spare = self._spare, None
        try:
            restored = await holding.restore(tokens, whole=whole, spare=spare)
        except RestoreFailed:
            if had_one or spare is not None:  # which was dropped with what went wrong in it
                self._keep_place()
            raise
        if restored is None:
            self._spare = spare
            if had_one:
                self._keep_place()
            return 0
        if self._closed:
            holding.cache.undo(restored)
            self.check_open()
        self.sequence = restored.sequence
        holding.hold(restored)
        return restored.length

    async def complete(self) -> None:
        """Wait for what :meth:`restore` has found. Raises as :meth:`StageCache.complete`."""
        holding = self.holding
        assert holding is not None
        if holding.restored is not None:
            await holding.cache.complete(holding.restored)

    def settle(self, message: Message, length: int) -> None:
        """The session is to hold ``length`` of the positions restored for ``message``. Never waits.

        Raises:
            LaneLost: it was closed since.
        """
        self.check_open()
        self._machine.restored(message, length)
        assert self.holding is not None
        self._recall(self.holding.restored, length)

    def unrestore(self) -> None:
        """Give back what was restored, if no row has run behind it. Never waits."""
        if self._give_back():
            self._keep_place()

    def _give_back(self) -> bool:
        """:meth:`unrestore`, and the place with it; returns whether there was anything."""
        if self.holding is None or self.holding.restored is None:
            return False
        self.holding.undo()
        self.sequence = None
        if self._machine.state is SessionState.LIVE:
            self._machine.stop()
            self._remember(())
        return True

    def _keep_place(self) -> None:
        if self._spare is None and not self._closed:
            self._spare = self._scheduler.take_sequence()

    def roll_back(self) -> None:
        """Forget also the rows that were run behind what was restored: the session is new. Never waits."""
        self.unrestore()
        if self.holding is not None and self.sequence is not None:
            self.holding.give_back(self.sequence)
            self.sequence = None
            self._machine.stop()
            self._remember(())
            self._keep_place()

    def grow(self, chunk: int, total: int) -> None:
        """A chunk of so many rows has run, of a prompt of ``total``: others may use them. Never waits."""
        if self.holding is not None and self.sequence is not None:
            self.holding.grow(self.sequence, self._native.history, chunk)
            self.holding.checkpoint(self.sequence, self._native.history, total)

    def held_rows(self, message: Message) -> bytes | None:
        """The boundary of a prompt's chunk whose rows the session holds already; None: it must be run."""
        holding, start = self.holding, self._machine.length
        if holding is None or holding.restored is None or message.pos_start not in (-1, start):
            return None
        rows = holding.held_rows(message.tokens, start) if self._runs_next(message) else None
        if rows is not None:
            self._machine.accept(message)
            self._remember(holding.restored.tokens)
        return rows

    def _runs_next(self, message: Message) -> bool:
        return not self._machine.is_stale(message) and message.token_count == len(message.tokens) > 0

    def record_rows(self, rows: memoryview, count: int) -> None:
        """``rows`` are the boundary of the ``count`` rows that were run last. Never waits."""
        if self.holding is not None:
            self.holding.record_rows(self._native.history, rows, count)

    @property
    def alone(self) -> bool:
        """As :attr:`Holding.alone`; of no meaning without a cache."""
        return self.holding is None or self.holding.alone

    async def finish(self) -> None:
        """:meth:`close` in good order: what the session holds is remembered.

        Waits for the engine where rows were given up that may still run, and for an audit. Cancelled then, it
        is still open.
        """
        holding, sequence, work = self.holding, self.sequence, self._work
        if holding is None or sequence is None or holding.restored is not None or work is None:
            self.close()
            return
        if work.over and work.error is None and len(self._native.history) == self._machine.length:
            if holding.audit:
                await holding.compare(sequence, self._native.history)
            if not self._closed:
                self._end()
                holding.keep(sequence, self._native.history)
            return
        if holding.entry is not None:
            held = await self._scheduler.run(lambda engine: engine.length(sequence))
            if not self._closed and holding.entry is not None and holding.entry.length <= held:
                self._end()
                holding.keep_indexed(sequence)
                return
        self.close()
