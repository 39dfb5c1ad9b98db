"""What the generating routes share: a request, read from its body, becomes generations and a response."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import attrs
import trio
from quart import Response

from skippy.engine import Vocabulary
from skippy.engine.sampling import check_settings
from skippy.telemetry import NULL_TELEMETRY, Level, Span, names

from .caller import Caller
from .choices import Piece, ScoredToken
from .direct import DirectBody
from .errors import ApiError, setting_at_fault
from .generation import GenerationRequest, Generator
from .logprobs import chat_logprobs, completion_logprobs
from .metrics import Metrics
from .namespaces import cache_namespace
from .options import FrontendOptions
from .prompting import PromptBuilder
from .requests import RunningRequests
from .responses import KEEP_ALIVE, ChatShape, CompletionShape, ResponseShape, Scorer, dump
from .running import SHUTTING_DOWN, GenerationTask
from .sampling import model_defaults
from .schemas import ChatRequest, CommonRequest, CompletionRequest, check_model
from .templates import TemplateRenderer

R = TypeVar("R", bound=CommonRequest)


class CompletionService:
    """Serves the generating routes.

    A generation runs as a task in the nursery of its client's connection, so it ends when the client leaves.
    One that has asked and then closes only its own side of the connection gets its whole answer.
    """

    def __init__(self, generator: Generator, options: FrontendOptions) -> None:
        self._generator = generator
        self._options = options
        self._telemetry = options.telemetry or NULL_TELEMETRY
        self.metrics = Metrics(generator.status)
        self.requests = RunningRequests(self.metrics)
        self._closing = False
        self.model_id = generator.model_id
        self.vocabulary = generator.vocabulary
        self._sampling_defaults = model_defaults(self.vocabulary.sampling_metadata, self.vocabulary.size)
        self.renderer = TemplateRenderer(
            cpu_secs=options.template_cpu_secs,
            memory_bytes=options.template_memory_bytes,
            max_output_bytes=options.max_prompt_bytes,
        )
        self._prompts = PromptBuilder(
            generator.vocabulary,
            self.renderer,
            self._telemetry,
            context_length=generator.context_length,
        )

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
        self.requests.end_all(lambda: ApiError(SHUTTING_DOWN, status=503))

    async def chat(self, request: ChatRequest, caller: Caller) -> Response:
        """Answer ``POST /v1/chat/completions``.

        Raises:
            ApiError: anything that goes wrong before the first token.
        """
        request = self.check(request)
        scorer = None if request.top_logprobs is None else self._scorer(chat_logprobs)
        usage = request.include_usage
        shape = ChatShape(self.model_id, include_usage=usage, scorer=scorer, n=request.n)
        return await self.answer(request, lambda: self.chat_prompt(request, caller), shape, caller)

    @property
    def unused_parameters(self) -> frozenset[str]:
        """Chat parameters that are known, but refused here or without effect, at every value."""
        unused = {"min_keep", "function_call"}
        if not self._options.allows_chat_templates:
            unused.add("chat_template")
        if not self._prompts.takes_effort:
            unused.add("reasoning_effort")
        return frozenset(unused)

    async def describe_template(self) -> dict[str, Any]:
        """What the model's chat template can do, for clients. Raises ApiError: it cannot be tried out now."""
        return await self._prompts.describe()

    async def chat_prompt(self, request: ChatRequest, caller: Caller) -> list[GenerationRequest]:
        """What is to be generated for a conversation. Raises ApiError."""
        self._check_template(request)
        if request.settings.tool_use.required and request.constraint is not None:
            text = f"{request.constraint.param} says what an answer looks like, but tool_choice allows none"
            raise ApiError(text, param=request.constraint.param)
        with self._preparing(caller):
            prompt = await self._prompts.chat(request.messages, request.settings, request.constraint)
        if prompt.constraint is not None and request.sampling.ignores_eos:
            text = f"ignore_eos must not be true where {prompt.constraint.param} says how the answer ends"
            raise ApiError(text, param="ignore_eos")
        generation = self._generation_request(request, prompt.tokens, "messages", caller)
        return [attrs.evolve(generation, reading=prompt.reading, constraint=prompt.constraint)]

    async def chat_tokens(self, request: ChatRequest) -> list[int]:
        """The prompt of a conversation, however long it is. Raises ApiError."""
        self._check_template(request)
        prompt = await self._prompts.chat(request.messages, request.settings, request.constraint)
        return prompt.tokens

    async def chat_text(self, request: ChatRequest) -> str:
        """The prompt of a conversation as text. Raises ApiError."""
        self._check_template(request)
        return "".join(part.text for part in await self._prompts.render(request.messages, request.settings))

    def _check_template(self, request: ChatRequest) -> None:
        if request.settings.template is not None and not self._options.allows_chat_templates:
            text = "chat_template is not allowed here; the server's operator can, with --allow-chat-templates"
            raise ApiError(text, param="chat_template", code="unsupported_model_feature")

    async def completion(self, request: CompletionRequest, caller: Caller) -> Response:
        """Answer ``POST /v1/completions``. Raises as :meth:`chat` does."""
        request = self.check(request)
        scorer = None if request.top_logprobs is None else self._scorer(completion_logprobs)
        shape = CompletionShape(
            self.model_id,
            include_usage=request.include_usage,
            scorer=scorer,
            n=request.n * len(request.prompts),
        )

        async def prepare() -> list[GenerationRequest]:
            with self._preparing(caller):
                prompts = [
                    await self._prompts.tokens(prompt, f"prompt[{index}]" if index else "prompt")
                    for index, prompt in enumerate(request.prompts)
                ]
            if request.echo:
                texts = [self._prompts.echo(prompt) for prompt in request.prompts]
                shape.echoes = [text for text in texts for _ in range(request.n)]
            return [self._generation_request(request, prompt, "prompt", caller) for prompt in prompts]

        return await self.answer(request, prepare, shape, caller)

    def _scorer(self, word: Callable[[Vocabulary, Sequence[ScoredToken]], dict[str, Any]]) -> Scorer:
        return functools.partial(word, self._generator.vocabulary)

    def _preparing(self, caller: Caller) -> Span:
        return self._telemetry.span(names.STAGE_OPENAI_PROMPT_PREPARE, request_id=caller.request_id)

    def check(self, request: R) -> R:
        """A request of any route as this model and server serve it: what it did not say is filled in.

        Raises:
            ApiError: they cannot do what it asks for.
        """
        check_model(request.model, self.model_id)
        if request.cache_retention == "24h" and not self._options.keeps_prompts_on_disk:
            text = (
                "prompt_cache_retention is '24h', but prompts are kept in memory only here; use 'in_memory'"
            )
            raise ApiError(text, param="prompt_cache_retention", code="unsupported_model_feature")
        said = {name: getattr(request.sampling, name) for name in request.said}
        request = attrs.evolve(request, sampling=attrs.evolve(self._sampling_defaults, **said))
        size = self._generator.vocabulary.size
        for token, _ in request.sampling.logit_bias:
            if token >= size:
                text = f"logit_bias has token id {token}; this model's token ids are 0 to {size - 1}"
                raise ApiError(text, param="logit_bias")
        try:
            # What the last stage would refuse; found out here, it costs no lane.
            check_settings(request.sampling, size)
        except ValueError as error:
            raise ApiError(str(error), param=setting_at_fault(str(error))) from error
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
            top_logprobs=request.top_logprobs,
            constraint=request.constraint,
            namespace=cache_namespace(caller.credentials, request.cache_key),
            request_id=caller.request_id,
            client=caller.name,
        )

    async def answer(
        self,
        request: CommonRequest,
        prepare: Callable[[], Awaitable[Sequence[GenerationRequest]]],
        shape: ResponseShape,
        caller: Caller,
    ) -> Response:
        """Generate, and answer in the words of a route.

        Args:
            prepare: makes what is to be generated, one request for each prompt, with ``request.n`` choices.

        Raises:
            ApiError: anything that goes wrong before the first token.
        """
        if self._closing:
            raise ApiError(SHUTTING_DOWN, status=503)
        task = GenerationTask(
            self._generator,
            prepare,
            request.stop,
            n=request.n,
            stall_secs=self._options.stall_timeout_secs,
            buffer=self._options.event_buffer,
        )
        caller.nursery.start_soon(self._own, task, request, caller)
        if request.stream:
            # What goes wrong in this time still gets a status of its own.
            with trio.move_on_after(self._options.keep_alive_secs):
                await task.started()
            body = _stream(task, shape, caller.direct, keep_alive_secs=self._options.keep_alive_secs)
            response = Response(body, content_type="text/event-stream; charset=utf-8")
            response.headers["cache-control"] = "no-cache"
        else:
            choices = await task.results()
            with self._telemetry.span(names.STAGE_OPENAI_RESPONSE_BUILD, request_id=caller.request_id):
                whole = shape.whole(choices, task.usage, task.timings)
                response = Response(dump(whole), content_type="application/json")
        response.timeout = None
        return response

    async def _own(self, task: GenerationTask, request: CommonRequest, caller: Caller) -> None:
        """The generation's task: run it, and account for it on every path."""
        summary = self._telemetry.span(
            names.STAGE_OPENAI_REQUEST_SUMMARY,
            level=Level.SUMMARY,
            request_id=caller.request_id,
            stream=request.stream,
        )
        with self.requests.running(task, caller), summary as span:
            try:
                async with trio.open_nursery() as nursery:
                    if request.stream:
                        nursery.start_soon(task.keep_alive, self._options.keep_alive_secs)
                    await task.run()
                    nursery.cancel_scope.cancel()
            finally:
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
    task: GenerationTask, shape: ResponseShape, direct: DirectBody | None, *, keep_alive_secs: float
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer. Holds nothing that would need an await to let go."""
    if direct is not None:
        direct.on_probe = task.probe
    while not task.begun:
        yield KEEP_ALIVE
        await task.wait_begun(keep_alive_secs)
    if opening := shape.opening(task.usage):
        yield opening
    if direct is not None:
        send_now = direct.send_now
        task.express = lambda choice, text: not (data := shape.delta(choice, text)) or send_now(data)
        task.express_piece = lambda piece: not (data := _frame(shape, piece)) or send_now(data)
    async for piece in task.events:
        if direct is not None:
            await direct.flush()
        pieces = [piece]
        # Whatever else is waiting goes out in the same write.
        while task.events.statistics().current_buffer_used:
            pieces.append(task.events.receive_nowait())
        if frames := b"".join(_frame(shape, piece) for piece in pieces):
            yield frames
    yield shape.closing(task.usage, task.timings) if task.error is None else shape.failure(task.error)


def _frame(shape: ResponseShape, piece: Piece | None) -> bytes:
    if piece is None:
        return KEEP_ALIVE
    return shape.delta(piece.choice, piece.text) if piece.is_only_text and piece.text else shape.piece(piece)
