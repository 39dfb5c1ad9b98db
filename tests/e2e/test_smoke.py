"""scripts/openai-smoke.sh against a running chain, and against what is none."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ports import reserve_port

from .support import Served

SCRIPT = Path(__file__).parents[2] / "scripts" / "openai-smoke.sh"

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="the script needs bash and curl"
)

CHECKS = ["models", "chat", "completion", "chat-stream", "completion-stream"]


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_every_check_passes_against_a_chain(chain: Served) -> None:
    done = smoke(chain.url)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:5] == [f"ok: {name}" for name in CHECKS]
    assert sorted(lines[5:9]) == [f"ok: parallel-{number}" for number in (1, 2, 3, 4)]
    assert lines[9:] == ["ok: error", f"all checks passed: {chain.url} serves {chain.model}"]


def test_the_first_failure_ends_it_with_its_name(chain: Served) -> None:
    done = smoke(chain.url, "another-model")
    assert done.returncode == 1
    assert done.stdout == "ok: models\n"
    assert done.stderr.startswith("FAILED: chat: status 404 instead of 200: ")
    assert "another-model" in done.stderr


def test_nobody_listening_is_told() -> None:
    done = smoke(f"http://127.0.0.1:{reserve_port()}/v1")
    assert done.returncode == 1
    assert done.stderr.startswith("FAILED: models: no answer from http://127.0.0.1:")


class Wrong(http.server.BaseHTTPRequestHandler):
    """Lists a model, completes, and forgets [DONE]."""

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if b'"stream"' in asked:
            self.answer(b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n')
        else:
            choice = b'{"text": "x", "message": {"content": "x"}, "finish_reason": "stop"}'
            self.answer(b'{"choices": [%s], "usage": {"completion_tokens": 1}}' % choice)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def wrong_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wrong) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_stream_without_done_fails() -> None:
    with wrong_server() as url:
        done = smoke(url)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["ok: models", "ok: chat", "ok: completion"]
    assert done.stderr.startswith("the stream does not end with [DONE]\nFAILED: chat-stream: ")
