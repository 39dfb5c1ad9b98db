"""The supervisor of child processes, with small scripts in place of stages."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio

from skippy.cli import launch
from skippy.cli.errors import CliError
from skippy.cli.launch import Chain, Child, obituary, run_chain
from skippy.cli.sockets import endpoint_of, listen_on, url_host
from skippy.config import Endpoint, OpenAIOptions, StageOptions
from skippy.topology import make_stage_configs, make_topology, plan_even

PRELUDE = """
import json, os, signal, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
settings = json.loads(sys.stdin.buffer.readline())
"""
READY = 'os.write(int(options["--status-fd"]), b"ready\\n")\n'
UNTIL_PARENT_ENDS = "sys.stdin.buffer.read()\n"
TOKEN = "a-secret-token"


def make_chain(*scripts: str) -> Chain:
    """A chain whose stages are Python scripts."""
    listeners = [listen_on(Endpoint("127.0.0.1", 0), "stage") for _ in scripts]
    topology = make_topology(
        plan_even(len(scripts), len(scripts)),
        list(map(endpoint_of, listeners)),
        topology_id="t",
        model_id="m",
    )
    configs = make_stage_configs(topology, run_id="r", model_path="m.gguf")
    children = [
        Child(config=config, listener=listener, command=(sys.executable, "-c", PRELUDE + script))
        for config, listener, script in zip(configs, listeners, scripts, strict=True)
    ]
    children[0].openai_listener = listen_on(Endpoint("127.0.0.1", 0), "http")
    return Chain(
        children=children,
        topology=topology,
        options=StageOptions(link_token=TOKEN),
        openai=OpenAIOptions(bind_addr=str(endpoint_of(children[0].openai_listener))),
    )


async def run(chain: Chain, ready: Callable[[], None] = lambda: None, relay: bool = False) -> None:
    with trio.fail_after(30):
        await run_chain(chain, relay=relay, ready=ready, loading=lambda: None)


def only_error(caught: pytest.ExceptionInfo[BaseException]) -> str:
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, CliError)
    return error.format_message()


def all_gone(chain: Chain) -> bool:
    return all(child.process is not None and child.process.returncode is not None for child in chain.children)


async def test_children_get_settings_and_sockets(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = f"""
import socket
fds = [int(options[name]) for name in ("--listen-fd", "--openai-fd")]
listeners = [socket.socket(fileno=fd).getsockname() for fd in fds]
open({str(report)!r}, "w").write(json.dumps([settings, listeners, sys.argv]))
"""
    chain = make_chain(script + READY + UNTIL_PARENT_ENDS, READY + UNTIL_PARENT_ENDS)
    with trio.CancelScope() as scope:
        await run(chain, ready=scope.cancel)
    assert scope.cancelled_caught
    assert all_gone(chain)
    settings, listeners, arguments = json.loads(report.read_text())
    assert settings["config"]["stage_id"] == "stage-0"
    assert settings["topology"]["stages"][1]["stage_id"] == "stage-1"
    assert settings["options"]["link_token"] == TOKEN
    assert settings["openai"]["bind_addr"] == "{}:{}".format(*listeners[1])
    assert settings["config"]["bind_addr"] == "{}:{}".format(*listeners[0])
    assert TOKEN not in " ".join(arguments)


async def test_a_child_that_fails_ends_the_others() -> None:
    fail = 'print("starting", file=sys.stderr); print("error: no such model", file=sys.stderr); sys.exit(3)'
    chain = make_chain(READY + UNTIL_PARENT_ENDS, fail)
    with pytest.raises(ExceptionGroup) as caught:
        await run(chain)
    assert only_error(caught) == "stage-1 (layers 1:2) exited with code 3: no such model"
    assert all_gone(chain)


async def test_a_child_that_is_killed() -> None:
    chain = make_chain(
        UNTIL_PARENT_ENDS, 'print("last words", file=sys.stderr); os.kill(os.getpid(), signal.SIGSEGV)'
    )
    with pytest.raises(ExceptionGroup) as caught:
        await run(chain)
    assert (
        only_error(caught) == "stage-1 (layers 1:2) was killed by SIGSEGV; its last lines were:\n  last words"
    )
    assert all_gone(chain)


async def test_a_child_that_ends_without_reason_is_an_error_too() -> None:
    chain = make_chain("sys.exit(0)")
    with pytest.raises(ExceptionGroup) as caught:
        await run(chain)
    assert only_error(caught) == "stage-0 (layers 0:1) exited with code 0"


async def test_a_child_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "KILL_AFTER_SECONDS", 0.1)
    chain = make_chain("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)")
    with trio.CancelScope() as scope:
        await run(chain, ready=scope.cancel)
    process = chain.children[0].process
    assert process is not None
    assert process.returncode == -9
    assert not psutil.pid_exists(process.pid)


async def test_stage_0_stops_first(tmp_path: Path) -> None:
    log, up = tmp_path / "log", tmp_path / "up"

    def on_stop(delay: float, name: str) -> str:
        return f"""
def stop(*_):
    time.sleep({delay})  # what stage 0 needs to finish its requests
    open({str(log)!r}, "a").write({name!r})
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""

    both_up = f"while not os.path.exists({str(up)!r}): time.sleep(0.01)\n" + READY + UNTIL_PARENT_ENDS
    chain = make_chain(
        on_stop(0.3, "0") + both_up, on_stop(0, "1") + f"open({str(up)!r}, 'w')\n" + UNTIL_PARENT_ENDS
    )
    with trio.CancelScope() as scope:
        await run(chain, ready=scope.cancel)
    assert all_gone(chain)
    assert log.read_text() == "01"


async def test_what_children_have_loaded_is_told() -> None:
    load = 'os.write(int(options["--status-fd"]), b"load 5 10\\nlo"); time.sleep(0)\n'
    rest = 'os.write(int(options["--status-fd"]), b"ad 10 10\\nready\\n")\n'
    chain = make_chain(load + rest + UNTIL_PARENT_ENDS)
    seen: list[tuple[int, int] | str] = []
    with trio.CancelScope() as scope, trio.fail_after(30):

        def ready() -> None:
            seen.append("ready")
            scope.cancel()

        await run_chain(
            chain, relay=False, ready=ready, loading=lambda: seen.append(chain.children[0].loaded)
        )
    assert seen == [(5, 10), (10, 10), "ready"]


async def test_only_stage_0_means_ready() -> None:
    chain = make_chain(UNTIL_PARENT_ENDS, READY + READY.replace("ready", "load 1 1") + UNTIL_PARENT_ENDS)
    with trio.CancelScope() as scope, trio.fail_after(30):
        await run_chain(
            chain,
            relay=False,
            ready=partial(pytest.fail, "stage 0 never said so"),
            loading=scope.cancel,
        )
    assert scope.cancelled_caught


async def test_relayed_lines_name_their_stage(capsys: pytest.CaptureFixture[str]) -> None:
    chain = make_chain('sys.stderr.write("one\\ntwo" + "x" * 5000); sys.exit(1)')
    with pytest.raises(ExceptionGroup):
        await run(chain, relay=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "[stage-0] one"
    assert second == "[stage-0] " + "x" * launch.MAX_LINE


def test_a_program_that_does_not_exist() -> None:
    chain = make_chain("")
    chain.children[0].command = ("/no/such/program",)
    with pytest.raises(ExceptionGroup) as caught:
        trio.run(run, chain)
    assert caught.group_contains(FileNotFoundError)


def test_obituary_limits_itself_to_what_was_said() -> None:
    assert obituary("s", -64, []) == "s was killed by SIGRTMAX"
    assert obituary("s", -99, []) == "s was killed by signal 99"
    assert obituary("s", 1, ["", "error: a", "bye"]) == "s exited with code 1: a"


class TestSockets:
    def test_a_name_that_does_not_resolve(self) -> None:
        with pytest.raises(CliError, match=r"^the stage cannot listen on no\.such\.host\.invalid:1: "):
            listen_on(Endpoint("no.such.host.invalid", 1), "the stage")

    def test_an_address_of_another_machine(self) -> None:
        with pytest.raises(CliError, match=r"^the stage cannot listen on 192\.0\.2\.1:0: "):
            listen_on(Endpoint("192.0.2.1", 0), "the stage")

    def test_endpoint_is_where_it_listens(self) -> None:
        with listen_on(Endpoint("127.0.0.1", 0), "it") as listener:
            socket.create_connection(listener.getsockname()).close()
            assert endpoint_of(listener) == Endpoint("127.0.0.1", listener.getsockname()[1])

    def test_the_host_for_a_url(self) -> None:
        assert url_host(Endpoint("0.0.0.0", 5)) == Endpoint("127.0.0.1", 5)
        assert url_host(Endpoint("::", 5)) == Endpoint("::1", 5)
        assert url_host(Endpoint("10.0.0.1", 5)) == Endpoint("10.0.0.1", 5)
