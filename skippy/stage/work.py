"""The rows of one message on their way through the engine: begun by a lane, batched with those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import trio

from skippy.engine import Segment, StageEngine
from skippy.protocol.waves import Wave

from .errors import RequestFailed

Before = Callable[[StageEngine], None]
"""Engine calls that must come first, in the engine's thread: a trim."""
After = Callable[[StageEngine, int], bool]
"""What follows the rows in the engine's thread, told which of the engine's logits rows is the first of this
work's; it samples and sends. True when the event loop must hear of the end soon."""
Settle = Callable[[Exception | None], None]


class WorkCancelled(RequestFailed):
    """Nobody wanted the rows any more before they ran."""


class Work:
    """Rows of one session, and what follows them.

    It has two sides. The engine's thread takes rows with :meth:`next_segment` and ends it with
    :meth:`finish`; the event loop's thread may :meth:`wait`, :meth:`cancel` and :meth:`settle`. ``settle`` is
    called once, in the event loop's thread, with the exception of the work or None: soon after its end where
    it failed, asked for it, or is waited for; else when somebody asks. Waking the event loop costs more than
    what it would do then, so a work with nothing urgent behind it leaves that to the next message.

    Args:
        segment: all rows; they may run in several slices where at most the last one wants logits.
        output: for the boundary of all rows (non-last stages); stays referenced until the end.
        tokens: of the rows, where they are not the segment's: a last stage's history.
        decodes: the step of a session that generates: it goes before prefill, and its rows belong together.

    Attributes:
        wave: which rows of other sessions it belongs with. Where ``forms_waves`` it is set in the engine's
            thread, before the rows run.
        compute_us: time of the engine for its rows, µs; a batch's time is shared out by rows.
        batch_size: sessions in the native batch that its last row ran in.
        lasting: it may be done :meth:`again`.
        report: called in the event loop's thread before ``settle``, and whenever ``after`` asks for it.
    """

    __slots__ = (
        "_after",
        "_before",
        "_done",
        "_error",
        "_next",
        "_over",
        "_settle",
        "_settled",
        "_urgent",
        "_waiting",
        "batch_size",
        "cancelled",
        "compute_us",
        "decodes",
        "forms_waves",
        "lasting",
        "output",
        "report",
        "segment",
        "tokens",
        "wave",
    )

    def __init__(
        self,
        segment: Segment,
        output: memoryview | None,
        after: After,
        *,
        tokens: Sequence[int] | None = None,
        before: Before | None = None,
        settle: Settle | None = None,
        decodes: bool = False,
        wave: Wave | None = None,
        forms_waves: bool = False,
    ) -> None:
        self.segment = segment
        self.output = output
        self.tokens = segment.tokens if tokens is None else tokens
        self.decodes = decodes
        self.wave = wave
        self.forms_waves = forms_waves
        self.compute_us = 0
        self.batch_size = 0
        self.cancelled = False
        self.report: Callable[[], object] | None = None
        self.lasting = False
        self._next: Segment | None = None
        self._before = before
        self._after: After | None = after
        self._settle = settle
        self._done = 0
        self._error: Exception | None = None
        self._over = False
        self._urgent = False
        self._settled = False
        self._waiting: trio.lowlevel.Task | None = None

    # -- in the engine's thread ------------------------------------------------------------------------

    @property
    def rows_left(self) -> int:
        return self.segment.count - self._done

    @property
    def sliceable(self) -> bool:
        """Whether rows may run without those behind them."""
        return self.segment.logits <= 1

    def prepare(self, engine: StageEngine) -> None:
        """Do what must come before the rows, once."""
        if self._before is not None:
            before, self._before = self._before, None
            before(engine)

    def next_segment(self, rows: int) -> Segment:
        """The next ``rows`` rows; the whole of it where nothing has run and all is taken."""
        whole, start = self.segment, self._done
        if rows == whole.count:
            return whole
        stop = start + rows
        width = 0 if whole.activation is None else len(whole.activation) // whole.count
        return attrs.evolve(
            whole,
            position=whole.position + start,
            count=rows,
            tokens=None if whole.tokens is None else whole.tokens[start:stop],
            activation=None if whole.activation is None else whole.activation[start * width : stop * width],
            logits=whole.logits if stop == whole.count else 0,
        )

    def next_output(self, rows: int) -> memoryview | None:
        """Where the boundary of the next ``rows`` rows goes."""
        if self.output is None:
            return None
        width = len(self.output) // self.segment.count
        return self.output[self._done * width : (self._done + rows) * width]

    def ran(self, engine: StageEngine, rows: int, first_logits: int) -> bool:
        """``rows`` more rows have run. After the last one: what follows, and True as :meth:`finish`."""
        self._done += rows
        if self._done < self.segment.count:
            return False
        assert self._after is not None
        try:
            urgent = self._after(engine, first_logits)
        except Exception as exc:
            return self.finish(exc)
        if self._next is None:
            return self.finish(None, urgent=urgent)
        self.segment, self._next, self._done = self._next, None, 0
        self.tokens = self.segment.tokens
        return urgent

    def repeat(self, segment: Segment) -> None:
        """Called by ``after``: the work goes on with these rows, as if it were another one."""
        self._next = segment

    def again(self, token: int, activation: memoryview | None) -> None:
        """A lasting work of one row, which is over and went well, is to run another one, behind the last."""
        last = self.segment
        self.tokens = (token,)
        self.segment = Segment(
            sequence=last.sequence,
            position=last.position + 1,
            count=1,
            tokens=None if last.tokens is None else self.tokens,
            activation=activation,
            logits=last.logits,
        )
        self._done = 0
        self._settled = self._over = False

    def finish(self, error: Exception | None, *, urgent: bool = True) -> bool:
        """The work is over. True when it must be settled without waiting until somebody asks."""
        self._error = error
        self._urgent = urgent
        if not self.lasting:
            self._after = self._before = None  # they may hold activation buffers
        # In this order here, and in the other one in `wait`: one of the two sides sees the other.
        self._over = True
        return urgent or self._waiting is not None

    # -- in the event loop's thread --------------------------------------------------------------------

    def settle(self) -> bool:
        """Settle the work if it is over and nobody has; False while it is not over. Never waits."""
        if not self._over:
            return False
        if not self._settled:
            self._settled = True
            if self._settle is not None:
                self._settle(self._error)
        return True

    def wake(self) -> None:
        """After :meth:`ran` or :meth:`finish` gave True."""
        if self.report is not None:
            self.report()
        self.settle()
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Wait until the work is over and settled. One task at a time; cancelling it changes nothing."""
        if self.settle():
            return
        self._waiting = trio.lowlevel.current_task()
        if self.settle():
            self._waiting = None
            return

        def give_up(_: Callable[[], object]) -> trio.lowlevel.Abort:
            self._waiting = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def urgent(self) -> bool:
        """Whether the event loop has to hear of its end, once it is over."""
        return self._urgent

    @property
    def error(self) -> Exception | None:
        """Why it failed, once it is over."""
        return self._error


def wake_all(works: Sequence[Work]) -> None:
    """In the event loop's thread: wake each."""
    for work in works:
        work.wake()
