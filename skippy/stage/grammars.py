"""A stage's grammars: compiled for a test in a process of their own before they come near the engine."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import trio

from skippy.engine import Vocabulary
from skippy.engine.grammar import Grammar, GrammarVocabulary, read_tokens
from skippy.telemetry import get_logger
from skippy.workers.grammar import Checker, Tokens
from skippy.workers.parent import JobFailed, Worker, WorkerFailed
from skippy.workers.turns import TooManyWait, Turns

from .errors import RequestFailed, SettingsRefused
from .settings import MAX_GRAMMAR_CHARACTERS

log = get_logger("skippy.stage")

CPU_SECS: Final = 0.5
"""Processor time that compiling a grammar and drawing a little may take; wall time is five times that."""
MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Address space of the process that does it."""
MAX_REMEMBERED: Final = 1024
"""Grammars whose answers are known without asking again."""

MAX_WAITING: Final = 64
"""Grammars that may wait for their turn."""
MAX_WAITING_EACH: Final = 16
"""Of one client."""


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
        self._worker: Worker | None = None
        self._checker: Checker | None = None
        self._turns = Turns(MAX_WAITING, MAX_WAITING_EACH)
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._compiling = trio.CapacityLimiter(1)
        self._reading = trio.Lock()
        self._tokens: Tokens | None = None
        self._compiler: GrammarVocabulary | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, if one is running."""
        return None if self._worker is None else self._worker.pid

    async def get_ready(self) -> None:
        """Do what the first :meth:`open` would: for a tenth of a second nothing else of this process runs.

        On virtual time it does nothing. Cancellation: what has begun goes on to its end.
        """
        if self._vocabulary is None or not self._threads:
            return
        with contextlib.suppress(SettingsRefused):  # which every grammar will be
            tokens = await self._read_tokens()
            await trio.to_thread.run_sync(self._compiler_of, tokens, limiter=self._compiling)

    async def check(self, grammar: str, client: str = "") -> None:
        """Compile a grammar for a test, unless it is known. One is compiled at a time, others wait.

        A cancelled call ends the process that compiles.

        Args:
            client: who asks: those who wait have their turns client by client.

        Raises:
            SettingsRefused: what is wrong with it.
            GrammarsBusy: MAX_WAITING others wait already, or MAX_WAITING_EACH of this client.
            RequestFailed: there is no process to compile it.
        """
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise SettingsRefused(
                f"grammar: it has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            )
        key = _key(grammar)
        error = self._known.get(key)
        if error is None:
            error = await self._ask_in_turn(key, grammar, client)
        self._known.move_to_end(key)
        if error:
            raise SettingsRefused(f"grammar: {error}")

    async def _ask_in_turn(self, key: bytes, grammar: str, client: str) -> str:
        try:
            async with self._turns.turn(client):
                error = self._known.get(key)
                if error is None:
                    error = await self._ask(grammar)
                    self._remember(key, error)
                return error
        except TooManyWait as exc:
            raise GrammarsBusy(f"{exc} for a grammar to be compiled; try again when some have been") from None

    def _remember(self, key: bytes, error: str) -> None:
        self._known[key] = error
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def _ask(self, grammar: str) -> str:
        job = {"grammar": grammar}
        try:
            tokens = await self._read_tokens()
            if not self._threads:
                self._checker = self._checker or Checker(tokens)
                reply = self._checker.answer(job)
            else:
                self._worker = self._worker or Worker(
                    "skippy.workers.grammar",
                    [str(CPU_SECS), str(MEMORY_BYTES)],
                    cpu_secs=CPU_SECS,
                    max_reply_bytes=64 * 1024,
                    opening=tokens.to_json(),
                )
                reply = await self._worker.ask(job)
        except JobFailed as exc:
            error = f"compiling it failed: {exc}"
            if exc.out_of_time:
                return error
            # Not remembered: on a busy machine it may be no fault of the grammar.
            raise SettingsRefused(f"grammar: {error}") from exc
        except WorkerFailed as exc:
            log.exception("the process that compiles grammars failed")
            raise RequestFailed(f"no grammar can be compiled: {exc}") from exc
        error = reply.get("error", "")
        return error if isinstance(error, str) else "its process gave no answer"

    async def _read_tokens(self) -> Tokens:
        vocabulary = self._vocabulary
        if vocabulary is None:
            raise SettingsRefused("grammar: this stage has no vocabulary")
        async with self._reading:
            if self._tokens is None:
                try:
                    if self._threads:
                        self._tokens = await trio.to_thread.run_sync(read_tokens, vocabulary)
                    else:
                        self._tokens = read_tokens(vocabulary)
                except ValueError as exc:
                    raise SettingsRefused(f"grammar: {exc}") from exc
            return self._tokens

    async def open(self, grammar: str, start: int) -> Grammar:
        """A checked grammar over what follows the first ``start`` tokens of a session.

        Cancellation: a compilation that has begun goes on to its end.

        Raises:
            SettingsRefused, RequestFailed: as :meth:`check`.
        """
        await self.check(grammar)
        tokens = await self._read_tokens()
        try:
            if self._threads:
                return await trio.to_thread.run_sync(
                    self._compile, grammar, start, tokens, limiter=self._compiling
                )
            return self._compile(grammar, start, tokens)
        except ValueError as exc:
            raise SettingsRefused(f"grammar: {exc}") from exc

    def _compile(self, grammar: str, start: int, tokens: Tokens) -> Grammar:
        key = _key(grammar)
        return self._compiler_of(tokens).compile(grammar, start, lambda why: self._refuse(key, why))

    def _compiler_of(self, tokens: Tokens) -> GrammarVocabulary:
        if self._compiler is None:
            self._compiler = GrammarVocabulary(tokens)
        return self._compiler

    def _refuse(self, key: bytes, why: str) -> None:
        """From the engine's thread: a grammar has turned out to be too slow."""
        if key in self._known:  # and so the number of those that are known is what it was
            self._known[key] = why

    async def close(self) -> None:
        """End the process, if there is one, and the compiler's thread. Not cancellable, and brief."""
        if self._worker is not None:
            await self._worker.stop()
        if self._compiler is not None:
            self._compiler.close()


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


@contextlib.asynccontextmanager
async def open_grammars(vocabulary: Vocabulary | None, *, threads: bool) -> AsyncIterator[Grammars]:
    """The grammars of a stage; leaving the block ends their process."""
    grammars = Grammars(vocabulary, threads=threads)
    try:
        yield grammars
    finally:
        await grammars.close()
