"""The supervisor of ``skippy run``: keeps the stages of a chain alive, and stops them together."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import trio

from skippy.telemetry import get_logger
from skippy.workers.obituary import UNRETURNED

from .errors import USAGE, CliError
from .launch import Chain, Child, End, Notice, live
from .restarts import RestartPolicy, Restarts
from .stage_lines import StageLine, Warnings
from .statistics import STATISTICS_SIGNAL, answer_statistics_signal, log_statistics, process_statistics

log = get_logger("skippy")

OTHERS_SECS = 1.0
"""How much of the grace period, at most a quarter, the other stages have where stage 0 has not ended."""


class Supervisor:
    """Starts every child, restarts those that crash, and stops all when it is told to or one is given up.

    Args:
        chain: what to run.
        relay: copy all that children write to stderr to this process's stderr; else only their warnings, to
            its log.
        ready: called once, when stage 0, and with it the whole chain, is ready for the first time.
        loading: called when a child's ``loaded`` has changed.

    Attributes:
        unreturned: a child did not stop in order within the grace period.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        relay: bool,
        ready: Callable[[], None],
        loading: Callable[[], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self._chain = chain
        self._relay = relay
        self._warnings = {
            name: Warnings(name) for name in (child.config.stage_id for child in chain.children)
        }
        self._tell_ready = ready
        self._tell_loading = loading
        self._policy = policy or RestartPolicy()
        self._notice = Notice()
        self._down: dict[str, str] = {}
        self._loaded_once: set[str] = set()
        self._was_ready = False
        self._stopping = trio.Event()
        self._deadline = math.inf
        self._front_over = trio.Event()  # of stage 0's last life: a new one for each
        self._failure: CliError | OSError | None = None
        self.unreturned = False

    async def run(self) -> None:
        """Until cancelled; leaving, on any path, leaves no child behind, within the chain's grace period.

        Raises:
            CliError: a child was given up; says which, how it ended, and with which last words.
            OSError: a child's program cannot be started.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_all)
                try:
                    await trio.sleep_forever()
                finally:
                    self._stop()
        finally:
            for child in self._chain.children:
                for sock in child.sockets:
                    sock.close()

    def _stop(self) -> None:
        if not self._stopping.is_set():
            self._deadline = trio.current_time() + self._chain.grace_secs
            self._notice.stopping(self._chain.grace_secs)
            self._stopping.set()

    async def _keep_all(self) -> None:
        """Shielded, so that the children end in order; never for longer than the grace period."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                await nursery.start(answer_statistics_signal, self._tell_statistics)
                async with trio.open_nursery() as keepers:
                    for child in self._chain.children:
                        keepers.start_soon(self._keep, child)
                nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    # -- one stage -------------------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        """Life after life, until the chain stops or the stage is given up."""
        restarts = Restarts(self._policy)
        is_front = child is self._chain.children[0]
        while not self._stopping.is_set():
            if is_front:
                # What was told of the life before says nothing of this one; once the chain stops, it stays.
                self._front_over = trio.Event()
            try:
                end = await live(self._chain, child, self._notice, self, partial(self._end_life, child))
            except OSError as error:
                self._give_up(error)
                break
            if self._stopping.is_set():
                self._check_stopped(child, end)
                break
            before = restarts.in_a_row
            pause = restarts.crashed(end.served_secs or 0.0, served=end.served)
            if pause is None or self._is_hopeless(child, end):
                self._give_up(CliError(self._epitaph(child, end, before)))
                break
            await self._announce_restart(child, end, pause, restarts.in_a_row)
        if is_front:
            self._front_over.set()

    def _check_stopped(self, child: Child, end: End) -> None:
        """Say so if it did not stop in order. (SIGTERM kills one that has not come far.)"""
        stage_id, reason = child.config.stage_id, f"{child.name} {end.words}"
        if end.returncode == UNRETURNED or child.overdue:
            self.unreturned = True
            log.error("a stage did not stop within the grace period", stage_id=stage_id, reason=reason)
        elif end.returncode < 0 and end.returncode != -signal.SIGTERM:
            log.warning("a stage was killed while the chain stopped", stage_id=stage_id, reason=reason)

    def _is_hopeless(self, child: Child, end: End) -> bool:
        """Whether it would end like this again: it never came up, or says that it is configured wrongly."""
        return child.config.stage_id not in self._loaded_once or end.returncode == USAGE

    def _epitaph(self, child: Child, end: End, restarts: int) -> str:
        if child.config.stage_id not in self._loaded_once or not restarts:
            return f"{child.name} {end.words}"
        times = "once" if restarts == 1 else f"{restarts} times in a row"
        return f"{child.name} keeps crashing: it was restarted {times}, then {end.words}"

    async def _announce_restart(self, child: Child, end: End, pause: float, attempt: int) -> None:
        """Say that the stage is down, and why, and wait for as long as the pause lasts."""
        ended = f"{child.name} {end.words}"
        short = ended.partition("\n")[0].removesuffix("; its last lines were:")
        self._set_down(child, f"{short}; it is restarted ({attempt} of {self._policy.max_restarts})")
        log.error(
            "a stage has crashed and is restarted",
            stage_id=child.config.stage_id,
            reason=ended,
            pause_secs=round(pause, 3),
            restart=attempt,
            max_restarts=self._policy.max_restarts,
        )
        with trio.move_on_after(pause):
            await self._stopping.wait()

    def _set_down(self, child: Child, text: str | None) -> None:
        if text is None:
            self._down.pop(child.config.stage_id, None)
        else:
            self._down[child.config.stage_id] = text
        self._notice.set("; ".join(self._down.values()) or None)

    def _give_up(self, failure: CliError | OSError) -> None:
        if self._failure is None and not self._stopping.is_set():
            self._failure = failure
        self._stop()

    async def _end_life(self, child: Child, process: trio.Process) -> None:
        """Once the chain stops, ask the child to stop, the front one first; kill it if it does not."""
        await self._stopping.wait()
        if child is not self._chain.children[0]:
            left = min(OTHERS_SECS, self._chain.grace_secs / 4)
            with trio.CancelScope(deadline=self._deadline - left):
                await self._front_over.wait()
        process.terminate()
        await trio.sleep_until(self._deadline)
        # It may have ended, and only what it wrote is still read.
        if process.returncode is None:
            child.overdue = True
            process.kill()

    # -- as Observer -----------------------------------------------------------------------------------

    def loading(self, child: Child) -> None:
        if not self._was_ready:
            self._tell_loading()

    def serving(self, child: Child) -> None:
        again = child.config.stage_id in self._loaded_once
        self._loaded_once.add(child.config.stage_id)
        self._set_down(child, None)
        if again and child.process is not None:
            log.warning("a stage is up again", stage_id=child.config.stage_id, pid=child.process.pid)

    def ready(self, child: Child) -> None:
        if child is self._chain.children[0] and not self._was_ready:
            self._was_ready = True
            self._tell_ready()

    def alone(self, child: Child) -> None:
        if child is self._chain.children[0]:
            self._front_over.set()

    def statistics(self, counts: dict[str, Any]) -> None:
        log_statistics(counts)

    def line(self, child: Child, line: StageLine) -> None:
        if self._relay:
            click.echo(f"[{child.config.stage_id}] {line.text}", err=True)
        else:
            self._warnings[child.config.stage_id].take(line)

    def _tell_statistics(self) -> None:
        """Log counts of this process, and ask the stages, whose answers come on their status pipes."""
        children = [child for child in self._chain.children if child.alive]
        log_statistics({"stage_id": None, "children": len(children)} | process_statistics())
        for child in children:
            if child.handles_signals and child.process is not None and STATISTICS_SIGNAL is not None:
                child.process.send_signal(STATISTICS_SIGNAL)
