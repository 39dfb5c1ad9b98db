"""The parent's side of the template worker: one process, one job at a time, killed when it misbehaves."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from .errors import ApiError, internal_error

logger = logging.getLogger(__name__)

START_SECS: Final = 30.0
# Wall time is a multiple of processor time, so that a busy machine is not mistaken for an endless loop.
WALL_FACTOR: Final = 5.0
MAX_WAITING: Final = 64
"""Jobs that may wait for the worker; a job whose client has left counts until its turn."""
_HEADER_BYTES: Final = 4
# How a worker ends that has used up its processor time.
_OUT_OF_TIME: Final = -signal.SIGPROF if hasattr(signal, "SIGPROF") else None
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])


class _WorkerLost(Exception):
    """The worker ended, or was killed, before it answered."""


class _StartFailed(_WorkerLost):
    """The worker never got ready, so no template is to blame."""


@attrs.define(slots=True, eq=False)
class _Job:
    payload: bytes
    done: trio.Event = attrs.field(factory=trio.Event)
    text: str | None = None
    error: ApiError | None = None
    abandoned: bool = False


class _Worker:
    """A running worker process and its two pipes."""

    def __init__(self, process: trio.Process, max_reply_bytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._max_reply_bytes = max_reply_bytes

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, payload: bytes) -> dict[str, Any]:
        """Send one frame and read its answer. A cancelled call leaves the worker unusable."""
        try:
            await self._stdin.send_all(len(payload).to_bytes(_HEADER_BYTES, "big") + payload)
        except trio.BrokenResourceError:
            raise _WorkerLost from None
        return await self.read()

    async def read(self) -> dict[str, Any]:
        size = int.from_bytes(await self._exactly(_HEADER_BYTES), "big")
        if size > self._max_reply_bytes:
            raise _WorkerLost
        value: dict[str, Any] = json.loads(await self._exactly(size))
        return value

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = await self._stdout.receive_some(count - len(data))
            if not chunk:
                raise _WorkerLost
            data += chunk
        return bytes(data)

    async def kill(self) -> int:
        """End the process and reap it: its exit code. Not cancellable; SIGKILL makes it brief."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            code = await self._process.wait()
            await trio.aclose_forcefully(self._stdin)
            await trio.aclose_forcefully(self._stdout)
        return code


class TemplateRenderer:
    """Renders chat templates in a worker process that starts with the first job and is kept.

    :meth:`run` must be running for :meth:`render` to be answered.

    Args:
        cpu_secs: processor time of one job; wall time is five times that.
        memory_bytes: the worker's address space.
        max_output_bytes: size of a rendering, in bytes of UTF-8.
    """

    def __init__(self, *, cpu_secs: float, memory_bytes: int, max_output_bytes: int) -> None:
        self._cpu_secs = cpu_secs
        self._memory_bytes = memory_bytes
        self._max_output_bytes = max_output_bytes
        self._send, self._receive = trio.open_memory_channel[_Job](MAX_WAITING)
        self._worker: _Worker | None = None

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, if one is running."""
        return None if self._worker is None else self._worker.pid

    async def render(self, template: str, context: dict[str, Any]) -> str:
        """The rendered text.

        A cancelled call does not disturb the worker: its answer is read and dropped.

        Raises:
            ApiError: 400 with the template's own message, or that it needed too much time, memory or output;
                429 while MAX_WAITING jobs wait.
        """
        job = _Job(json.dumps({"template": template, "context": context}).encode("ascii"))
        try:
            self._send.send_nowait(job)
        except trio.WouldBlock:
            text = f"{MAX_WAITING} conversations wait to be rendered; try again when some have been"
            raise ApiError(text, status=429) from None
        try:
            await job.done.wait()
        finally:
            job.abandoned = True
        if job.error is not None:
            raise job.error
        assert job.text is not None
        return job.text

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve jobs until cancelled; no worker process is left behind."""
        task_status.started()
        try:
            async for job in self._receive:
                if not job.abandoned:
                    await self._serve(job)
        finally:
            await self._stop_worker()

    async def _serve(self, job: _Job) -> None:
        job.error = internal_error()  # unless something better is known below
        try:
            reply = await self._ask_twice(job.payload)
        except (OSError, ValueError, _StartFailed):
            logger.exception("the template worker failed")
            await self._stop_worker()
        except (_WorkerLost, trio.TooSlowError):
            await self._stop_worker()
            job.error = _template_error("the chat template took too long or too much memory, and was stopped")
        else:
            if "text" in reply:
                # What is no Unicode cannot be tokenised.
                job.text = reply["text"].encode("utf-8", "replace").decode("utf-8")
                job.error = None
            else:
                job.error = _template_error(f"the chat template refused these messages: {reply['error']}")
            if reply.get("kind") == "memory":
                await self._stop_worker()
        finally:
            job.done.set()

    async def _ask_twice(self, payload: bytes) -> dict[str, Any]:
        """One answer. A worker ended from outside is no fault of the template, which gets a second one."""
        try:
            return await self._ask(payload)
        except _WorkerLost:
            if await self._stop_worker() == _OUT_OF_TIME:
                raise
        return await self._ask(payload)

    async def _ask(self, payload: bytes) -> dict[str, Any]:
        if self._worker is not None and self._worker.has_ended:  # killed from outside while it was idle
            await self._stop_worker()
        worker = self._worker or await self._start_worker()
        with trio.fail_after(self._cpu_secs * WALL_FACTOR):
            return await worker.ask(payload)

    async def _start_worker(self) -> _Worker:
        # Only what Python needs to find its modules: a template must not find secrets in the environment.
        environment = {"PYTHONPATH": os.pathsep.join([_PACKAGE_PARENT, *filter(None, sys.path)])}
        for name in ("PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT"):
            if name in os.environ:
                environment[name] = os.environ[name]
        limits = [str(self._cpu_secs), str(self._memory_bytes), str(self._max_output_bytes)]
        process = await trio.lowlevel.open_process(
            # -P: a jinja2.py in the current directory is not ours.
            [sys.executable, "-P", "-m", "skippy.frontend.template_worker", *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        # JSON escapes take at most 12 bytes for the 4 bytes of a character.
        self._worker = _Worker(process, self._max_output_bytes * 6 + 65536)
        try:
            with trio.fail_after(START_SECS):
                await self._worker.read()
        except trio.TooSlowError:
            raise OSError(f"not ready after {START_SECS:g} s") from None
        except _WorkerLost:
            raise _StartFailed("it ended before it was ready") from None
        return self._worker

    async def _stop_worker(self) -> int | None:
        """End the worker, if there is one: its exit code, or minus the signal that ended it."""
        worker, self._worker = self._worker, None
        return None if worker is None else await worker.kill()


def _template_error(message: str) -> ApiError:
    return ApiError(message, param="messages")
