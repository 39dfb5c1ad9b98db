"""A stop signal while a command writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from skippy.cli.ending import ending_in_order
from skippy.models import write_slice
from skippy.models.gguf import GGUFHeader
from tests.support.tiny_models import write_tiny


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_slicing_leaves_nothing_half_written(tmp_path: Path, number: signal.Signals) -> None:
    header = GGUFHeader.read(write_tiny(tmp_path / "model.gguf"))
    folder = tmp_path / "out"
    folder.mkdir()
    before: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        before.extend(os.listdir(folder))
        if before:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended, ending_in_order():
        write_slice(header, folder / "slice.gguf", 0, 1, progress)
    assert ended.value.code == 128 + number
    assert len(before) == 1, "the signal came while the file was being written"
    assert os.listdir(folder) == []
    assert signal.getsignal(number) is signal.SIG_DFL


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
