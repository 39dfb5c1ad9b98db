"""A stage's grammars: compiled for a test in a process of their own before they come near the engine."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import trio

from skippy.engine import Vocabulary
from skippy.engine.grammar import Grammar, GrammarVocabulary, special_tokens
from skippy.telemetry import get_logger
from skippy.workers.grammar import check
from skippy.workers.parent import JobFailed, Worker, WorkerFailed

from .errors import RequestFailed, SettingsRefused
from .settings import MAX_GRAMMAR_CHARACTERS

log = get_logger("skippy.stage")

CPU_SECS: Final = 0.5
"""Processor time that compiling a grammar may take; wall time is five times that."""
MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Address space of the process that does it."""
MAX_REMEMBERED: Final = 1024
"""Grammars whose answers are known without asking again."""


MAX_WAITING: Final = 64
"""Grammars that may wait for their turn."""


class GrammarsBusy(RequestFailed):
    """Too many grammars wait to be compiled; nothing is wrong with this one."""


class Grammars:
    """Checks and compiles the grammars that requests bring.

    Args:
        vocabulary: of a first or last stage; None refuses every grammar.
        threads: whether there may be any, and processes; else, on virtual time, it all happens on the event
            loop.
    """

    def __init__(self, vocabulary: Vocabulary | None, *, threads: bool = True) -> None:
        self._vocabulary = vocabulary
        self._threads = threads
        self._worker = Worker(
            "skippy.workers.grammar",
            [str(CPU_SECS), str(MEMORY_BYTES)],
            cpu_secs=CPU_SECS,
            max_reply_bytes=64 * 1024,
        )
        self._asking = trio.Lock()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._compiling = trio.CapacityLimiter(1)
        self._tokens: GrammarVocabulary | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, if one is running."""
        return self._worker.pid

    async def check(self, grammar: str) -> None:
        """Compile a grammar for a test, unless it is known. One is compiled at a time, others wait.

        A cancelled call ends the process that compiles.

        Raises:
            SettingsRefused: what is wrong with it.
            GrammarsBusy: MAX_WAITING others wait already.
            RequestFailed: there is no process to compile it.
        """
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise SettingsRefused(
                f"grammar: it has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            )
        key = hashlib.sha256(grammar.encode()).digest()
        error = self._known.get(key)
        if error is None:
            error = await self._ask_in_turn(key, grammar)
        self._known.move_to_end(key)
        if error:
            raise SettingsRefused(f"grammar: {error}")

    async def _ask_in_turn(self, key: bytes, grammar: str) -> str:
        if self._asking.statistics().tasks_waiting >= MAX_WAITING:
            raise GrammarsBusy(f"{MAX_WAITING} grammars wait to be compiled; try again when some have been")
        async with self._asking:
            error = self._known.get(key)
            if error is None:
                error = self._known[key] = await self._ask(grammar)
                if len(self._known) > MAX_REMEMBERED:
                    self._known.popitem(last=False)
            return error

    async def _ask(self, grammar: str) -> str:
        vocabulary = self._vocabulary
        if vocabulary is None:
            raise SettingsRefused("grammar: this stage has no vocabulary")
        special = list(special_tokens(vocabulary).items())
        job = {"grammar": grammar, "size": vocabulary.size, "special": special}
        try:
            reply = await self._worker.ask(job) if self._threads else check(job)
        except JobFailed as exc:
            # Not remembered: on a busy machine it may be no fault of the grammar.
            raise SettingsRefused(f"grammar: compiling it failed: {exc}") from exc
        except WorkerFailed as exc:
            log.exception("the process that compiles grammars failed")
            raise RequestFailed(f"no grammar can be compiled: {exc}") from exc
        error = reply.get("error", "")
        return error if isinstance(error, str) else "its process gave no answer"

    async def open(self, grammar: str, start: int) -> Grammar:
        """A checked grammar over what follows the first ``start`` tokens of a session.

        Cancellation: a compilation that has begun goes on to its end.

        Raises:
            SettingsRefused, RequestFailed: as :meth:`check`.
        """
        await self.check(grammar)
        try:
            if self._threads:
                return await trio.to_thread.run_sync(self._compile, grammar, start, limiter=self._compiling)
            return self._compile(grammar, start)
        except ValueError as exc:
            raise SettingsRefused(f"grammar: {exc}") from exc

    def _compile(self, grammar: str, start: int) -> Grammar:
        assert self._vocabulary is not None, "the check has failed"
        if self._tokens is None:
            self._tokens = GrammarVocabulary(self._vocabulary)
        return self._tokens.compile(grammar, start)

    async def close(self) -> None:
        """End the process, if there is one. Not cancellable, and brief."""
        await self._worker.stop()


@contextlib.asynccontextmanager
async def open_grammars(vocabulary: Vocabulary | None, *, threads: bool) -> AsyncIterator[Grammars]:
    """The grammars of a stage; leaving the block ends their process."""
    grammars = Grammars(vocabulary, threads=threads)
    try:
        yield grammars
    finally:
        await grammars.close()
