"""The parent's side of a worker process: one job at a time, killed when it misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import trio

from .child import HEADER_BYTES, pack_frame

START_SECS: Final = 30.0
# Wall time is a multiple of processor time, so that a busy machine is not mistaken for an endless loop.
WALL_FACTOR: Final = 5.0
# How a worker ends that has used up its processor time.
_OUT_OF_TIME: Final = -signal.SIGPROF if hasattr(signal, "SIGPROF") else None
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])


class JobFailed(Exception):
    """The job took too much time or memory, and its worker was killed.

    Attributes:
        out_of_time: it has used up its processor time, as it would again. If not, the machine may be busy.
    """

    def __init__(self, text: str, *, out_of_time: bool) -> None:
        super().__init__(text)
        self.out_of_time = out_of_time


class WorkerFailed(Exception):
    """The worker does not start, or answers nonsense: no job is to blame."""


class _WorkerLost(Exception):
    """The worker ended, or was killed, before it answered."""


class _OutOfTime(_WorkerLost):
    """It was its own processor time that ended it."""


class Worker:
    """A process that starts with the first job and is kept; another one follows on one that had to be killed.

    Args:
        module: run with ``python -m``; calls :func:`skippy.workers.child.serve`.
        arguments: of that module.
        cpu_secs: processor time of one job, which the module enforces; wall time is five times that.
        max_reply_bytes: of one answer.
        opening: what the module is told first of all.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cpu_secs: float,
        max_reply_bytes: int,
        opening: dict[str, Any] | None = None,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._cpu_secs = cpu_secs
        self._max_reply_bytes = max_reply_bytes
        self._opening = b"" if opening is None else pack_frame(opening)
        self._process: trio.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, if one is running."""
        return None if self._process is None else self._process.pid

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to one job; one caller at a time. A cancelled call ends the process.

        Raises:
            JobFailed: it took too long or too much memory.
            WorkerFailed: what its text says.
        """
        payload = pack_frame(job)
        try:
            try:
                reply = await self._ask_twice(payload)
            except (_WorkerLost, trio.TooSlowError) as exc:
                text = "it took too long or too much memory, and was stopped"
                raise JobFailed(text, out_of_time=isinstance(exc, _OutOfTime)) from None
            except (OSError, ValueError) as exc:
                raise WorkerFailed(str(exc)) from exc
        except BaseException:
            await self.stop()
            raise
        if reply.get("kind") == "memory":
            await self.stop()
        return reply

    async def stop(self) -> int | None:
        """End the process, if there is one, and reap it: its exit code, or minus the signal that ended it.

        Not cancellable; SIGKILL makes it brief.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with trio.CancelScope(shield=True):
            process.kill()
            code = await process.wait()
            await trio.aclose_forcefully(process.stdin)
            await trio.aclose_forcefully(process.stdout)
        return code

    async def _ask_twice(self, payload: bytes) -> dict[str, Any]:
        """One answer. A worker ended from outside is no fault of the job, which gets a second one."""
        try:
            return await self._ask(payload)
        except _WorkerLost:
            if await self.stop() == _OUT_OF_TIME:
                raise _OutOfTime from None
        try:
            return await self._ask(payload)
        except _WorkerLost:
            raise (_OutOfTime if await self.stop() == _OUT_OF_TIME else _WorkerLost) from None

    async def _ask(self, payload: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:  # killed while it was idle
            await self.stop()
        process = self._process or await self._start()
        with trio.fail_after(self._cpu_secs * WALL_FACTOR):
            assert process.stdin is not None
            try:
                await process.stdin.send_all(payload)
            except trio.BrokenResourceError:
                raise _WorkerLost from None
            return await self._read(process)

    async def _start(self) -> trio.Process:
        # Only what Python needs to find its modules: a job must not find secrets in the environment.
        environment = {"PYTHONPATH": os.pathsep.join([_PACKAGE_PARENT, *filter(None, sys.path)])}
        for name in ("PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT"):
            if name in os.environ:
                environment[name] = os.environ[name]
        self._process = await trio.lowlevel.open_process(
            # -P: a module in the current directory is not ours.
            [sys.executable, "-P", "-m", self._module, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            with trio.fail_after(START_SECS):
                if self._opening:
                    assert self._process.stdin is not None
                    await self._process.stdin.send_all(self._opening)
                await self._read(self._process)
        except trio.TooSlowError:
            raise OSError(f"not ready after {START_SECS:g} s") from None
        except (_WorkerLost, trio.BrokenResourceError):
            raise OSError("it ended before it was ready") from None
        return self._process

    async def _read(self, process: trio.Process) -> dict[str, Any]:
        size = int.from_bytes(await self._exactly(process, HEADER_BYTES), "big")
        if size > self._max_reply_bytes:
            raise _WorkerLost
        value: dict[str, Any] = json.loads(await self._exactly(process, size))
        return value

    async def _exactly(self, process: trio.Process, count: int) -> bytes:
        assert process.stdout is not None
        data = bytearray()
        while len(data) < count:
            chunk = await process.stdout.receive_some(count - len(data))
            if not chunk:
                raise _WorkerLost
            data += chunk
        return bytes(data)
