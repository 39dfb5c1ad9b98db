"""A closed-loop load generator: clients that each send their next request when the last one has ended.

It runs in a process of its own (``python -m bench.load``, a job per line of standard input, its outcomes per
line of standard output) and is a bare selector loop: it shares the cores with the server that it measures.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

import attrs

from .http_stream import BadResponse, ResponseReader, load_event, piece_of, request_head

MAX_PAUSE_SECS = 2.0
"""Longest that a client heeds a Retry-After: the load is to go on."""
STALLED_BUFFER_BYTES = 4096
STDIN = 0


@attrs.frozen(slots=True, kw_only=True)
class Job:
    """What a set of clients does.

    Attributes:
        host, port, path: where requests go.
        clients: bodies of each client, sent one after the other.
        seconds: None sends each body once; else each client starts over until so long has passed, and pauses
            after a 429 as its Retry-After says.
        until_told: each client starts over until :meth:`LoadProcess.stop`; what is on its way then is left as
            it is, and is no error.
        stalled: bodies of clients that each send one and read nothing of the answer until the job ends.
    """

    host: str
    port: int
    clients: Sequence[Sequence[dict[str, Any]]]
    path: str = "/v1/completions"
    seconds: float | None = None
    until_told: bool = False
    stalled: Sequence[dict[str, Any]] = ()


@attrs.frozen(slots=True, kw_only=True)
class Outcome:
    """One request, as its client saw it. Times are of the monotonic clock, in seconds.

    Attributes:
        client: index in the job.
        status: 0 where no whole response came.
        started, ended: before the request is written; after the last byte of the answer.
        times: when each piece of text arrived.
        tokens: how many were generated, as the server counts; where it does not, the pieces.
        prompt_tokens, cached_tokens: of the prompt, and of those the ones that a cache had; None where the
            server does not say.
        error: what went wrong, in the server's words where there are any.
    """

    client: int
    status: int
    started: float
    ended: float
    times: Sequence[float] = ()
    text: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = None


class _Exchange:
    """A request on its way, with what has come back."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.started = time.perf_counter()
        self.reader = ResponseReader()
        self.arrivals: list[float] = []  # one per event
        self.ended = 0.0
        self.cut = False  # the job ended before it did
        self.failure: str | None = None

    def outcome(self) -> Outcome:
        """Events are only parsed here, after the load, which they would slow down."""
        reader, ended = self.reader, self.ended or time.perf_counter()
        common: dict[str, Any] = {
            "client": self.client,
            "status": reader.status,
            "started": self.started,
            "ended": ended,
        }
        if self.failure is not None:
            return Outcome(**common | {"status": 0}, error=self.failure)
        if reader.status != 200:
            return Outcome(**common, error=reader.body.decode(errors="replace")[:400])
        return self._parse(common)

    def _parse(self, common: dict[str, Any]) -> Outcome:
        times, pieces, finish, error = [], [], None, None
        usage: dict[str, Any] = {}
        for arrived, data in zip(self.arrivals, self.reader.events, strict=True):
            if data == b"[DONE]":
                break
            event = load_event(data)
            if "error" in event:
                error = json.dumps(event["error"])
            usage = event.get("usage") or usage
            finish = (event.get("choices") or [{}])[0].get("finish_reason") or finish
            if piece := piece_of(event):
                times.append(arrived)
                pieces.append(piece)
        else:
            if not self.cut:
                error = error or "the stream ended without [DONE]"
        return Outcome(
            **common,
            times=times,
            text="".join(pieces),
            tokens=usage.get("completion_tokens", len(pieces)),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            finish=finish,
            error=error,
        )


class _Client:
    """One client: its connection, kept while the server keeps it, and what it sends next."""

    def __init__(self, job: Job, index: int, bodies: Iterator[dict[str, Any]]) -> None:
        self._job = job
        self._index = index
        self._bodies = bodies
        self._sock: socket.socket | None = None
        self._exchange: _Exchange | None = None
        self.exchanges: list[_Exchange] = []
        self.pause = 0.0

    def send_next(self, selector: selectors.BaseSelector) -> bool:
        """Send the next request; False when there is none."""
        body = next(self._bodies, None)
        if body is None:
            return False
        data = json.dumps(body).encode()
        self._exchange = _Exchange(self._index)
        if self._sock is None:
            self._sock = socket.create_connection((self._job.host, self._job.port))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(self._sock, selectors.EVENT_READ, self)
        self._sock.sendall(request_head(self._job.host, self._job.port, self._job.path, len(data)) + data)
        return True

    def receive(self, selector: selectors.BaseSelector) -> bool:
        """Take what is there; True when the exchange has ended."""
        exchange, sock = self._exchange, self._sock
        assert sock is not None
        try:
            data = sock.recv(262_144)
            arrived = time.perf_counter()
            if exchange is None:  # the server has closed an idle connection
                self.close(selector)
                return False
            exchange.arrivals += [arrived] * exchange.reader.feed(data)
        except (OSError, BadResponse) as error:
            assert exchange is not None
            exchange.failure = str(error)
        if not exchange.reader.done and exchange.failure is None:
            return False
        exchange.ended = time.perf_counter()
        self.exchanges.append(exchange)
        self._exchange = None
        self.pause = _pause(exchange.reader) if exchange.reader.status == 429 else 0.0
        if not exchange.reader.reusable:
            self.close(selector)
        return True

    def cut(self) -> None:
        """Leave the request that is on its way as it is."""
        if self._exchange is not None and self._exchange.reader.status:
            self._exchange.cut = True
            self.exchanges.append(self._exchange)

    def close(self, selector: selectors.BaseSelector) -> None:
        if self._sock is not None:
            selector.unregister(self._sock)
            self._sock.close()
            self._sock = None


def _pause(reader: ResponseReader) -> float:
    wanted = reader.headers.get("retry-after", "1")
    return min(float(wanted), MAX_PAUSE_SECS) if wanted.replace(".", "", 1).isdigit() else 1.0


def run(job: Job) -> list[Outcome]:
    """Do a job, in this process; the outcomes in the order in which clients come in the job."""
    until = None if job.seconds is None else time.perf_counter() + job.seconds
    with selectors.DefaultSelector() as selector:
        stalled = [_stall(job, body) for body in job.stalled]
        once = until is None and not job.until_told
        clients = [
            _Client(job, index, iter(bodies) if once else itertools.cycle(bodies))
            for index, bodies in enumerate(job.clients)
        ]
        if job.until_told:
            selector.register(STDIN, selectors.EVENT_READ)
        try:
            _drive(clients, selector, until)
        finally:
            for client in clients:
                client.close(selector)
            for sock in stalled:
                sock.close()
    return [exchange.outcome() for client in clients for exchange in client.exchanges]


def _drive(clients: Sequence[_Client], selector: selectors.BaseSelector, until: float | None) -> None:
    running = sum(client.send_next(selector) for client in clients)
    pausing: list[tuple[float, int]] = []  # when, and which client
    numbers = {id(client): number for number, client in enumerate(clients)}
    while running or pausing:
        timeout = max(0.0, pausing[0][0] - time.perf_counter()) if pausing else None
        for key, _ in selector.select(timeout):
            client: _Client | None = key.data
            if client is None:
                os.read(STDIN, 64)
                for one in clients:
                    one.cut()
                return
            if not client.receive(selector):
                continue
            running -= 1
            if until is None or time.perf_counter() < until:
                heapq.heappush(
                    pausing, (time.perf_counter() + client.pause * (until is not None), numbers[id(client)])
                )
        while pausing and pausing[0][0] <= time.perf_counter():
            running += clients[heapq.heappop(pausing)[1]].send_next(selector)


def _stall(job: Job, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked and does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALLED_BUFFER_BYTES)
    sock.connect((job.host, job.port))
    data = json.dumps(body).encode()
    sock.sendall(request_head(job.host, job.port, job.path, len(data)) + data)
    return sock


class LoadProcess:
    """The generator in a process of its own, for the length of the block."""

    def __enter__(self) -> LoadProcess:
        command = [sys.executable, "-m", "bench.load"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, job: Job) -> list[Outcome]:
        """Do a job; blocks until it is done."""
        self.start(job)
        return self.finish()

    def start(self, job: Job) -> None:
        """Begin a job that :meth:`finish` waits for."""
        stdin = self._pipe(self._process.stdin)
        stdin.write(json.dumps(attrs.asdict(job)) + "\n")
        stdin.flush()

    def stop(self) -> None:
        """End a started job that goes on until it is told."""
        stdin = self._pipe(self._process.stdin)
        stdin.write("\n")
        stdin.flush()

    def finish(self) -> list[Outcome]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the load generator ended with exit code {self._process.wait()}")
        return [Outcome(**values) for values in json.loads(line)]

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def main() -> None:
    for line in sys.stdin:
        print(json.dumps([attrs.asdict(outcome) for outcome in run(Job(**json.loads(line)))]), flush=True)


if __name__ == "__main__":
    main()
