"""A generator that plays scripts, and a server around it."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import trio

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.app import create_app
from skippy.frontend.generation import FinishReason, GenerationError, GenerationRequest, Timings
from skippy.frontend.options import FrontendOptions
from skippy.frontend.server import serve_http
from skippy.frontend.status import ChainStatus, LaneStatus, TokenGaps, Totals
from skippy.protocol import PositionLogProbabilities
from skippy.stage import Tokenizer

MODEL = "org/toy:Q4"

# A step of a script: a token, a failure, or something to wait for.
Step = int | Exception | trio.Event
Script = Callable[[GenerationRequest], Sequence[Step]]


def say(text: str | bytes) -> Script:
    """A script that generates these bytes, one token each, and then ends."""
    data = text.encode() if isinstance(text, str) else text
    return lambda request: list(data)


class ScriptedStream:
    """A token that comes after an event has been waited for goes past the iteration where it may."""

    def __init__(self, steps: Sequence[Step], limit: int) -> None:
        self._steps = iter(steps)
        self._left = limit
        self.finish_reason: FinishReason | None = None
        self.express: Callable[[int], bool] | None = None
        self.timings = Timings()
        self.logprobs: PositionLogProbabilities | None = None

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> int:
        await trio.lowlevel.checkpoint()
        waited = False
        while self._left:
            step = next(self._steps, None)
            if step is None:
                self.finish_reason = "stop"
                raise StopAsyncIteration
            if isinstance(step, trio.Event):
                await step.wait()
                waited = True
            elif isinstance(step, Exception):
                raise step
            else:
                self._left -= 1
                if not (waited and self.express is not None and self.express(step)):
                    return step
        self.finish_reason = "length"
        raise StopAsyncIteration


class ScriptedGenerator:
    """Plays ``script`` for every request and keeps count of what runs."""

    def __init__(
        self, script: Script, *, context_length: int = 512, vocabulary: ToyVocabulary | None = None
    ) -> None:
        self.script = script
        self.context_length = context_length
        self.vocabulary = vocabulary or ToyVocabulary()
        self.tokenizer = Tokenizer(self.vocabulary, MODEL, lambda: "ab" * 32)
        self.model_id = MODEL
        self.unready: str | None = None
        self.embedding_size: int | None = None
        self.requests: list[GenerationRequest] = []
        self.dropped: list[str] = []
        self.shared: list[GenerationRequest] = []
        self.lanes = 4
        self.active = 0
        self.idle = trio.Event()
        self.entry_error: GenerationError | None = None
        self.queue_error: GenerationError | None = None

    def status(self) -> ChainStatus:
        return ChainStatus(
            unready=self.unready,
            stages=[],
            lanes=[LaneStatus(id=1, state="idle")],
            concurrency=1,
            running=self.active,
            queue_depth=0,
            queue_capacity=16,
            kv_tokens=self.context_length,
            reserved_kv_tokens=0,
            cache_lookups=0,
            cache_hits=0,
            totals=Totals(requests=len(self.requests)),
            gaps=TokenGaps(),
        )

    async def time_stages(self) -> None:
        await trio.lowlevel.checkpoint()

    async def cache_report(self) -> dict[str, Any]:
        return {"object": "kv_cache", "enabled": False}

    async def drop_cache(self, namespace: str) -> int:
        if self.entry_error is not None:
            raise self.entry_error
        self.dropped.append(namespace)
        return 7

    async def embed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """A vector that shows how long the text was."""
        if self.entry_error is not None:
            raise self.entry_error
        assert self.embedding_size is not None
        vector = np.zeros(self.embedding_size, dtype=np.float32)
        vector[len(tokens) % self.embedding_size] = 1
        return vector

    @contextmanager
    def preparing(self) -> Iterator[None]:
        if self.queue_error is not None:
            raise self.queue_error
        yield

    async def share(self, request: GenerationRequest) -> int:
        await trio.lowlevel.checkpoint()
        self.shared.append(request)
        return 0

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[ScriptedStream]:
        await trio.lowlevel.checkpoint()
        if self.entry_error is not None:
            raise self.entry_error
        self.requests.append(request)
        self.active += 1
        self.idle = trio.Event()
        try:
            yield ScriptedStream(self.script(request), request.max_tokens)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()


@asynccontextmanager
async def serving(
    generator: ScriptedGenerator,
    options: FrontendOptions | None = None,
    *,
    before_shutdown: Callable[[], Awaitable[None]] | None = None,
    **arguments: Any,
) -> AsyncIterator[str]:
    """A real server on a free port; the base URL. Shuts down gracefully at the end."""
    shutdown = trio.Event()
    app = create_app(generator, options)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[tuple[str, int]]) -> None:
                await serve_http(app, "127.0.0.1:0", shutdown=shutdown, task_status=task_status, **arguments)

            host, port = await nursery.start(serve)
            try:
                yield f"http://{host}:{port}"
            finally:
                shutdown.set()


@asynccontextmanager
async def client(
    generator: ScriptedGenerator, options: FrontendOptions | None = None, **arguments: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server around ``generator``."""
    async with (
        serving(generator, options, **arguments) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http


def chat_body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def completion_body(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **more}


def bearer(key: str) -> dict[str, str]:
    """The header of a request that shows an API key."""
    return {"authorization": f"Bearer {key}"}


def prompt_of(generator: ScriptedGenerator) -> str:
    """The last prompt as text, without BOS."""
    prompt = generator.requests[-1].prompt[1:]
    return b"".join(generator.vocabulary.piece(token, special=True) for token in prompt).decode()


def openai_client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    """The official client of a server; its HTTP library finds out by itself that it runs under Trio."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


def reset(stream: trio.SocketStream) -> None:
    """Close a connection by a reset."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()
