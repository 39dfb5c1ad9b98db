"""Chat and completion requests, from raw body to response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import attrs
import trio
from quart import Response

from skippy.engine.sampling import check_settings
from skippy.telemetry import NULL_TELEMETRY, Level, Span, names

from .direct import DirectBody
from .errors import ApiError
from .generation import GenerationRequest, Generator
from .namespaces import cache_namespace
from .options import FrontendOptions
from .prompting import PromptBuilder, check_token_ids
from .responses import (
    DONE_EVENT,
    KEEP_ALIVE,
    ChatShape,
    CompletionShape,
    ResponseShape,
    dump,
    error_event,
    event,
    timings_object,
)
from .running import SHUTTING_DOWN, GenerationTask
from .schemas import CommonRequest, check_model, parse_chat, parse_completion
from .templates import TemplateRenderer

R = TypeVar("R", bound=CommonRequest)

# Larger bodies are parsed in a thread, so that they hold up nobody's stream.
_INLINE_PARSE_BYTES: Final = 64 * 1024


@attrs.frozen(slots=True, kw_only=True)
class Caller:
    """Who asks: the nursery of the connection, the request's id, a shorter way to the client, the API key."""

    nursery: trio.Nursery
    request_id: str
    direct: DirectBody | None = None
    credentials: str | None = attrs.field(default=None, repr=False)


class CompletionService:
    """Serves the two generating routes.

    A generation runs as a task in the nursery of its client's connection, so it ends when the client leaves.
    One that has asked and then closes only its own side of the connection gets its whole answer.
    """

    def __init__(self, generator: Generator, options: FrontendOptions) -> None:
        self._generator = generator
        self._options = options
        self._telemetry = options.telemetry or NULL_TELEMETRY
        self._parse_limiter = trio.CapacityLimiter(1)
        self._running: set[GenerationTask] = set()
        self._closing = False
        self.model_id = generator.model_id
        self.renderer = TemplateRenderer(
            cpu_secs=options.template_cpu_secs,
            memory_bytes=options.template_memory_bytes,
            max_output_bytes=options.max_prompt_bytes,
        )
        self._prompts = PromptBuilder(generator.vocabulary, self.renderer, self._telemetry)

    @property
    def unready(self) -> str | None:
        """Why no generation can start now, for clients; None while one can."""
        return SHUTTING_DOWN if self._closing else self._generator.unready

    def refuse(self) -> None:
        """Answer new requests with 503 from now on."""
        self._closing = True

    def shut_down(self) -> None:
        """End all generations with an error; refuse new ones. Does not wait."""
        self.refuse()
        for task in self._running:
            task.shut_down()

    async def chat(self, body: bytes, caller: Caller) -> Response:
        """Answer ``POST /v1/chat/completions``.

        Raises:
            ApiError: anything that goes wrong before the first token.
        """
        request = await self._parse(parse_chat, body)

        async def prepare() -> GenerationRequest:
            with self._preparing(caller):
                prompt = await self._prompts.chat(request.messages)
            return self._generation_request(request, prompt, "messages", caller)

        shape = ChatShape(self.model_id, include_usage=request.include_usage)
        return await self._answer(request, prepare, shape, caller)

    async def completion(self, body: bytes, caller: Caller) -> Response:
        """Answer ``POST /v1/completions``. Raises as :meth:`chat` does."""
        request = await self._parse(parse_completion, body)

        async def prepare() -> GenerationRequest:
            with self._preparing(caller):
                if isinstance(request.prompt, str):
                    prompt = await self._prompts.text(request.prompt)
                else:
                    check_token_ids(request.prompt, self._generator.vocabulary)
                    prompt = list(request.prompt)
            return self._generation_request(request, prompt, "prompt", caller)

        shape = CompletionShape(self.model_id, include_usage=request.include_usage)
        return await self._answer(request, prepare, shape, caller)

    def _preparing(self, caller: Caller) -> Span:
        return self._telemetry.span(names.STAGE_OPENAI_PROMPT_PREPARE, request_id=caller.request_id)

    async def _parse(self, parse: Callable[[bytes], R], body: bytes) -> R:
        if len(body) <= _INLINE_PARSE_BYTES:
            request = parse(body)
        else:
            request = await trio.to_thread.run_sync(parse, body, limiter=self._parse_limiter)
        check_model(request.model, self.model_id)
        if request.cache_retention == "24h" and not self._options.keeps_prompts_on_disk:
            text = (
                "prompt_cache_retention is '24h', but prompts are kept in memory only here; use 'in_memory'"
            )
            raise ApiError(text, param="prompt_cache_retention", code="unsupported_model_feature")
        size = self._generator.vocabulary.size
        for token, _ in request.sampling.logit_bias:
            if token >= size:
                text = f"logit_bias has token id {token}; this model's token ids are 0 to {size - 1}"
                raise ApiError(text, param="logit_bias")
        try:
            # What the last stage would refuse; found out here, it costs no lane.
            check_settings(request.sampling, size)
        except ValueError as error:
            raise ApiError(str(error)) from error
        return request

    def _generation_request(
        self, request: CommonRequest, prompt: list[int], param: str, caller: Caller
    ) -> GenerationRequest:
        if not prompt:
            raise ApiError("the prompt has no tokens", param=param)
        context = self._generator.context_length
        room = context - len(prompt)
        if room < 1:
            text = f"the prompt has {len(prompt)} tokens, but prompt and answer share a context of {context}"
            raise ApiError(text, param=param, code="context_length_exceeded")
        wanted = request.max_tokens or self._options.default_max_tokens or room
        return GenerationRequest(
            prompt=prompt,
            max_tokens=min(wanted, room),
            sampling=request.sampling,
            namespace=cache_namespace(caller.credentials, request.cache_key),
        )

    async def _answer(
        self,
        request: CommonRequest,
        prepare: Callable[[], Awaitable[GenerationRequest]],
        shape: ResponseShape,
        caller: Caller,
    ) -> Response:
        if self._closing:
            raise ApiError(SHUTTING_DOWN, status=503)
        task = GenerationTask(
            self._generator,
            prepare,
            request.stop,
            stall_secs=self._options.stall_timeout_secs,
            buffer=self._options.event_buffer,
        )
        caller.nursery.start_soon(self._own, task, request, caller)
        if request.stream:
            # What goes wrong in this time still gets a status of its own.
            with trio.move_on_after(self._options.keep_alive_secs):
                await task.started()
            body = _stream(
                task,
                shape,
                caller.direct,
                include_usage=request.include_usage,
                keep_alive_secs=self._options.keep_alive_secs,
            )
            response = Response(body, content_type="text/event-stream; charset=utf-8")
            response.headers["cache-control"] = "no-cache"
        else:
            text = "".join([piece async for piece in task.events if piece])
            if task.error is not None:
                raise task.error
            with self._telemetry.span(names.STAGE_OPENAI_RESPONSE_BUILD, request_id=caller.request_id):
                whole = shape.whole(text, task.finish_reason, task.usage)
                whole["timings"] = timings_object(task.timings, task.usage)
                response = Response(dump(whole), content_type="application/json")
        response.timeout = None
        return response

    async def _own(self, task: GenerationTask, request: CommonRequest, caller: Caller) -> None:
        """The generation's task: run it, and account for it on every path."""
        self._running.add(task)
        summary = self._telemetry.span(
            names.STAGE_OPENAI_REQUEST_SUMMARY,
            level=Level.SUMMARY,
            request_id=caller.request_id,
            stream=request.stream,
        )
        with summary as span:
            try:
                async with trio.open_nursery() as nursery:
                    if request.stream:
                        nursery.start_soon(task.keep_alive, self._options.keep_alive_secs)
                    await task.run()
                    nursery.cancel_scope.cancel()
            finally:
                self._running.discard(task)
                usage = task.usage
                span["status"] = task.outcome
                span["finish_reason"] = task.finish_reason
                span["prompt_tokens"] = usage.prompt_tokens
                span["completion_tokens"] = usage.completion_tokens
                span["cached_tokens"] = usage.cached_tokens
                span["hit_kind"] = task.timings.hit_kind
                if task.outcome in ("stalled", "cancelled"):
                    how = "receiver_stalled" if task.outcome == "stalled" else "receiver_dropped"
                    self._telemetry.emit(
                        names.STAGE_OPENAI_STREAM_LANE_FREED,
                        request_id=caller.request_id,
                        outcome=how,
                        frame_kind="terminal" if task.finishing else "in_flight",
                    )


async def _stream(
    task: GenerationTask,
    shape: ResponseShape,
    direct: DirectBody | None,
    *,
    include_usage: bool,
    keep_alive_secs: float,
) -> AsyncIterator[bytes]:
    """Server-sent events of a generation. Holds nothing that would need an await to let go."""
    if direct is not None:
        direct.on_probe = task.probe
    while not task.begun:
        yield KEEP_ALIVE
        await task.wait_begun(keep_alive_secs)
    opening = b"".join(event(chunk) for chunk in shape.opening())
    if opening:
        yield opening
    if direct is not None:
        send_now = direct.send_now
        task.express = lambda text: send_now(shape.delta(text))
    async for piece in task.events:
        if direct is not None:
            await direct.flush()
        pieces = [piece]
        # Whatever else is waiting goes out in the same write.
        while task.events.statistics().current_buffer_used:
            pieces.append(task.events.receive_nowait())
        if frames := [KEEP_ALIVE if text is None else shape.delta(text) for text in pieces if text != ""]:
            yield b"".join(frames)
    if task.error is not None:
        yield error_event(task.error) + DONE_EVENT
        return
    closing = [shape.finish(task.finish_reason)]
    if include_usage:
        closing.append(shape.usage(task.usage))
    closing[-1]["timings"] = timings_object(task.timings, task.usage)
    yield b"".join(map(event, closing)) + DONE_EVENT
