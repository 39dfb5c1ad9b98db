"""What clients see of a chain of three stages over each link backend: real processes, or memory links in one.

What is right is what the unsplit model says. A chain is started once for each backend.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from skippy.config import OpenAIOptions, load_stage_config, load_topology
from skippy.embed import open_openai, open_stage
from skippy.stage.links import MemoryTransport
from tests.support.certificates import Certificates

from .support import client_of, serve_chain, write_chain

LANES = 2
CONTEXT = 4096
TEXT = "Once upon a time, in a small village by the sea, there lived"
MESSAGES: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
SLOW_WIRE = ["--downstream-wire-delay-ms=2", "--downstream-wire-mbps=200", "--downstream-wire-jitter-ms=1"]
# The scheme of the endpoints, and options of every stage; TLS gets its files besides.
BACKENDS: dict[str, tuple[str, list[str]]] = {
    "tcp": ("tcp", []),
    "mutual tls": ("tls", []),
    "ws": ("ws", []),
    "wss": ("wss", []),
    "conditioned": ("tcp", SLOW_WIRE),
    "memory": ("tcp", []),
}


@attrs.frozen
class Client:
    """Asks one endpoint, with the official client."""

    url: str
    model: str = "smollm2"

    def chat(self, **fields: Any) -> Any:
        with client_of(self.url) as client:
            fields = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0, **fields}
            answer = client.chat.completions.create(model=self.model, **fields)
            return list(answer) if fields.get("stream") else answer

    def complete(self, **fields: Any) -> Any:
        with client_of(self.url) as client:
            fields = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, **fields}
            answer = client.completions.create(model=self.model, **fields)
            return list(answer) if fields.get("stream") else answer


@attrs.frozen
class Answers:
    """What a client is told that asks for the same, whole."""

    chat: Any
    completion: Any


async def serve_over_memory(commands: Sequence[Sequence[str]], started: queue.Queue[Any]) -> None:
    """All stages in this event loop, each with its own engine; puts the URL, and what ends it."""
    transport, scope = MemoryTransport(), trio.CancelScope()
    with scope:
        async with contextlib.AsyncExitStack() as stack:
            for command in reversed(commands):
                config, topology = load_stage_config(Path(command[2])), load_topology(Path(command[4]))
                stage = await stack.enter_async_context(open_stage(config, topology, transport=transport))
            options = OpenAIOptions(bind_addr="127.0.0.1:0")
            endpoint = await stack.enter_async_context(open_openai(stage, options))
            await endpoint.wait_ready()
            token = trio.lowlevel.current_trio_token()
            started.put((endpoint.url, lambda: token.run_sync_soon(scope.cancel)))
            await trio.sleep_forever()


@contextlib.contextmanager
def over_memory(commands: Sequence[Sequence[str]]) -> Iterator[str]:
    started: queue.Queue[Any] = queue.Queue()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trio.run, serve_over_memory, commands, started)
        running.add_done_callback(lambda _: started.put(None))
        serving = started.get()
        if serving is not None:
            url, stop = serving
            try:
                yield url
            finally:
                stop()
        running.result()


@contextlib.contextmanager
def over_sockets(commands: Sequence[Sequence[str]], arguments: Sequence[str]) -> Iterator[str]:
    with serve_chain(commands, *arguments) as served:
        yield served.url


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Answers:
    commands = write_chain(tmp_path_factory.mktemp("unsplit"), bundled_model, ["127.0.0.1"], ctx_size=CONTEXT)
    with over_sockets(commands, []) as url:
        client = Client(url)
        return Answers(client.chat(), client.complete())


@pytest.fixture(scope="module", params=BACKENDS)
def client(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    bundled_model: Path,
    certificates: Certificates,
) -> Iterator[Client]:
    scheme, arguments = BACKENDS[request.param]
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    commands = write_chain(
        folder, bundled_model, ["127.0.0.1"] * 3, scheme=scheme, ctx_size=CONTEXT, lane_count=LANES
    )
    files = certificates.files()
    if scheme in ("tls", "wss"):
        arguments = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-ca={files.ca}"]
    serving = over_memory(commands) if request.param == "memory" else over_sockets(commands, arguments)
    with serving as url:
        yield Client(url)


def test_text_and_usage_are_those_of_the_unsplit_model(client: Client, unsplit: Answers) -> None:
    chat, completion = client.chat(), client.complete()
    assert chat.choices == unsplit.chat.choices
    assert completion.choices == unsplit.completion.choices
    assert completion.choices[0].finish_reason == "length"
    assert chat.usage == unsplit.chat.usage
    assert completion.usage == unsplit.completion.usage
    assert completion.usage.completion_tokens == 16


def test_streams_bring_the_same_in_pieces(client: Client, unsplit: Answers) -> None:
    chunks = client.chat(stream=True, stream_options={"include_usage": True})
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == unsplit.chat.choices[0].message.content
    assert len([delta for delta in deltas if delta]) > 3
    assert chunks[-1].usage == unsplit.chat.usage
    chunks = client.complete(stream=True, stream_options={"include_usage": True})
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == unsplit.completion.choices[0].text
    assert chunks[-1].usage == unsplit.completion.usage
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"


def test_clients_at_once_get_what_each_would_get_alone(client: Client, unsplit: Answers) -> None:
    """One more than there are lanes."""
    seeded: dict[str, Any] = {"seed": 7, "temperature": 0.9}
    alone = client.chat(**seeded).choices[0].message.content
    with ThreadPoolExecutor(LANES + 1) as pool:
        first, second, third = (
            pool.submit(client.chat, **seeded),
            pool.submit(client.complete),
            pool.submit(client.chat, stream=True),
        )
        assert first.result().choices[0].message.content == alone
        assert second.result().choices == unsplit.completion.choices
        deltas = [choice.delta.content or "" for chunk in third.result() for choice in chunk.choices]
        assert "".join(deltas) == unsplit.chat.choices[0].message.content


def test_a_disconnect_in_the_middle_frees_the_lane(client: Client, unsplit: Answers) -> None:
    """Every lane is left within an answer of 3,900 tokens, which takes far longer than the next may."""
    body = {"model": client.model, "prompt": TEXT, "max_tokens": 3900, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        for _ in range(LANES):
            url = client.url + "/completions"
            response = stack.enter_context(httpx.stream("POST", url, json=body, timeout=60))
            assert next(response.iter_lines()).startswith("data: {")
    with ThreadPoolExecutor(LANES) as pool, httpx.Client(timeout=40) as http:
        body = {"model": client.model, "prompt": TEXT, "max_tokens": 16, "temperature": 0}
        asked = [pool.submit(http.post, client.url + "/completions", json=body) for _ in range(LANES)]
        answers = [future.result() for future in asked]
    assert [answer.status_code for answer in answers] == [200] * LANES
    expected = unsplit.completion.choices[0].text
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected] * LANES
