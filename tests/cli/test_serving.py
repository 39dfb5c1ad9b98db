"""Running one stage: signals, and settings that need a look at the model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click
import pytest
import structlog
import trio
from gguf import GGUFValueType

from skippy.cli import serving
from skippy.cli.serving import check_mtp, run_until_signal
from skippy.config import StageConfig
from tests.support.tiny_models import write_tiny

from .support import STAGE


def config_of(model: Path, *, mtp: bool) -> StageConfig:
    return StageConfig(**STAGE | {"model_path": str(model), "native_mtp_enabled": mtp})


def test_mtp_on_a_model_without_such_layers_is_a_notice(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    with structlog.testing.capture_logs() as logs:
        check_mtp(config_of(model, mtp=False))
        assert logs == []
        check_mtp(config_of(model, mtp=True))
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["event"].startswith("native_mtp_enabled has no effect")


def test_mtp_on_a_model_with_such_layers_is_refused(tmp_path: Path) -> None:
    extra = {"llama.nextn_predict_layers": (GGUFValueType.UINT32, 1)}
    model = write_tiny(tmp_path / "m.gguf", extra=extra)
    check_mtp(config_of(model, mtp=False))
    with pytest.raises(click.ClickException, match="^native_mtp_enabled: .* not available yet"):
        check_mtp(config_of(model, mtp=True))


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
