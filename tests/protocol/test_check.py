"""The checker for other people's files: exit codes, counts, and that it sees what is wrong."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy.protocol.__main__ import main
from skippy.protocol.check import check_document

PATH = Path(__file__).parent / "golden" / "frames.json"
GOLDEN: dict[str, Any] = json.loads(PATH.read_bytes())
HEAD = {"format": "skippy-stage-golden", "format_version": 1}


def test_runs_as_a_program() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "skippy.protocol", "check", str(PATH)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines()}
    assert lines["valid"] == ["168", "vectors", "ok"]
    assert lines["malformed"] == ["137", "vectors", "ok"]
    assert len(lines) == 15


def first(section: str, **wanted: Any) -> dict[str, Any]:
    for vector in GOLDEN[section]:
        if all(vector.get(key) == value for key, value in wanted.items()):
            return copy.deepcopy(vector)
    raise LookupError(wanted)


def named(section: str, name: str) -> dict[str, Any]:
    return first(section, name=name)


def change(vector: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**vector, **changes}


def nested(vector: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    inner = vector
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return vector


DECODE = "decode_forwarded_with_activation_and_sampling_a"
MISMATCHES: list[tuple[str, dict[str, Any]]] = [
    ("kinds", change(first("kinds", kind="Stop"), value=4)),
    ("kinds", change(first("kinds", kind="DecodeEmbd"), requires_predicted_reply=False)),
    ("valid", change(named("valid", DECODE), consumed=300)),
    ("valid", change(named("valid", DECODE), n_embd=5)),
    ("valid", change(named("valid", DECODE), hex="63" + named("valid", DECODE)["hex"][2:])),
    ("valid", nested(named("valid", DECODE), "message", "state", "seq_id", to=9)),
    ("valid", nested(named("valid", DECODE), "message", "sampling", "f32_bits", "top_p", to="3f800000")),
    ("valid", nested(named("valid", DECODE), "message", "tokens", to=[1])),
    ("valid", nested(named("valid", DECODE), "derived", "estimated_wire_bytes", to=1)),
    ("valid", change(named("valid", DECODE), unread_hex="00")),
    ("valid", change(named("valid", DECODE), reencode_error="refused")),
    ("valid", change(named("valid", DECODE), reencoded_hex="00")),
    ("valid", change(named("valid", "stop_with_unvalidated_counts_a"), encode="message", reencoded_hex="")),
    ("valid", nested(named("valid", "helper_ack"), "reply", "predicted", to=1)),
    ("valid", nested(named("valid", "helper_ack"), "reply", "stats_is_empty", to=False)),
    ("valid", change(named("valid", "ready"), hex="59445254")),
    ("valid", change(named("valid", "transport_auth_1_bytes_a0"), token_hex="68")),
    ("malformed", change(named("malformed", "unknown_kind_0_a"), error_kind="UnexpectedEof")),
    ("malformed", change(named("malformed", "state_version_13_a"), bytes_read_before_error=72)),
    (
        "malformed",
        change(named("malformed", "unknown_kind_0_a"), hex=named("valid", DECODE)["hex"], n_embd=4),
    ),
    ("malformed", change(named("malformed", "ready_zero"), hex="59445253")),
    ("malformed", change(named("malformed", "auth_truncated_a"), error_kind="InvalidData")),
    ("writer_errors", change(named("writer_errors", "too_many_tokens_a"), error_kind="InvalidData")),
    ("writer_errors", nested(named("writer_errors", "too_many_tokens_a"), "input", "tokens_length", to=3)),
    ("writer_errors", nested(named("writer_errors", "auth_token_length_a"), "input", "token_length", to=3)),
    ("streams", nested(named("streams", "dialer_stream_a"), "items", to=[])),
    ("truncation_sweeps", change(first("truncation_sweeps"), error_kind="InvalidData")),
    ("truncation_sweeps", change(first("truncation_sweeps"), hex=first("truncation_sweeps")["hex"] + "00")),
    ("stats_merge", change(first("stats_merge"), merged={})),
    ("stats_merge", change(first("stats_merge"), merged_is_empty=True)),
    ("stats_observe", change(first("stats_observe"), result={})),
    ("epochs", change(named("epochs", "newer_decode_a"), a_is_stale_for_b=False)),
    ("matches_kind", change(first("matches_kind"), matches=True)),
    ("activation_sizes", change(first("activation_sizes"), bytes=1)),
    ("activation_sizes", change(first("activation_sizes"), error="refused")),
    ("flag_mapping", change(first("flag_mapping"), frame_flags=1)),
]


@pytest.mark.parametrize(
    ("section", "vector"), MISMATCHES, ids=[f"{i}-{s}" for i, (s, _) in enumerate(MISMATCHES)]
)
def test_a_mismatch_is_seen_and_named(
    section: str, vector: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps({**HEAD, section: [vector]}))
    assert main(["check", str(path)]) == 1
    captured = capsys.readouterr()
    assert str(vector.get("name", vector.get("kind", "[0]"))) in captured.err
    assert captured.out.split() == [section, "1", "vectors", "1", "MISMATCH"]


def test_wrong_objects_are_seen() -> None:
    sampling = {**GOLDEN["default_sampling"], "top_k": 40}
    report = check_document(
        {**HEAD, "constants": {"READY_MAGIC": 1, "NO_SUCH": 2}, "default_sampling": sampling}
    )
    assert [(s.name, [label for label, _ in s.mismatches]) for s in report.sections] == [
        ("constants", ["READY_MAGIC", "NO_SUCH"]),
        ("default_sampling", ["default_sampling"]),
    ]
    assert not report.ok


def test_a_stream_with_a_frame_changed_is_seen() -> None:
    vector = named("streams", "listener_stream_a")
    vector["items"][1]["length"] -= 4
    report = check_document({**HEAD, "streams": [vector]})
    assert [label for label, _ in report.sections[0].mismatches] == ["listener_stream_a"]


def test_a_stream_may_have_several_handshake_steps() -> None:
    auth, ready = named("valid", "transport_auth_1_bytes_a0"), named("valid", "ready")
    stop = named("valid", "stop_plain_zero_identity")
    parts = [auth, ready, stop, stop]
    lengths = [len(part["hex"]) // 2 for part in parts]
    vector = {
        "n_embd": 4,
        "expected_token_hex": auth["token_hex"],
        "hex": "".join(part["hex"] for part in parts),
        "items": [
            {"type": part["type"], "offset": sum(lengths[:i]), "length": lengths[i]}
            for i, part in enumerate(parts)
        ],
    }
    assert check_document({**HEAD, "streams": [vector]}).ok


def test_a_kind_of_a_later_generation_must_be_refused() -> None:
    stop = named("valid", "stop_plain_zero_identity")["hex"]
    report = check_document({**HEAD, "not_in_target_generation": {"note": "x", "made_up": [{"hex": stop}]}})
    assert [label for label, _ in report.sections[0].mismatches] == ["made_up[0]"]


def test_unknown_sections_are_reported_not_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps({**HEAD, "constants": {}, "novelties": []}))
    assert main(["check", str(path)]) == 0
    assert "novelties: unknown section, not checked" in capsys.readouterr().out


def edited(section: str, edit: Callable[[dict[str, Any]], object]) -> str:
    vector = copy.deepcopy(GOLDEN[section][0])
    edit(vector)
    return json.dumps({**HEAD, section: [vector]})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "skippy-stage-golden"),
        (b"{}", "skippy-stage-golden"),
        (json.dumps({"format": "other"}), "skippy-stage-golden"),
        (json.dumps({"format": "skippy-stage-golden", "format_version": 2}), "format_version 2"),
        (json.dumps(HEAD), "no section"),
        (json.dumps({**HEAD, "valid": {}}), "valid is not a list"),
        (json.dumps({**HEAD, "valid": [1]}), "valid[0] is not an object"),
        (json.dumps({**HEAD, "constants": []}), "constants is not an object"),
        (edited("valid", lambda v: v.pop("consumed")), "'consumed' is missing"),
        (edited("valid", lambda v: v.pop("n_embd")), "n_embd is missing"),
        (edited("valid", lambda v: v.update(hex="0")), "hex"),
        (edited("valid", lambda v: v.update(hex="AA")), "hex"),
        (edited("valid", lambda v: v.update(hex=5)), "bare_PrefillEmbd_a"),
        (edited("valid", lambda v: v.update(type="letter")), "unknown type 'letter'"),
        (edited("valid", lambda v: v.update(encode="maybe")), "unknown encode"),
        (edited("valid", lambda v: v["derived"].update(mood=1)), "mood"),
        (edited("valid", lambda v: v["message"].update(kind="Nope")), "Nope"),
        (edited("valid", lambda v: v["message"].update(kind_value=5)), "kind_value"),
        (edited("malformed", lambda v: v.update(error_kind="Bad")), "Bad"),
        (edited("writer_errors", lambda v: v.update(operation="sing")), "sing"),
        (
            edited("writer_errors", lambda v: v.update(input={"kind": "Stop", "tokens_length": 1 << 60})),
            "tokens_length",
        ),
        (edited("stats_merge", lambda v: v.update(a={"luck": 1})), "luck"),
        (edited("stats_observe", lambda v: v["calls"][0].update(call="guess")), "guess"),
        (edited("epochs", lambda v: v.update(a=[])), "epochs"),
    ],
)
def test_an_unusable_file_is_exit_2_with_a_reason(
    content: str | bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vectors.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{path}: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_file_and_a_folder_are_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
