"""The parent's side of the template worker: one process, one job at a time, killed when it misbehaves."""

from __future__ import annotations

import logging
from typing import Any, Final

import attrs
import trio

from skippy.workers.parent import JobFailed, Worker, WorkerFailed

from .errors import ApiError, internal_error

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Jobs that may wait for the worker; a job whose client has left counts until its turn."""


@attrs.define(slots=True, eq=False)
class _Job:
    payload: dict[str, Any]
    done: trio.Event = attrs.field(factory=trio.Event)
    text: str | None = None
    error: ApiError | None = None
    abandoned: bool = False


class TemplateRenderer:
    """Renders chat templates in a worker process that starts with the first job and is kept.

    :meth:`run` must be running for :meth:`render` to be answered.

    Args:
        cpu_secs: processor time of one job; wall time is five times that.
        memory_bytes: the worker's address space.
        max_output_bytes: size of a rendering, in bytes of UTF-8.
    """

    def __init__(self, *, cpu_secs: float, memory_bytes: int, max_output_bytes: int) -> None:
        self._send, self._receive = trio.open_memory_channel[_Job](MAX_WAITING)
        self._worker = Worker(
            "skippy.frontend.template_worker",
            [str(cpu_secs), str(memory_bytes), str(max_output_bytes)],
            cpu_secs=cpu_secs,
            # JSON escapes take at most 12 bytes for the 4 bytes of a character.
            max_reply_bytes=max_output_bytes * 6 + 65536,
        )

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, if one is running."""
        return self._worker.pid

    async def render(self, template: str, context: dict[str, Any]) -> str:
        """The rendered text.

        A cancelled call does not disturb the worker: its answer is read and dropped.

        Raises:
            ApiError: 400 with the template's own message, or that it needed too much time, memory or output;
                429 while MAX_WAITING jobs wait.
        """
        job = _Job({"template": template, "context": context})
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
            await self._worker.stop()

    async def _serve(self, job: _Job) -> None:
        job.error = internal_error()  # unless something better is known below
        try:
            reply = await self._worker.ask(job.payload)
        except WorkerFailed:
            logger.exception("the template worker failed")
        except JobFailed:
            job.error = _template_error("the chat template took too long or too much memory, and was stopped")
        else:
            if "text" in reply:
                # What is no Unicode cannot be tokenised.
                job.text = reply["text"].encode("utf-8", "replace").decode("utf-8")
                job.error = None
            else:
                job.error = _template_error(f"the chat template refused these messages: {reply['error']}")
        finally:
            job.done.set()


def _template_error(message: str) -> ApiError:
    return ApiError(message, param="messages")
