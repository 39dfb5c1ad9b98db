"""Stop signals: in order, at once when repeated, and in any case in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import trio

from skippy.cli import stopping
from skippy.cli.stopping import STOP_SIGNALS, Stop, stop_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_cancels(number: signal.Signals) -> None:
    cleaned_up = False

    async def main() -> None:
        nonlocal cleaned_up
        os.kill(os.getpid(), number)
        try:
            with trio.fail_after(10):
                await trio.sleep_forever()
        finally:
            cleaned_up = True

    before = signal.getsignal(number)
    with stop_signals(60) as stop:
        trio.run(stop.run, main)
    assert cleaned_up
    assert signal.getsignal(number) is before
    assert "stop watchdog" not in [thread.name for thread in threading.enumerate()]


def test_who_ends_by_itself_is_not_cancelled() -> None:
    steps: list[str] = []

    async def main() -> None:
        stop.in_order()
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(10):
            await stop.requested.wait()
        await trio.lowlevel.checkpoint()
        steps.append("ended in order")

    with stop_signals(60) as stop:
        trio.run(stop.run, main)
    assert steps == ["ended in order"]


def test_a_request_to_end_at_once_cancels_even_so() -> None:
    cancelled = False

    async def main() -> None:
        nonlocal cancelled
        stop.in_order()
        threading.Thread(target=stop.request, kwargs={"at_once": True}).start()
        try:
            with trio.fail_after(10):
                await trio.sleep_forever()
        except trio.Cancelled:
            cancelled = True
            raise

    stop = Stop()
    trio.run(stop.run, main)
    assert cancelled


def test_a_signal_before_the_loop_runs_counts() -> None:
    reached = False

    async def main() -> None:
        nonlocal reached
        await trio.lowlevel.checkpoint()
        reached = True

    with stop_signals(60) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        trio.run(stop.run, main)
    assert not reached


def test_without_a_signal_the_end_of_main_is_the_end() -> None:
    with stop_signals(60) as stop:
        trio.run(stop.run, trio.lowlevel.checkpoint)
    assert not stop.requested.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_was_ignored_stays_so(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals(60):
            assert signal.getsignal(number) is signal.SIG_IGN
        with stop_signals(60, patient=True):
            assert signal.getsignal(number) is not signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


PROGRAM = """
import os, signal, sys, threading, time, trio
from skippy.cli.stopping import stop_signals
def abandon():
    os.write(1, b"abandoned\\n")
async def main():
    {body}
with stop_signals({secs}, abandon=abandon, patient={patient}) as stop:
    print("up", flush=True)
    {run}
print("in order", flush=True)
"""
SHIELDED = """
    with trio.CancelScope(shield=True):
        await stop.requested.wait()
        print("asked", flush=True)
        await trio.sleep(60)
"""


def start(
    body: str, secs: float, *, run: str = "trio.run(stop.run, main)", patient: bool = False
) -> subprocess.Popen[str]:
    program = PROGRAM.format(body=body, secs=secs, run=run, patient=patient)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("block", ["time.sleep(60)", "trio.run(stop.run, main)"])
def test_a_stop_that_takes_too_long_ends_the_process(block: str) -> None:
    """The event loop may wait behind a shield, or be held up itself."""
    with start(SHIELDED, 0.2, run=block) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 70
    assert out.endswith("abandoned\n")


def test_it_ends_also_where_what_is_abandoned_cannot_be() -> None:
    with start(SHIELDED, 0.2, run="time.sleep(60)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.stdout.close()  # so that printing fails
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 70


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    with start(SHIELDED, 60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        # As a person would: not in the same moment.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(stopping.INSIST_SECS * 1.5)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out == "abandoned\n"


def test_the_same_signal_sent_twice_is_one() -> None:
    body = """
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    await trio.sleep_forever()
"""
    with start(body, 60) as process:
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == "up\nin order\n"


def test_a_patient_process_takes_any_number() -> None:
    body = """
    with trio.CancelScope(shield=True):
        await stop.requested.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await trio.lowlevel.checkpoint()
"""
    with start(body, 60, patient=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == "in order\n"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
