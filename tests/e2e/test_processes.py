"""Starting, stopping and losing real processes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from skippy.models import ensure_slice
from tests.support.processes import (
    Process,
    children_of,
    running,
    still_running,
    until_patience_ends,
)

from .support import serve, write_chain

READY = r"OpenAI endpoint: (\S+)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_everything_within_five_seconds(bundled_model: Path, number: int) -> None:
    with serve(bundled_model, 3) as served:
        children = children_of(served.process.popen.pid)
        assert len(children) >= 3
        served.process.stop(number)
        assert not [pid for pid in children if psutil.pid_exists(pid)]


def test_a_signal_while_a_client_reads_a_stream(bundled_model: Path) -> None:
    with serve(bundled_model, 2) as served:
        body = {"model": served.model, "prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", served.url + "/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines())
            children = children_of(served.process.popen.pid)
            served.process.stop(signal.SIGTERM)
        assert not [pid for pid in children if psutil.pid_exists(pid)]


def test_a_killed_parent_leaves_no_child(bundled_model: Path) -> None:
    with serve(bundled_model, 3) as served:
        children = [psutil.Process(pid) for pid in children_of(served.process.popen.pid)]
        served.process.popen.kill()
        assert still_running(children) == []


def test_a_killed_stage_is_named_and_the_rest_stops(bundled_model: Path) -> None:
    with serve(bundled_model, 3, "--max-restarts", "0") as served:
        psutil.Process(pid_of(served.process, 1)).kill()
        assert served.process.wait() == 1
        served.process.wait_for(
            r"^error: stage-1 \(layers 10:20\) was killed by signal SIGKILL \(perhaps out of memory\)"
        )
        assert "Traceback" not in served.process.output()


def pid_of(run: Process, index: int) -> int:
    """Of the first life of a stage of `skippy run`."""
    return int(run.wait_for(rf"stage-{index} .* process (\d+)")[1])


def test_a_killed_stage_is_restarted_and_the_chain_recovers(bundled_model: Path) -> None:
    """Each position in turn: lanes upstream and downstream of it come back, and so does the return stream."""
    with serve(bundled_model, 3) as served, httpx.Client(timeout=60) as http:
        body = {"model": served.model, "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
        before = http.post(served.url + "/completions", json=body).json()["choices"]
        others = {index: pid_of(served.process, index) for index in range(3)}
        for index in (1, 2, 0):
            psutil.Process(others.pop(index)).kill()
            served.process.wait_for(rf'"stage-{index}".*has crashed and is restarted')
            if index:
                wait_until_named(http, served.url, f"stage-{index} ")
            served.process.wait_for(rf'"stage-{index}".*"a stage is up again"')
            wait_until_ready(http, served.url)
            answer = http.post(served.url + "/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == before
            assert all(psutil.pid_exists(pid) for pid in others.values())
        assert served.process.stop(signal.SIGTERM) == 0


def wait_until_named(http: httpx.Client, url: str, stage: str) -> None:
    """Until /readyz blames ``stage``: the notice reaches stage 0 after the supervisor's log."""
    said = []
    for answer in readiness(http, url):
        if answer.status_code == 503:
            said.append(answer.json()["error"]["message"])
            if stage in said[-1]:
                return
    raise AssertionError(f"the stage was never named: {said[-3:]}")


def wait_until_ready(http: httpx.Client, url: str) -> None:
    """Ask until the chain is ready again; the lanes may need a little longer than the stage."""
    if not any(answer.status_code == 200 for answer in readiness(http, url)):
        raise AssertionError("the chain did not come back")


def readiness(http: httpx.Client, url: str) -> Iterator[httpx.Response]:
    """What /readyz answers, again and again."""
    for _ in until_patience_ends():
        yield http.get(url.removesuffix("/v1") + "/readyz")


def test_the_link_token_is_not_on_any_command_line(bundled_model: Path) -> None:
    with serve(bundled_model, 2) as served:
        for pid in children_of(served.process.popen.pid):
            line = psutil.Process(pid).cmdline()
            assert not [
                word for word in line if "token" in word and word != "skippy.frontend.template_worker"
            ]


def test_a_middle_stage_stays_within_its_slice_its_cache_and_150_mb(bundled_model: Path) -> None:
    context, lanes = 2048, 4
    with serve(bundled_model, 3, "--ctx-size", str(context), "--lane-count", str(lanes)) as served:
        body = {"model": served.model, "prompt": "word " * 1500, "max_tokens": 8, "temperature": 0}
        for _ in range(3):
            assert httpx.post(served.url + "/completions", json=body, timeout=120).status_code == 200
        pid = pid_of(served.process, 1)
        slice_bytes = ensure_slice(bundled_model, 10, 20).path.stat().st_blocks * 512
        # Ten layers and the spare one, keys and values of 3 heads of 64 in f16.
        cache_bytes = 11 * context * lanes * 2 * 3 * 64 * 2
        resident = psutil.Process(pid).memory_info().rss
        assert slice_bytes < 23_000_000
        assert resident < slice_bytes + cache_bytes + 150_000_000


def ask(url: str) -> httpx.Response:
    return httpx.post(
        url + "/completions",
        json={"model": "smollm2", "prompt": "The sky is", "max_tokens": 8, "temperature": 0},
        timeout=60,
    )


def test_two_machines_with_configuration_files(tmp_path: Path, bundled_model: Path) -> None:
    """Two loopback addresses stand for two machines; connections leave from the address in bind_addr."""
    commands = write_chain(tmp_path, bundled_model, ["127.0.0.1", "127.0.0.2"])
    with running(commands[1]) as second, running(commands[0]) as first:
        url = first.wait_for(r"(http://\S+/v1)")[1]
        first.wait_for("ready")
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        connections = psutil.Process(second.popen.pid).net_connections("tcp")
        links = {(c.laddr.ip, c.raddr.ip) for c in connections if c.status == "ESTABLISHED"}
        assert links == {("127.0.0.2", "127.0.0.1")}


def test_stage_zero_says_what_is_missing_and_recovers_when_it_comes(
    tmp_path: Path, bundled_model: Path
) -> None:
    commands = write_chain(tmp_path, bundled_model, ["127.0.0.1", "127.0.0.2"])
    with running([*commands[0], "--downstream-connect-timeout-secs", "1"]) as first:
        url = first.wait_for(r"(http://\S+/v1)")[1]
        first.wait_for(r"127\.0\.0\.2:\d+.*did not become ready within 1 s")
        refused = ask(url)
        assert refused.status_code == 503
        assert "127.0.0.2" in refused.json()["error"]["message"]
        with running(commands[1]) as second:
            first.wait_for("^ready$")
            assert ask(url).status_code == 200
            second.stop(signal.SIGKILL)
        assert ask(url).status_code == 503
        with running(commands[1]):
            # Each answer takes the server's own time, so this does not spin.
            assert any(ask(url).status_code == 200 for _ in until_patience_ends())


BAD = {
    "no such model": (["--model", "{tmp}/none.gguf"], "no such file"),
    "not a GGUF": (["--model", "{tmp}/text.gguf"], "not a GGUF"),
    "truncated GGUF": (["--model", "{tmp}/short.gguf"], "truncated"),
    "more stages than layers": (["--model", "{model}", "--stages", "31"], "30 layers"),
    "cut outside": (["--model", "{model}", "--splits", "10,99"], "cut 99"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_models_and_cuts_are_one_clear_line(tmp_path: Path, bundled_model: Path, name: str) -> None:
    (tmp_path / "text.gguf").write_text("hello, I am a text file, not a model" * 10)
    with bundled_model.open("rb") as source:
        (tmp_path / "short.gguf").write_bytes(source.read(3_000_000))
    arguments, text = BAD[name]
    filled = [word.format(tmp=tmp_path, model=bundled_model) for word in arguments]
    process = Process.start(["run", "--bind", "127.0.0.1:0", *filled])
    assert process.wait() in (1, 2)
    assert text in process.output()
    assert "Traceback" not in process.output()
    assert len([line for line in process.errors if line.startswith("error:")]) == 1


def test_a_port_in_use_is_named(bundled_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        process = Process.start(["run", "--model", str(bundled_model), "--bind", bind])
        assert process.wait() in (1, 2)
        assert bind in process.output()
        assert "in use" in process.output()
