"""``skippy certify``: small models, cut right and wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skippy.cli import certify
from skippy.cli.certify import parse_cuts
from skippy.cli.errors import SettingError
from skippy.engine.apart import COMMAND, ChildFailed, run_apart, run_files
from skippy.models import FAMILIES, families, write_package, write_slice_of
from skippy.models.tiny import write_tiny_model
from tests.cli.support import run_cli
from tests.support.checkpoints import write_checkpoint
from tests.support.splitting import split_model

Capture = pytest.CaptureFixture[str]
ALL = "15 of 15 tokens agree"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SKIPPY_CACHE", str(folder))
    return folder


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves the seconds in which a process starts."""

    def run(
        files: Sequence[Path], out: Path, expected: Path | None, *, steps: int, threads: int, timeout: float
    ) -> None:
        run_files(
            [str(path) for path in files],
            str(out),
            None if expected is None else str(expected),
            steps,
            threads,
        )

    monkeypatch.setattr(certify, "run_apart", run)


def with_family(monkeypatch: pytest.MonkeyPatch, architecture: str, **changes: Any) -> None:
    table = {**FAMILIES, architecture: attrs.evolve(FAMILIES[architecture], **changes)}
    monkeypatch.setattr(families, "FAMILIES", table)


def test_exact_in_processes_of_their_own(capsys: Capture, tmp_path: Path, cache: Path) -> None:
    model = write_tiny_model(tmp_path / "gemma.gguf", "gemma")
    record = tmp_path / "record.json"
    outcome = run_cli(
        capsys, "certify", model, "--cuts", "2, 2+4", "--steps", "2", "--threads", "1", "--json", record
    )
    assert outcome.out.splitlines() == [
        f"model           {model}",
        "architecture    gemma, 6 layers",
        "layer 2         exact, 11 of 11 tokens agree",
        "layers 2 + 4    exact, 11 of 11 tokens agree",
        "2 of 2 exact",
    ]
    assert (outcome.code, outcome.err) == (0, "")
    written = json.loads(record.read_text())
    assert written["cuts"] == [
        {
            "cuts": cuts,
            "verdict": "exact",
            "largest_error": 0.0,
            "tokens_agreed": 11,
            "tokens": 11,
            "reason": None,
        }
        for cuts in ([2], [2, 4])
    ]
    assert (written["record_version"], written["architecture"], written["steps"]) == (1, "gemma", 2)
    assert re.fullmatch("[0-9a-f]{64}", written["source_sha256"])
    assert list(cache.iterdir()) == []  # slices of a trial are not kept


@pytest.mark.usefixtures("in_this_process")
def test_a_wrong_line_of_the_table_shows(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_family(monkeypatch, "gemma", entry=None)  # llama.cpp scales the boundary by 16 once more
    model = write_tiny_model(tmp_path / "gemma.gguf", "gemma")
    record = tmp_path / "record.json"
    outcome = run_cli(capsys, "certify", model, "--cuts", "3", "--threads", "1", "--json", record)
    assert outcome.code == 1
    (entry,) = json.loads(record.read_text())["cuts"]
    assert (entry["verdict"], entry["reason"]) == ("differs", None)
    assert entry["largest_error"] > 1e-2
    assert outcome.out.splitlines()[-2:] == [
        f"layer 3         differs, logits by up to {entry['largest_error']:.3g}, "
        f"{entry['tokens_agreed']} of 15 tokens agree",
        "0 of 1 exact, 1 differs",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_all_cuts_of_a_family_with_rules(capsys: Capture, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "hy.gguf", "hy_v4")
    outcome = run_cli(capsys, "certify", model, "--threads", "1")
    assert outcome.code == 0
    verdicts = [line.split()[2].strip(",:") for line in outcome.out.splitlines()[2:-1]]
    assert verdicts == ["refused", "exact", "refused", "exact", "refused"]
    assert "layer 1 uses the positions that an earlier layer has found" in outcome.out
    assert outcome.out.endswith("\n2 of 5 exact, 3 refused\n")


def test_a_family_that_cannot_be_cut_is_refused_and_not_run(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(certify, "run_apart")
    model = write_tiny_model(tmp_path / "hrm.gguf", "hrm_text")
    outcome = run_cli(capsys, "certify", model, "--json", tmp_path / "record.json")
    assert outcome.code == 0
    first, *others = outcome.out.splitlines()[2:-1]
    assert first.startswith(
        "layer 1         refused: models of architecture 'hrm_text' cannot be split yet: "
    )
    assert others == [f"layer {cut}         refused, likewise" for cut in (2, 3, 4, 5)]
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["source_sha256"] is None
    assert {entry["verdict"] for entry in written["cuts"]} == {"refused"}
    assert all("one pass through a pipeline" in entry["reason"] for entry in written["cuts"])


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", ["files", "package", "checkpoint"])
def test_other_kinds_of_models(capsys: Capture, tmp_path: Path, kind: str) -> None:
    arguments: list[str] = []
    if kind == "checkpoint":
        model = write_checkpoint(tmp_path / "model", shards=2)
        arguments = ["--checkpoint-quantization", "Q8_0"]
    else:
        model = write_tiny_model(tmp_path / "llama.gguf", "llama", 3)
        if kind == "files":
            model = split_model(model, tmp_path)[0]
        else:
            model = write_package(model, tmp_path / "package").folder
    record = tmp_path / "record.json"
    outcome = run_cli(
        capsys, "certify", model, "--cuts", "1+2", "--threads", "1", "--json", record, *arguments
    )
    assert outcome.out.splitlines()[-2:] == [f"layers 1 + 2    exact, {ALL}", "1 of 1 exact"]
    written = json.loads(record.read_text())
    assert (written["architecture"], written["layers"]) == ("llama", 3)
    assert written["checkpoint_quantization"] == ("Q8_0" if kind == "checkpoint" else None)


@pytest.mark.usefixtures("in_this_process")
def test_a_package_that_was_changed(capsys: Capture, tmp_path: Path) -> None:
    model = write_package(write_tiny_model(tmp_path / "llama.gguf", "llama", 3), tmp_path / "package").folder
    part = next(model.glob("**/*layer*1*.gguf"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    arguments = ["certify", model, "--cuts", "1", "--threads", "1"]
    outcome = run_cli(capsys, *arguments)
    assert outcome.code == 1
    assert "is damaged or was changed: its SHA-256 is" in outcome.err
    outcome = run_cli(capsys, *arguments, "--no-verify")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "1 of 1 exact")


def test_a_process_that_dies_is_a_result(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(files: Sequence[Path], out: Path, expected: Path | None, **_: Any) -> None:
        if expected is not None and len(files) == 2:
            raise ChildFailed("the process was killed by signal SIGABRT")
        np.save(out, np.ones((15, 128), np.float32))

    monkeypatch.setattr(certify, "run_apart", run)
    model = write_tiny_model(tmp_path / "llama.gguf", "llama")
    record = tmp_path / "record.json"
    outcome = run_cli(capsys, "certify", model, "--cuts", "1,2+3", "--json", record)
    assert outcome.code == 1
    assert outcome.out.splitlines()[2:] == [
        "layer 1         failed: the process was killed by signal SIGABRT",
        f"layers 2 + 3    exact, {ALL}",
        "1 of 2 exact, 1 failed",
    ]
    entry = json.loads(record.read_text())["cuts"][0]
    assert (entry["verdict"], entry["reason"]) == ("failed", "the process was killed by signal SIGABRT")


def test_an_unsplit_model_that_does_not_run(capsys: Capture, tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...] | None] = {"blk.1.attn_q.weight": None}
    model = write_tiny_model(tmp_path / "llama.gguf", "llama", tensors=tensors)
    outcome = run_cli(capsys, "certify", model, "--cuts", "1")
    assert outcome.code == 1
    assert outcome.err.startswith(
        f"error: {model}: the unsplit model does not run: the process exited with status 1: "
    )
    assert "blk.1.attn_q.weight" in outcome.err


@pytest.mark.parametrize(
    ("code", "timeout", "text"),
    [
        ("import os; os.abort()", 60, r"the process was killed by signal SIGABRT \(native code gave up\)"),
        ("print('x.cpp:1: GGML_ASSERT(a) failed\\nmore', flush=True); import os; os.abort()", 60, r"GGML_A"),
        ("raise SystemExit('error: no such file')", 60, "the process exited with status 1: no such file"),
        ("import sys; sys.stdin.readline(); sys.stdin.read()", 0.3, r"did not end within 0\.3 s"),
    ],
    ids=["abort", "assertion", "error", "timeout"],
)
def test_how_a_process_ended(tmp_path: Path, code: str, timeout: float, text: str) -> None:
    with pytest.raises(ChildFailed, match=text):
        run_apart(
            [tmp_path / "a.gguf"],
            tmp_path / "out.npy",
            None,
            steps=1,
            threads=1,
            timeout=timeout,
            command=(sys.executable, "-c", code),
        )


def test_the_process_is_not_for_people() -> None:
    done = subprocess.run(
        COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: skippy.engine.apart is started by skippy; run `skippy certify` instead\n",
    )


def test_the_process_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    model = write_tiny_model(tmp_path / "llama.gguf", "llama")
    settings = {"files": [str(model)], "out": str(out), "expected": None, "steps": 40, "threads": 1}
    done = subprocess.run(  # closes its standard input at once, while llama.cpp is being imported
        COMMAND, input=json.dumps(settings) + "\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr, out.exists()) == (1, "", "", False)


def test_which_cuts() -> None:
    assert parse_cuts("all", 4) == [(1,), (2,), (3,)]
    assert parse_cuts("3, 1+2,1 + 2 + 3", 4) == [(3,), (1, 2), (1, 2, 3)]
    for text, error in (
        ("", "'' is no layer; give all, N,M or N+M"),
        ("1,x", "'x' is no layer"),
        ("-1", "'-1' is no layer"),
        ("²", "is no layer"),
        ("0", "'0' does not fit a model with 4 layers: cuts are 1 to 3, ascending"),
        ("4", "'4' does not fit"),
        ("2+2", "'2+2' does not fit"),
        ("1," * 65, "at most 64, or all"),
    ):
        with pytest.raises(SettingError, match=re.escape(error)):
            parse_cuts(text, 4)


def test_what_cannot_be_asked_for(capsys: Capture, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "llama.gguf", "llama")
    part = write_slice_of(model, tmp_path / "part.gguf", 0, 2).path
    single = write_tiny_model(tmp_path / "single.gguf", "llama", 1)
    for arguments, code, text in (
        ([model, "--cuts", "6"], 2, "--cuts: '6' does not fit a model with 6 layers"),
        ([model, "--steps", "41"], 2, "41 is not in the range 1<=x<=40"),
        ([model, "--json", tmp_path / "none" / "r.json"], 2, "--json: there is no folder"),
        ([part], 1, "is a slice, and only a whole model can be cut"),
        ([single], 1, "has a single layer"),
        ([model, "--checkpoint-quantization", "Q8_0"], 1, "are for SafeTensors checkpoints"),
        (["hf://a/b"], 2, "`skippy fetch hf://a/b` brings it here"),
    ):
        outcome = run_cli(capsys, "certify", *arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert text in outcome.err


def test_a_record_that_cannot_be_written_is_known_before_the_work(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "llama.gguf", "llama")
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)
    outcome = run_cli(capsys, "certify", model, "--json", tmp_path / "r.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "cannot be written to" in outcome.err
