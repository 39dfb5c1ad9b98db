"""The supervisor of child processes, with small scripts in place of stages."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import trio

from skippy.cli import launch
from skippy.cli.errors import CliError
from skippy.cli.launch import Chain, Child
from skippy.cli.restarts import RestartPolicy
from skippy.cli.sockets import endpoint_of, listen_on
from skippy.cli.supervise import Supervisor
from skippy.config import Endpoint, OpenAIOptions, StageOptions
from skippy.topology import make_stage_configs, make_topology, plan_even

PRELUDE = """
import json, os, signal, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
settings = json.loads(sys.stdin.buffer.readline())
def tell(line):
    os.write(int(options["--status-fd"]), line + b"\\n")
"""
SERVING = 'tell(b"serving")\n'
READY = SERVING + 'tell(b"ready")\n'
UNTIL_PARENT_ENDS = "for _ in sys.stdin.buffer: pass\n"  # a handled signal is seen behind each line
ENDS_IN_ORDER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
TOKEN = "a-secret-token"
AT_ONCE = RestartPolicy(max_restarts=2, first_pause_secs=0.0)


def make_chain(*scripts: str | Sequence[str], grace_secs: float = 3.5) -> Chain:
    """A chain whose stages are Python scripts, or other commands."""
    listeners = [listen_on(Endpoint("127.0.0.1", 0), "stage") for _ in scripts]
    topology = make_topology(
        plan_even(len(scripts), len(scripts)),
        list(map(endpoint_of, listeners)),
        topology_id="t",
        model_id="m",
    )
    configs = make_stage_configs(topology, run_id="r", model_path="m.gguf")
    children = [
        Child(
            config=config,
            listener=listener,
            command=(sys.executable, "-c", PRELUDE + script) if isinstance(script, str) else script,
        )
        for config, listener, script in zip(configs, listeners, scripts, strict=True)
    ]
    children[0].openai_listener = listen_on(Endpoint("127.0.0.1", 0), "http")
    return Chain(
        children=children,
        topology=topology,
        options=StageOptions(link_token=TOKEN),
        openai=OpenAIOptions(bind_addr=str(endpoint_of(children[0].openai_listener))),
        grace_secs=grace_secs,
    )


async def run(
    chain: Chain,
    *,
    ready: Callable[[], None] = lambda: None,
    loading: Callable[[], None] = lambda: None,
    relay: bool = False,
    policy: RestartPolicy | None = None,
) -> Supervisor:
    supervisor = Supervisor(chain, relay=relay, ready=ready, loading=loading, policy=policy)
    with trio.fail_after(30):
        await supervisor.run()
    return supervisor


def only_error(caught: pytest.ExceptionInfo[BaseException]) -> str:
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, CliError)
    return error.format_message()


def all_gone(chain: Chain) -> bool:
    return all(child.process is not None and child.process.returncode is not None for child in chain.children)


def lives(folder: Path) -> str:
    """A script that counts its lives: ``life`` is 1 in the first."""
    return f"""
path = {str(folder / "life")!r} + settings["config"]["stage_id"]
life = 1 + (int(open(path).read()) if os.path.exists(path) else 0)
open(path, "w").write(str(life))
"""


class TestStarting:
    async def test_children_get_settings_and_sockets(self, tmp_path: Path) -> None:
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
        assert settings["grace_secs"] == 3.5
        assert TOKEN not in " ".join(arguments)

    async def test_what_children_have_loaded_is_told(self) -> None:
        load = 'os.write(int(options["--status-fd"]), b"load 5 10\\nlo"); time.sleep(0)\n'
        rest = 'os.write(int(options["--status-fd"]), b"ad 10 10\\nready\\n")\n'
        chain = make_chain(load + rest + UNTIL_PARENT_ENDS)
        seen: list[tuple[int, int] | str] = []
        with trio.CancelScope() as scope:

            def ready() -> None:
                seen.append("ready")
                scope.cancel()

            await run(chain, ready=ready, loading=lambda: seen.append(chain.children[0].loaded))
        assert seen == [(5, 10), (10, 10), "ready"]

    async def test_only_stage_0_means_ready(self) -> None:
        chain = make_chain(UNTIL_PARENT_ENDS, READY + 'tell(b"load 1 1")\n' + UNTIL_PARENT_ENDS)
        told: list[str] = []
        with trio.CancelScope() as scope:
            await run(chain, ready=lambda: told.append("ready"), loading=scope.cancel)
        assert scope.cancelled_caught
        assert told == []

    async def test_relayed_lines_name_their_stage(self, capsys: pytest.CaptureFixture[str]) -> None:
        chain = make_chain('sys.stderr.write("one\\ntwo" + "x" * 20000); sys.exit(1)')
        with pytest.raises(ExceptionGroup):
            await run(chain, relay=True)
        first, second = capsys.readouterr().err.splitlines()
        assert first == "[stage-0] one"
        assert second == "[stage-0] " + "x" * launch.MAX_LINE

    async def test_warnings_of_stages_are_logged_once_in_a_while(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Their other lines are not, and a flood of warnings is cut off."""
        script = """
def entry(level, event, **fields):
    entry = {"event": event, "level": level, "timestamp": time.time_ns(), **fields}
    print(json.dumps(entry), file=sys.stderr)
entry("info", "the boundary is read by C")
for _ in range(9): entry("warning", "a lane was lost", reason="stage 2 sent nothing for 10 s")
entry("error", "a fault", exception="Traceback:\\n  File\\nValueError: why")
print("native words", file=sys.stderr)
for number in range(30): entry("warning", "another", number=number)
sys.exit(1)
"""
        with pytest.raises(ExceptionGroup):
            await run(make_chain(script))
        logged = [(record.levelname, record.msg) for record in caplog.records if record.name == "skippy"]
        told = [{k: v for k, v in msg.items() if k not in ("level", "timestamp")} for _, msg in logged]
        assert told[:2] == [
            {"event": "[stage-0] a lane was lost", "reason": "stage 2 sent nothing for 10 s"},
            {"event": "[stage-0] a fault", "exception": "ValueError: why"},
        ]
        assert [level for level, _ in logged[:3]] == ["WARNING", "ERROR", "WARNING"]
        assert [entry.get("number") for entry in told[2:]] == [*range(18), None]
        assert told[-1]["event"].startswith("[stage-0] warns of more than is shown here")

    async def test_a_program_that_does_not_exist(self) -> None:
        chain = make_chain(["/no/such/program"], READY + UNTIL_PARENT_ENDS)
        with pytest.raises(ExceptionGroup) as caught:
            await run(chain)
        assert caught.group_contains(FileNotFoundError)
        assert chain.children[1].process is None or chain.children[1].process.returncode is not None


class TestFirstStart:
    async def test_a_child_that_fails_ends_the_others_at_once(self) -> None:
        fail = (
            'print("starting", file=sys.stderr); print("error: no such model", file=sys.stderr); sys.exit(1)'
        )
        chain = make_chain(READY + UNTIL_PARENT_ENDS, fail)
        with pytest.raises(ExceptionGroup) as caught:
            await run(chain)
        assert only_error(caught) == "stage-1 (layers 1:2) exited with status 1: no such model"
        assert all_gone(chain)

    async def test_a_child_that_is_killed(self) -> None:
        chain = make_chain(
            UNTIL_PARENT_ENDS, 'print("last words", file=sys.stderr); os.kill(os.getpid(), signal.SIGSEGV)'
        )
        with pytest.raises(ExceptionGroup) as caught:
            await run(chain)
        assert only_error(caught) == (
            "stage-1 (layers 1:2) was killed by signal SIGSEGV (a crash in native code); "
            "its last lines were:\n  last words"
        )
        assert all_gone(chain)

    async def test_of_a_crash_the_beginning_of_its_stack_is_kept(self) -> None:
        crash = r"""
for line in ["before", "Fatal Python error: Aborted", "", *(f"  File {n}" for n in range(100))]:
    print(line, file=sys.stderr)
sys.stderr.flush()
os.kill(os.getpid(), signal.SIGABRT)
"""
        with pytest.raises(ExceptionGroup) as caught:
            await run(make_chain(crash))
        lines = only_error(caught).splitlines()
        assert lines[0].endswith("was killed by signal SIGABRT (native code gave up); its last lines were:")
        assert lines[1:] == ["  Fatal Python error: Aborted", *(f"    File {n}" for n in range(10))]

    async def test_a_child_that_ends_without_reason_is_an_error_too(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await run(make_chain("sys.exit(0)"))
        assert only_error(caught) == "stage-0 (layers 0:1) exited with status 0"


class TestRestarting:
    async def test_a_crashed_stage_is_restarted_and_the_others_stay(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        crash_once = lives(tmp_path) + SERVING + "if life == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        # Stage 0 hears of the outage and of its end on standard input.
        notices = tmp_path / "notices"
        listen = f"""
tell(b"serving")
while True:
    line = sys.stdin.buffer.readline()
    open({str(notices)!r}, "ab").write(line)
    if json.loads(line)["notice"] is None:
        tell(b"ready")
        break
"""
        chain = make_chain(listen + UNTIL_PARENT_ENDS, crash_once + UNTIL_PARENT_ENDS)
        with trio.CancelScope() as scope:
            await run(chain, ready=scope.cancel, policy=AT_ONCE)
        assert scope.cancelled_caught
        assert all_gone(chain)
        assert (tmp_path / "lifestage-1").read_text() == "2"
        down, up = [json.loads(line)["notice"] for line in notices.read_text().splitlines()]
        assert down == (
            "stage-1 (layers 1:2) was killed by signal SIGKILL (perhaps out of memory); "
            "it is restarted (1 of 2)"
        )
        assert up is None
        events = [record.msg for record in caplog.records if record.name == "skippy"]
        assert [event["event"] for event in events] == [
            "a stage has crashed and is restarted",
            "a stage is up again",
        ]
        assert events[0]["stage_id"] == events[1]["stage_id"] == "stage-1"
        assert chain.children[1].process is not None
        assert events[1]["pid"] == chain.children[1].process.pid

    async def test_crashes_with_requests_in_between_are_not_in_a_row(self, tmp_path: Path) -> None:
        script = (
            lives(tmp_path)
            + SERVING
            + """
if life % 2:
    tell(b"served")
if life < 8:
    sys.exit(1)
tell(b"ready")
"""
        )
        chain = make_chain(READY + UNTIL_PARENT_ENDS, READY + UNTIL_PARENT_ENDS)
        chain.children[0].command = (sys.executable, "-c", PRELUDE + script + UNTIL_PARENT_ENDS)
        with trio.CancelScope() as scope:
            await run(chain, ready=scope.cancel, policy=AT_ONCE)
        assert scope.cancelled_caught
        assert (tmp_path / "lifestage-0").read_text() == "8"

    async def test_a_stage_keeps_its_port_and_who_dials_meanwhile_is_served(self, tmp_path: Path) -> None:
        """The client connects in the first life, which never accepts, and is answered in the second."""
        serve = f"""
{lives(tmp_path)}
import socket
tell(b"serving")
if life == 1:
    open({str(tmp_path / "go")!r}, "w")
    while not os.path.exists({str(tmp_path / "crash")!r}): time.sleep(0.01)
    os.abort()
listener = socket.socket(fileno=int(options["--listen-fd"]))
client, _ = listener.accept()
client.sendall(b"life 2")
client.close()
tell(b"ready")
sys.stdin.buffer.read()
"""
        chain = make_chain(serve)
        endpoint = endpoint_of(chain.children[0].listener)
        with socket.create_connection((endpoint.host, endpoint.port)) as client:
            (tmp_path / "crash").touch()
            with trio.CancelScope() as scope:
                await run(chain, ready=scope.cancel, policy=AT_ONCE)
            client.settimeout(10)
            assert client.recv(100) == b"life 2"
        assert (tmp_path / "go").exists()

    async def test_a_stage_that_keeps_crashing_is_given_up(self) -> None:
        crash = SERVING + 'print("out of luck", file=sys.stderr); os.abort()'
        chain = make_chain(READY + UNTIL_PARENT_ENDS, crash)
        with pytest.raises(ExceptionGroup) as caught:
            await run(chain, policy=AT_ONCE)
        assert only_error(caught) == (
            "stage-1 (layers 1:2) keeps crashing: it was restarted 2 times in a row, then was killed by "
            "signal SIGABRT (native code gave up); its last lines were:\n  out of luck"
        )
        assert all_gone(chain)

    async def test_no_restarts_where_none_are_wanted(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await run(make_chain(SERVING + "sys.exit(5)"), policy=RestartPolicy(max_restarts=0))
        assert only_error(caught) == "stage-0 (layers 0:1) exited with status 5"

    async def test_a_stage_that_calls_itself_misconfigured_is_not_restarted_again(
        self, tmp_path: Path
    ) -> None:
        script = lives(tmp_path) + "if life > 1: print('error: not mine', file=sys.stderr); sys.exit(2)\n"
        with pytest.raises(ExceptionGroup) as caught:
            await run(make_chain(script + SERVING + "sys.exit(1)"), policy=AT_ONCE)
        assert only_error(caught) == (
            "stage-0 (layers 0:1) keeps crashing: it was restarted once, then exited with status 2: not mine"
        )
        assert (tmp_path / "lifestage-0").read_text() == "2"

    async def test_a_stop_does_not_wait_for_a_pause(self) -> None:
        told = SERVING + "sys.stdin.buffer.readline()\n" + READY  # a notice: stage 1 has crashed
        chain = make_chain(told + UNTIL_PARENT_ENDS, SERVING + "sys.exit(1)")
        policy = RestartPolicy(first_pause_secs=1000, longest_pause_secs=1000)
        with trio.CancelScope() as scope:
            await run(chain, ready=scope.cancel, policy=policy)
        assert scope.cancelled_caught
        assert all_gone(chain)

    async def test_a_thousand_lives_leave_nothing(self) -> None:
        """Descriptors and tasks are the same in the 1,000th life as in the first."""
        seen: list[tuple[int, int]] = []

        def note() -> None:
            tasks = trio.lowlevel.current_statistics().tasks_living
            seen.append((len(os.listdir("/dev/fd")), tasks))

        chain = make_chain(["/bin/sh", "-c", 'echo "load 1 1\nserving" > /dev/fd/$4; read line', "sh"])
        policy = RestartPolicy(max_restarts=999, first_pause_secs=0.0)
        supervisor = Supervisor(chain, relay=False, ready=lambda: None, loading=note, policy=policy)
        with pytest.raises(ExceptionGroup) as caught, trio.fail_after(120):
            await supervisor.run()
        assert "restarted 999 times in a row" in only_error(caught)
        assert len(seen) == 1000
        assert max(seen[10:]) == max(seen[:10])
        assert psutil.Process().children() == []


class TestStopping:
    async def test_a_child_that_does_not_stop_is_killed(self, caplog: pytest.LogCaptureFixture) -> None:
        """The log says so, and with its last words, but not with entries that warn of nothing."""
        words = """
print("stuck", file=sys.stderr)
print(json.dumps({"event": "the boundary is read by C", "level": "info"}), file=sys.stderr, flush=True)
"""
        chain = make_chain(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + words + READY + "time.sleep(60)",
            grace_secs=0.1,
        )
        supervisor = Supervisor(chain, relay=False, ready=lambda: scope.cancel(), loading=lambda: None)
        with trio.CancelScope() as scope, trio.fail_after(30):
            await supervisor.run()
        process = chain.children[0].process
        assert process is not None
        assert process.returncode == -9
        assert not psutil.pid_exists(process.pid)
        assert supervisor.unreturned
        [entry] = [record.msg for record in caplog.records if record.name == "skippy"]
        assert isinstance(entry, dict)
        assert entry["reason"] == (
            "stage-0 (layers 0:1) was killed because it did not stop within the grace period; "
            "its last lines were:\n  stuck"
        )

    @pytest.mark.parametrize(("leaves", "grace_secs"), [("", 60.0), ('subprocess.Popen(["cat"])\n', 0.9)])
    async def test_a_child_that_somebody_else_kills_is_not_overdue(
        self, caplog: pytest.LogCaptureFixture, leaves: str, grace_secs: float
    ) -> None:
        """Not even where a process of its own holds its stderr open when the grace period is over."""
        killed = "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        chain = make_chain(
            "import subprocess\n" + killed + leaves + READY + UNTIL_PARENT_ENDS, grace_secs=grace_secs
        )
        supervisor = Supervisor(chain, relay=False, ready=lambda: scope.cancel(), loading=lambda: None)
        with trio.CancelScope() as scope, trio.fail_after(30):
            await supervisor.run()
        assert all_gone(chain)
        assert not supervisor.unreturned
        [entry] = [record.msg for record in caplog.records if record.name == "skippy"]
        assert isinstance(entry, dict)
        assert (entry["level"], entry["event"]) == ("warning", "a stage was killed while the chain stopped")
        assert entry["reason"] == (
            "stage-0 (layers 0:1) was killed by signal SIGKILL (perhaps out of memory)"
        )

    async def test_a_stopped_child_is_killed_too(self) -> None:
        """Stopped as by SIGSTOP: no signal but SIGKILL reaches it."""
        chain = make_chain(READY + UNTIL_PARENT_ENDS, grace_secs=0.1)
        with trio.CancelScope() as scope:

            def stop() -> None:
                assert chain.children[0].process is not None
                chain.children[0].process.send_signal(signal.SIGSTOP)
                scope.cancel()

            await run(chain, ready=stop)
        assert all_gone(chain)

    async def test_stage_0_stops_first(self, tmp_path: Path) -> None:
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
        supervisor = Supervisor(chain, relay=False, ready=lambda: scope.cancel(), loading=lambda: None)
        with trio.CancelScope() as scope, trio.fail_after(30):
            await supervisor.run()
        assert all_gone(chain)
        assert log.read_text() == "01"
        assert not supervisor.unreturned

    async def test_the_others_need_not_wait_for_what_stage_0_still_writes(self, tmp_path: Path) -> None:
        """It ends after they have: else it would be killed. All know how long they have."""
        gone, up = tmp_path / "gone", tmp_path / "up"
        told = f"""
def stop(*_):
    open({str(tmp_path)!r} + "/" + options["--listen-fd"], "w").write(sys.stdin.readline())
"""
        first = f"""{told}    tell(b"alone")
    while not os.path.exists({str(gone)!r}): time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while not os.path.exists({str(up)!r}): time.sleep(0.01)
{READY}
while True: time.sleep(60)
"""
        second = f"""{told}    open({str(gone)!r}, "w")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open({str(up)!r}, 'w')
while True: time.sleep(60)
"""
        chain = make_chain(first, second, grace_secs=60)
        names = [str(child.listener.fileno()) for child in chain.children]
        supervisor = Supervisor(chain, relay=False, ready=lambda: scope.cancel(), loading=lambda: None)
        with trio.CancelScope() as scope, trio.fail_after(30):
            await supervisor.run()
        assert all_gone(chain)
        assert not supervisor.unreturned
        for name in names:
            assert json.loads((tmp_path / name).read_text()) == {"notice": None, "kill_secs": 60}

    async def test_how_stage_0_ended_before_says_nothing_of_its_life_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It ended in order and was restarted: at the stop its requests are waited for as ever."""
        again = lives(tmp_path) + SERVING + 'if life == 1: tell(b"alone"); sys.exit(0)\n'
        chain = make_chain(ENDS_IN_ORDER + again + READY + UNTIL_PARENT_ENDS, UNTIL_PARENT_ENDS)
        front, behind = chain.children
        asked: list[tuple[str, bool]] = []
        terminate = trio.Process.terminate

        def note(process: trio.Process) -> None:
            asked.append(("behind" if process is behind.process else "front", front.alive))
            terminate(process)

        monkeypatch.setattr(trio.Process, "terminate", note)
        with trio.CancelScope() as scope:
            await run(chain, ready=scope.cancel, policy=AT_ONCE)
        assert scope.cancelled_caught
        assert (tmp_path / "lifestage-0").read_text() == "2"
        assert asked == [("front", True), ("behind", False)]

    async def test_stage_0_may_say_just_before_the_stop_that_it_needs_no_others(self, tmp_path: Path) -> None:
        """Somebody has stopped it first: the others do not wait for its end."""
        gone, up = tmp_path / "gone", tmp_path / "up"
        first = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not os.path.exists({str(up)!r}): time.sleep(0.01)
tell(b"alone\\nready")
while not os.path.exists({str(gone)!r}): time.sleep(0.01)
"""
        second = f"""
def stop(*_):
    open({str(gone)!r}, "w")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open({str(up)!r}, "w")
while True: time.sleep(60)
"""
        chain = make_chain(first, second, grace_secs=60)
        with trio.CancelScope() as scope:
            await run(chain, ready=scope.cancel)
        assert scope.cancelled_caught
        assert all_gone(chain)
