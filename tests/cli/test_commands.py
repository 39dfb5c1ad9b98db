"""Commands that end at once: wrong command lines, wrong files, and what they say."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import click
import pytest

from skippy import __version__
from skippy.cli import models
from skippy.cli.access_flags import access_options, read_api_keys, take_access
from skippy.cli.errors import CliError, SettingError, explain
from skippy.cli.flags import read_link_token, read_stage, stage_options
from skippy.cli.main import cli
from skippy.config import (
    AccessOptions,
    ConfigError,
    Endpoint,
    OpenAIOptions,
    from_json_value,
    stage_config_from_json,
    to_json_value,
)
from skippy.models import GGUFError, GGUFHeader, LayerRangeError, SliceInfo
from skippy.stage import StageStartError
from tests.support.tiny_models import write_tiny

from .support import STAGE, run_cli

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(STAGE))
    return path


def test_version(capsys: Capture) -> None:
    outcome = run_cli(capsys, "--version")
    assert outcome.code == 0
    assert __version__ in outcome.out


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_help(capsys: Capture, name: str) -> None:
    outcome = run_cli(capsys, name, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith("Usage: skippy ")


def test_a_group_without_a_command_shows_its_help(capsys: Capture) -> None:
    outcome = run_cli(capsys, "kv")
    assert outcome.code == 2
    assert outcome.err.startswith("Usage: skippy kv ")


def test_example_config_is_a_valid_stage(capsys: Capture) -> None:
    outcome = run_cli(capsys, "example-config")
    config = stage_config_from_json(outcome.out.encode())
    assert outcome.code == 0
    assert config.bind_endpoint == Endpoint("127.0.0.1", 19000)
    assert (config.layer_start, config.layer_end, config.ctx_size, config.lane_count) == (0, 1, 512, 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "--frobnicate"], "No such option"),
        (["serve-binary"], "--config FILE is missing; skippy example-config prints one to start from"),
        (["serve-openai"], "--config FILE is missing"),
        (["serve"], "serve: a stage's HTTP interface is not available yet; use serve-binary or serve-openai"),
        (["serve-binary", "--config", "none.json"], "none.json: no such file"),
        (["serve-binary", "--telemetry-level", "loud"], "'loud' is not one of 'off', 'summary', 'debug'"),
        (["serve-binary", "--max-inflight", "many"], "'many' is not a valid integer"),
        (["run", "--topology", "t.json"], "--topology needs --config"),
        (["run", "--openai-bind-addr", "127.0.0.1:1"], "--openai-bind-addr needs --config"),
        (["run", "--config", "s.json", "--stages", "2"], "--stages cannot be combined with --config"),
        (["run", "--config", "s.json", "--model", "m.gguf"], "--model cannot be combined with --config"),
        (["run", "--stages", "0"], "0 is not in the range x>=1"),
        (["run", "--model", "none.gguf"], "--model: none.gguf: no such file"),
        (["slice", "m.gguf"], "Missing option '--layers'"),
        (["slice", "m.gguf", "--layers", "5"], "'5' is no layer range; write START:END"),
        (["slice", "m.gguf", "--layers", "5:5"], "layer range 5:5 is empty or negative"),
    ],
)
def test_wrong_command_lines(capsys: Capture, arguments: list[str], text: str) -> None:
    outcome = run_cli(capsys, *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert text in outcome.err
    assert "Traceback" not in outcome.err


REFUSED = [
    ("serve-binary", ["--metrics-otlp-grpc", "http://x:4317"]),
    ("serve-binary", ["--openai-draft-model-path", "d.gguf"]),
    ("serve-binary", ["--openai-speculative-window", "4"]),
    ("serve-binary", ["--openai-adaptive-speculative-window"]),
    ("serve-binary", ["--openai-draft-n-gpu-layers", "1"]),
    ("serve-binary", ["--openai-native-mtp-draft-model-path", "d.gguf"]),
    ("serve-binary", ["--openai-speculative-config", "plan.json"]),
    ("serve-openai", ["--metrics-otlp-grpc", "http://x:4317"]),
    ("serve-openai", ["--first-stage-addr", "127.0.0.1:19000"]),
    ("serve-openai", ["--openai-guardrails", "metrics"]),
    ("serve-openai", ["--speculative-config", "plan.json"]),
    ("serve", ["--metrics-otlp-grpc", "http://x:4317"]),
]


@pytest.mark.parametrize(("command", "arguments"), REFUSED)
def test_flags_of_missing_features_are_refused_by_name(
    capsys: Capture, stage_file: Path, command: str, arguments: list[str]
) -> None:
    outcome = run_cli(capsys, command, "--config", stage_file, *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {arguments[0]}: ")
    assert "not available yet" in outcome.err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("serve-binary", ["--downstream-wire-delay-ms", "0", "--openai-prefill-chunk-policy", "fixed"]),
        ("serve-openai", ["--openai-guardrails", "off", "--prefill-chunk-policy", "fixed"]),
    ],
)
def test_off_values_are_accepted(capsys: Capture, command: str, arguments: list[str]) -> None:
    outcome = run_cli(capsys, command, "--config", "none.json", *arguments)
    assert outcome.err == "error: none.json: no such file\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-inflight", "0"], "max_inflight: is 0, must be 1 to"),
        (["--downstream-connect-timeout-secs", "0"], "downstream_connect_timeout_secs: is 0"),
        (["--peer-timeout-secs", "0.5"], "peer_timeout_secs: is 0.5, must be 1 to 3600"),
        (["--telemetry-queue-capacity", "0"], "telemetry_queue_capacity: is 0"),
        (
            ["--downstream-wire-delay-ms", "3600001"],
            "downstream_wire_delay_ms: is 3.6e+06, must be 0 to",
        ),
        (["--downstream-wire-mbps", "0"], "downstream_wire_mbps: is 0.0, must be above 0"),
        (["--downstream-wire-stall-ms", "5"], "downstream_wire_stall_probability: a stall needs"),
        (["--tls-cert", "c.pem"], "tls_key: is missing; tls_cert needs it"),
        (
            ["--tls-ca", "ca.pem"],
            "tls_ca: is given, but no endpoint of this stage begins with tls:// or wss://",
        ),
        (["--bind-addr", "tls://127.0.0.1:0"], "tls_cert: is missing, but bind_addr is tls://127.0.0.1:0"),
        (
            ["--bind-addr", "tls://127.0.0.1:0", "--tls-cert", "none.pem", "--tls-key", "none.pem"],
            "tls_cert: none.pem: No such file or directory",
        ),
        (["--bind-addr", "udp://127.0.0.1:0"], "has scheme udp://, which is not known here"),
        (["--bind-addr", "nowhere"], "bind_addr: 'nowhere' is not an endpoint"),
        (["--openai-bind-addr", "nowhere"], "bind_addr: 'nowhere' is not an endpoint"),
        (
            ["--openai-bind-addr", "127.0.0.1:0", "--openai-generation-concurrency", "0"],
            "generation_concurrency: is 0",
        ),
        (
            ["--openai-bind-addr", "127.0.0.1:0", "--openai-generation-concurrency", "9"],
            "generation concurrency 9 is above the stage's lane_count 4",
        ),
        (
            [
                *("--openai-bind-addr", "127.0.0.1:0", "--openai-adaptive-generation-concurrency"),
                *("--openai-adaptive-generation-min-concurrency", "5"),
            ],
            "adaptive generation min concurrency 5 is above the stage's lane_count 4",
        ),
        (
            ["--openai-adaptive-generation-min-concurrency", "2"],
            "adaptive_generation_min_concurrency: needs adaptive_generation_concurrency",
        ),
        (["--openai-generation-queue-capacity", "0"], "generation_queue_capacity: is 0"),
        (
            ["--openai-stream-keep-alive-secs", "5"],
            "--openai-stream-keep-alive-secs needs --openai-bind-addr",
        ),
        (["--openai-prefill-chunk-size", "0"], "prefill_chunk_size: is 0"),
        (["--openai-prefill-chunk-policy", "big"], "prefill_chunk_policy: is 'big', must be one of fixed"),
        (["--openai-prefill-chunk-schedule", "8"], "prefill_chunk_schedule: has no effect with"),
        (["--openai-prefill-adaptive-start", "385"], "prefill_adaptive_start: is 385, must be at most"),
        (["--openai-prefill-adaptive-step", "64"], "--openai-prefill-adaptive-step needs --openai-bind-addr"),
        (["--openai-prefill-adaptive-max", "0"], "prefill_adaptive_max: is 0"),
        (["--openai-prefill-adaptive-target-ms", "-1"], "prefill_adaptive_target_ms: is -1"),
        (["--replay-timeout-secs", "-1"], "replay_timeout_secs: is -1, must be 0 to 86400"),
        (["--replay-timeout-secs", "5"], "--replay-timeout-secs needs --openai-bind-addr"),
        (["--no-replay-on-stage-loss"], "--no-replay-on-stage-loss needs --openai-bind-addr"),
        (
            ["--no-replay-on-stage-loss", "--replay-timeout-secs", "5"],
            "replay_timeout_secs: has no effect without replay_on_stage_loss",
        ),
        (["--openai-model-id", "m"], "--openai-model-id needs --openai-bind-addr"),
        (["--openai-prefill-chunk-size", "64"], "--openai-prefill-chunk-size needs --openai-bind-addr"),
        (["--link-token-file", "none"], "--link-token-file: none: No such file or directory"),
        (["--api-key", "sk 1"], "api_keys: number 1 must be 1 to 512 printable ASCII characters"),
        (["--api-key", "sk-1"], "--api-key needs --openai-bind-addr"),
        (["--api-key-file", "none"], "--api-key-file: none: No such file or directory"),
        (["--api-key-concurrency", "2"], "api_key_concurrency: has no effect without api_keys"),
        (["--cors-origin", "x.example"], "cors_origins: 'x.example' is no origin; write scheme://host"),
        (["--allowed-host", "x.example"], "--allowed-host needs --openai-bind-addr"),
    ],
)
def test_wrong_values(capsys: Capture, stage_file: Path, arguments: list[str], text: str) -> None:
    outcome = run_cli(capsys, "serve-binary", "--config", stage_file, *arguments)
    assert outcome.code == 2
    assert text in outcome.err


def test_settings_of_an_endpoint_that_is_not_asked_for(capsys: Capture, stage_file: Path) -> None:
    outcome = run_cli(capsys, "run", "--config", stage_file, "--no-replay-on-stage-loss")
    assert outcome.code == 2
    assert "--no-replay-on-stage-loss needs --openai-bind-addr" in outcome.err


def test_only_stage_0_serves_openai(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(STAGE | {"stage_index": 1, "layer_start": 3}))
    outcome = run_cli(capsys, "run", "--config", path, "--openai-bind-addr", "127.0.0.1:0")
    assert outcome.code == 2
    assert outcome.err == "error: only stage 0 serves OpenAI; this is stage 1 (stage-0)\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"run_id": ', "line 1, column 12: not JSON"),
        (b"\xff\xfe", "line 1: not UTF-8 (byte 0xff)"),
        (json.dumps(STAGE | {"lane_count": "8"}).encode(), "lane_count: expected an integer"),
        (json.dumps(STAGE | {"lane_cuont": 8}).encode(), "lane_cuont: unknown key; did you mean lane_count?"),
        (
            json.dumps(STAGE | {"kv_cache": {"audit_rate": 1.5}}).encode(),
            "kv_cache.audit_rate: is 1.5, must be 0 to 1",
        ),
    ],
)
def test_wrong_configuration_files(capsys: Capture, tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "stage.json"
    path.write_bytes(data)
    outcome = run_cli(capsys, "run", "--config", path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {path}: {text}")
    assert outcome.err.count("\n") == 1


def test_topology_that_does_not_fit(capsys: Capture, stage_file: Path, tmp_path: Path) -> None:
    placement = {
        key: STAGE[key] for key in ("stage_id", "stage_index", "layer_start", "layer_end", "load_mode")
    }
    topology = {
        "topology_id": "cut",
        "model_id": "other",
        "stages": [placement | {"endpoint": "127.0.0.1:1"}],
    }
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(topology))
    outcome = run_cli(capsys, "serve-binary", "--config", stage_file, "--topology", path)
    assert outcome.code == 2
    assert outcome.err == "error: model_id: the stage says 'model', the topology says 'other'\n"


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"SKIPPY_KV_CACHE": "record"}, "record"),
        (None, {"SKIPPY_PREFIX_CACHE": "on"}, "lookup-record"),
        ("record", {"SKIPPY_KV_CACHE": "on"}, "record"),
        ("record", {"SKIPPY_PREFIX_CACHE": "off"}, "disabled"),
    ],
)
def test_the_environment_has_its_say_in_the_prefix_cache(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str | None,
    environment: dict[str, str],
    expected: str | None,
) -> None:
    for name in ("SKIPPY_KV_CACHE", "SKIPPY_PREFIX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, word in environment.items():
        monkeypatch.setenv(name, word)
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(STAGE | ({} if mode is None else {"kv_cache": {"mode": mode}})))
    config, _ = read_stage(path, None)
    assert (config.kv_cache and config.kv_cache.mode) == expected


def test_a_wrong_word_in_the_environment(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, stage_file: Path
) -> None:
    monkeypatch.setenv("SKIPPY_KV_CACHE", "maybe")
    outcome = run_cli(capsys, "serve-binary", "--config", stage_file)
    assert outcome.code == 2
    assert outcome.err.startswith("error: SKIPPY_KV_CACHE: is 'maybe', must be one of auto, record,")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, False), ("", False), (" ", False), ("off", False), ("0", False), ("Yes", True), (" TRUE ", True)],
)
def test_connecting_ahead_of_need(monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool) -> None:
    monkeypatch.delenv("SKIPPY_BINARY_WARM_PRECONNECT", raising=False)
    if text is not None:
        monkeypatch.setenv("SKIPPY_BINARY_WARM_PRECONNECT", text)
    assert stage_options().warm_preconnect is expected


@pytest.mark.parametrize(("text", "expected"), [("", False), ("off", False), ("1", True)])
def test_safe_mode(monkeypatch: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    monkeypatch.setenv("SKIPPY_ITERATION_SCHEDULER_SAFE_MODE", text)
    assert stage_options().safe_mode is expected


@pytest.mark.parametrize(
    "variable", ["SKIPPY_BINARY_WARM_PRECONNECT", "SKIPPY_ITERATION_SCHEDULER_SAFE_MODE"]
)
def test_an_environment_that_says_nothing_clear(
    capsys: Capture, stage_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "maybe")
    outcome = run_cli(capsys, "serve-binary", "--config", stage_file)
    assert outcome.code == 2
    assert outcome.err == (
        f"error: {variable}: is 'maybe', must be one of 1, true, yes, on, or 0, false, no, off\n"
    )


@pytest.mark.parametrize(
    ("on", "off", "expected"),
    [(False, False, True), (True, False, True), (False, True, False), (True, True, True)],
)
def test_async_prefill_forward(on: bool, off: bool, expected: bool) -> None:
    assert stage_options(async_on=on, async_off=off).async_prefill_forward is expected


def test_api_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert read_api_keys(None) == []
    path.write_bytes(b"\xef\xbb\xbf# of the team\nsk-1\r\n\n  sk-2 \n")
    assert read_api_keys(path) == ["sk-1", "sk-2"]
    for data, text in [
        (b"", "has no key"),
        (b"# x\n\n", "has no key"),
        (b"\xff", "not UTF-8"),
        (b"a" * 600_000, "larger than"),
    ]:
        path.write_bytes(data)
        with pytest.raises(SettingError, match=f"--api-key-file: {re.escape(str(path))}: .*{text}"):
            read_api_keys(path)
    path.unlink()
    with pytest.raises(SettingError, match="No such file"):
        read_api_keys(path)


def test_access_options_come_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-3\n")
    parsed: list[AccessOptions] = []

    @click.command()
    @access_options
    def command(**values: Any) -> None:
        parsed.append(AccessOptions(**take_access(values)))
        assert values == {}

    arguments = ["--api-key", "sk-1", "--api-key", "sk-2", "--api-key-file", str(path)]
    arguments += [
        "--api-key-concurrency",
        "2",
        "--cors-origin",
        "https://A.example",
        "--allowed-host",
        "H.example",
    ]
    command.main(arguments, standalone_mode=False)
    command.main([], standalone_mode=False)
    keys = ("sk-1", "sk-2", "sk-3")
    whole = AccessOptions(
        api_keys=keys, api_key_concurrency=2, cors_origins="https://a.example", allowed_hosts="h.example"
    )
    assert parsed == [whole, AccessOptions()]
    # As it goes to the process of stage 0.
    openai = OpenAIOptions(**attrs.asdict(whole))
    assert from_json_value(json.loads(json.dumps(to_json_value(openai))), OpenAIOptions) == openai


def test_link_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_link_token(path) == "secret"
    assert read_link_token(None) is None
    path.write_text("two\nlines\n")
    with pytest.raises(click.ClickException, match="has 2 lines"):
        read_link_token(path)
    path.write_bytes(b"\xff")
    with pytest.raises(click.ClickException, match="not UTF-8"):
        read_link_token(path)
    path.write_text("x" * 65)
    with pytest.raises(ConfigError, match="65 bytes"):
        stage_options(link_token_file=path)


def test_a_model_that_is_none(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to be looked at")
    for arguments in (
        ["inspect", path],
        ["slice", path, "--layers", "0:1"],
        ["run", "--model", path, "--bind", "127.0.0.1:0"],
    ):
        outcome = run_cli(capsys, *arguments)
        assert outcome.code == 1
        assert outcome.err.startswith(f"error: {path}: ")
        assert outcome.err.count("\n") == 1


def test_what_a_file_says_is_not_for_the_terminal_to_obey(capsys: Capture, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", "evil\x1b]0;title\x07\nlayers", layers=2)
    shown = run_cli(capsys, "inspect", model).out
    assert "architecture    evil ]0;title  layers\n" in shown
    assert shown.replace("\n", "").isprintable()
    missing = run_cli(capsys, "inspect", tmp_path / "\x1b[2J.gguf")
    assert "?[2J.gguf: no such file" in missing.err


def test_stage_child_is_not_for_people() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skippy.cli", "stage-child", "--listen-fd", "3", "--status-fd", "4"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: stage-child is started by skippy run")


class TestExplain:
    def test_groups(self) -> None:
        group = ExceptionGroup("x", [ExceptionGroup("y", [ConfigError("bad key")]), CliError("gone")])
        assert explain(group) == ("bad key", 2)
        assert explain(ExceptionGroup("x", [ConfigError("bad"), ZeroDivisionError()])) is None

    def test_a_configuration_that_does_not_fit_the_model_is_a_wrong_one(self) -> None:
        assert explain(LayerRangeError("no such layer")) == ("no such layer", 2)
        assert explain(StageStartError("no neighbour")) == ("no neighbour", 2)

    def test_system_errors(self) -> None:
        assert explain(OSError(errno.EACCES, os.strerror(errno.EACCES), "/x")) == ("/x: Permission denied", 1)
        assert explain(socket.gaierror(socket.EAI_NONAME, "unknown name")) == (
            "name resolution failed: unknown name",
            1,
        )

    def test_bugs_are_not_explained(self) -> None:
        assert explain(RuntimeError("bug")) is None

    def test_models(self) -> None:
        assert explain(GGUFError("m.gguf", "is broken")) == ("m.gguf: is broken", 1)


@pytest.mark.model
def test_slice_and_inspect(
    capsys: Capture, tmp_path: Path, bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "middle.gguf"
    outcome = run_cli(capsys, "slice", bundled_model, "--layers", "10:20", "--out", out)
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{out}\n", "")
    info = SliceInfo.from_file(out)
    assert (info.layer_start, info.layer_end, info.layer_count) == (10, 20, 30)

    cached = run_cli(capsys, "slice", bundled_model, "--layers", "10:20")
    path = Path(cached.out.strip())
    assert path.is_relative_to(tmp_path / "cache")
    assert GGUFHeader.read(path).metadata.keys() == GGUFHeader.read(out).metadata.keys()

    shown = run_cli(capsys, "inspect", bundled_model).out
    assert "architecture    llama\n" in shown
    assert "layers          30\n" in shown
    assert "vocabulary      49152 tokens (gpt2)\n" in shown
    assert re.search(r"^chat template   \d+ characters$", shown, re.MULTILINE)
    assert re.search(r"^per layer       2\.\d MiB \(0 to 29\)$", shown, re.MULTILINE), shown
    assert "can be split    at every layer\n" in shown
    assert "layers          10:20 of 30 (a slice)\n" in run_cli(capsys, "inspect", out).out

    outside = run_cli(capsys, "slice", bundled_model, "--layers", "10:31")
    assert outside.code == 2
    assert "30 layers" in outside.err


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--stages", "31"], 2, "31 stages asked for, but the model has 30 layers"),
        (["--splits", "40"], 2, "cut 40 is outside the model; with 30 layers, cuts are 1 to 29"),
        (["--splits", "10", "--stages", "3"], 2, "--splits 10 gives 2 stages, but --stages says 3"),
        (["--bind", "here"], 2, "--bind: 'here' is not an endpoint"),
        (["--lane-count", "0"], 2, "lane_count: is 0, must be 1 to 256"),
        (["--ctx-size", "0"], 2, "ctx_size: is 0, must be 1 to"),
        (["--threads", "0"], 2, "n_threads: is 0, must be 1 to 512"),
        (["--kv-max-entries", "513"], 2, "'--kv-max-entries': 513 is not in the range 1<=x<=512"),
        (["--kv-max-bytes", "-1"], 2, "'--kv-max-bytes': -1 is not in the range x>=0"),
        (["--kv-audit-rate", "2"], 2, "'--kv-audit-rate': 2.0 is not in the range 0<=x<=1"),
    ],
)
def test_run_refuses(
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bundled_model: Path,
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.setenv("SKIPPY_CACHE", str(tmp_path))
    if "--bind" not in arguments:
        arguments = [*arguments, "--bind", "127.0.0.1:0"]
    outcome = run_cli(capsys, "run", "--model", bundled_model, *arguments)
    assert outcome.code == code
    assert text in outcome.err


@pytest.mark.model
def test_run_says_which_port_is_in_use(capsys: Capture, bundled_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = run_cli(capsys, "run", "--model", bundled_model, "--bind", address)
    assert outcome.code == 1
    assert outcome.err == (
        f"error: the OpenAI endpoint cannot listen on {address}: the port is in use; "
        "choose another with --bind HOST:PORT\n"
    )


def test_inspect_shows_layers_of_one_size_together() -> None:
    shown = models._runs((5, 5, 7, 5))
    assert [(list(layers), size) for layers, size in shown] == [([0, 1], 5), ([2], 7), ([3], 5)]
