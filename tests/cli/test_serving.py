"""Running one stage until a signal."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.testing

from skippy.cli import serving
from skippy.cli.serving import run_until_signal


@pytest.mark.parametrize("number", serving.STOP_SIGNALS)
async def test_a_signal_cancels(number: signal.Signals) -> None:
    cleaned_up = False

    async def main() -> None:
        nonlocal cleaned_up
        os.kill(os.getpid(), number)
        try:
            await trio.sleep_forever()
        finally:
            cleaned_up = True

    with trio.fail_after(10):
        await run_until_signal(main, None)
    assert cleaned_up


@pytest.mark.parametrize("number", serving.STOP_SIGNALS)
async def test_more_signals_do_not_disturb_the_clean_up(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(serving, "exit_after", asked.append)
    steps = 0

    async def main() -> None:
        nonlocal steps
        os.kill(os.getpid(), number)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                while steps < 3:
                    steps += 1
                    os.kill(os.getpid(), number)
                    await trio.testing.wait_all_tasks_blocked()

    with trio.fail_after(10):
        await run_until_signal(main, 2.5)
    assert steps == 3
    assert asked == [2.5]


async def test_without_a_signal_the_end_of_main_is_the_end() -> None:
    with trio.fail_after(10):
        await run_until_signal(trio.lowlevel.checkpoint, None)


async def test_a_stop_that_takes_too_long_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(serving, "exit_after", asked.append)

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

    with trio.fail_after(10):
        await run_until_signal(main, 2.5)
    assert asked == [2.5]
