"""The load generator against a server that answers by a script."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from bench.http_stream import BadResponse, ResponseReader
from bench.load import Job, LoadProcess, run


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, finish: str | None = None) -> bytes:
    value = {"choices": [{"text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 7}}\n\n'
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
BODY = b": keep-alive\n\n" + event("Hel") + event("lo", "length") + USAGE + b"data: [DONE]\n\n"
STREAM = HEAD + chunk(BODY[:30]) + chunk(BODY[30:]) + chunk(b"")
BUSY_BODY = b'{"error": {"message": "full"}}'
BUSY = b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\nRetry-After: 0\r\n\r\n%s" % (
    len(BUSY_BODY),
    BUSY_BODY,
)


@contextlib.contextmanager
def scripted(
    answers: Sequence[bytes], answered: threading.Semaphore | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives these answers in turn, and tells ``answered``; its port, and the requests."""
    requests: list[bytes] = []
    left = iter(answers)

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                requests.append(data)
                answer = next(left)
                connection.sendall(answer)
                if answered is not None:
                    answered.release()
                if b"Connection: close" in answer:
                    return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1], requests
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def read(data: bytes, size: int) -> ResponseReader:
    reader = ResponseReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    return reader


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_reads_the_same_however_it_is_cut(size: int) -> None:
    reader = read(STREAM, size)
    assert (reader.status, reader.done, reader.reusable) == (200, True, True)
    assert [json.loads(data) if data != b"[DONE]" else data for data in reader.events][:1] == [
        {"choices": [{"text": "Hel", "finish_reason": None}]}
    ]
    assert len(reader.events) == 4


def test_events_may_end_with_carriage_returns() -> None:
    reader = read(HEAD + chunk(BODY.replace(b"\n", b"\r\n")) + chunk(b""), 11)
    assert len(reader.events) == 4


def test_a_body_with_a_length_is_kept() -> None:
    reader = read(BUSY, 5)
    assert (reader.status, reader.done, reader.body) == (429, True, BUSY_BODY)


def test_a_connection_that_ends_early_is_an_error() -> None:
    reader = read(STREAM[:-5], 10_000)
    with pytest.raises(BadResponse, match="ended within"):
        reader.feed(b"")
    with pytest.raises(BadResponse, match="status line"):
        ResponseReader().feed(b"SSH-2.0-OpenSSH\r\n\r\n")
    with pytest.raises(BadResponse, match="no chunk size"):
        ResponseReader().feed(HEAD + b"xyz\r\n")


def test_a_client_sends_one_request_after_the_other_on_one_connection() -> None:
    with scripted([STREAM, STREAM]) as (port, requests):
        outcomes = run(Job(host="127.0.0.1", port=port, clients=[[{"n": 1}, {"n": 2}]]))
    assert [request.partition(b"\r\n\r\n")[2] for request in requests] == [b'{"n": 1}', b'{"n": 2}']
    assert [o.status for o in outcomes] == [200, 200]
    first = outcomes[0]
    assert (first.text, first.tokens, first.prompt_tokens, first.finish) == ("Hello", 3, 7, "length")
    assert len(first.times) == 2
    assert first.started <= first.times[0] <= first.times[1] <= first.ended <= outcomes[1].started


def test_a_server_that_closes_is_connected_to_again() -> None:
    closing = STREAM.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    with scripted([closing, closing]) as (port, _):
        outcomes = run(Job(host="127.0.0.1", port=port, clients=[[{}, {}]]))
    assert [o.text for o in outcomes] == ["Hello", "Hello"]


def test_refusals_and_broken_answers_are_told_apart() -> None:
    cut = STREAM[: len(HEAD) + 10].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    with scripted([BUSY, cut]) as (port, _):
        refused, broken = run(Job(host="127.0.0.1", port=port, clients=[[{}, {}]]))
    assert (refused.status, refused.error) == (429, BUSY_BODY.decode())
    assert (broken.status, broken.error) == (0, "the connection ended within the response")


def test_a_stream_without_done_is_an_error() -> None:
    unfinished = HEAD + chunk(event("Hel")) + chunk(b"")
    with scripted([unfinished]) as (port, _):
        (outcome,) = run(Job(host="127.0.0.1", port=port, clients=[[{}]]))
    assert outcome.error == "the stream ended without [DONE]"


def test_for_a_time_each_client_starts_over() -> None:
    with scripted([BUSY, STREAM, *[STREAM] * 10_000]) as (port, _):
        outcomes = run(Job(host="127.0.0.1", port=port, clients=[[{}]], seconds=0.05))
    assert [o.status for o in outcomes[:2]] == [429, 200]


def test_a_job_that_is_told_to_end_leaves_what_is_on_its_way() -> None:
    begun = HEAD + chunk(event("Hel"))  # the second answer has no end
    answered = threading.Semaphore(0)
    with scripted([STREAM, begun], answered) as (port, _), LoadProcess() as load:
        load.start(Job(host="127.0.0.1", port=port, clients=[[{}]], until_told=True))
        for _ in range(2):
            assert answered.acquire(timeout=10)
        load.stop()
        outcomes = load.finish()
    assert [(o.text, o.error) for o in outcomes[:1]] == [("Hello", None)]
    assert all(o.error is None for o in outcomes)


def test_the_generator_runs_in_a_process_of_its_own() -> None:
    with scripted([STREAM]) as (port, _), LoadProcess() as load:
        (outcome,) = load.run(Job(host="127.0.0.1", port=port, clients=[[{}]]))
    assert outcome.text == "Hello"
