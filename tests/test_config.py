"""Configuration values: what is accepted, and what is said about what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.config import (
    ConfigError,
    Endpoint,
    OpenAIOptions,
    StageConfig,
    StageOptions,
    StageTopology,
    check_against_topology,
    from_json_value,
    load_stage_config,
    load_topology,
    stage_config_from_json,
    to_json_value,
    topology_from_json,
)
from skippy.config.fields import UNAVAILABLE

STAGE: dict[str, Any] = {
    "run_id": "run",
    "topology_id": "cut",
    "model_id": "model",
    "stage_id": "b",
    "stage_index": 1,
    "layer_start": 10,
    "layer_end": 20,
    "load_mode": "runtime-slice",
    "bind_addr": "127.0.0.1:19001",
    "model_path": "model.gguf",
    "upstream": {"stage_id": "a", "stage_index": 0, "endpoint": "tcp://127.0.0.1:19000"},
    "downstream": {"stage_id": "c", "stage_index": 2, "endpoint": "127.0.0.1:19002"},
}


def placement(name: str, index: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {
        "stage_id": name,
        "stage_index": index,
        "endpoint": f"127.0.0.1:{19000 + index}",
        "layer_start": start,
        "layer_end": end,
        "load_mode": "runtime-slice",
        **more,
    }


TOPOLOGY: dict[str, Any] = {
    "topology_id": "cut",
    "model_id": "model",
    "stages": [placement("a", 0, 0, 10), placement("b", 1, 10, 20), placement("c", 2, 20, 30)],
}


def read(value: Any) -> StageConfig:
    return stage_config_from_json(json.dumps(value).encode())


def read_topology(value: Any) -> StageTopology:
    return topology_from_json(json.dumps(value).encode())


def test_defaults() -> None:
    config = read({k: v for k, v in STAGE.items() if k not in ("upstream", "downstream")})
    assert config.ctx_size == 512
    assert config.lane_count == 4
    assert config.n_gpu_layers == 0
    assert (config.cache_type_k, config.cache_type_v) == ("f16", "f16")
    assert config.flash_attn_type == config.split_mode == config.glm_dsa_policy == "auto"
    assert config.native_mtp_enabled is False
    assert config.n_threads is None
    assert config.upstream is config.downstream is None
    assert (config.activation_codec, config.activation_codec_policy) == ("f32", "fixed")


def test_peers_are_read() -> None:
    config = read(STAGE)
    assert config.upstream is not None
    assert config.upstream.address == Endpoint("127.0.0.1", 19000)
    assert config.downstream is not None
    assert config.downstream.stage_id == "c"
    assert config.bind_endpoint == Endpoint("127.0.0.1", 19001)


def test_null_is_the_default() -> None:
    assert read(STAGE | {"lane_count": None, "kv_cache": None, "mlock": None}) == read(STAGE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lane_cont": 4}, "lane_cont: unknown key; did you mean lane_count?"),
        ({"zzz": 4}, "zzz: unknown key"),
        (
            {"downstream": STAGE["downstream"] | {"stage_idx": 1}},
            "downstream.stage_idx: unknown key; did you mean ",
        ),
        ({"lane_count": "8"}, 'lane_count: expected an integer, found the string "8"'),
        ({"lane_count": 8.0}, "lane_count: expected an integer, found the number 8.0"),
        ({"stage_index": True}, "stage_index: expected an integer, found true"),
        ({"mlock": 1}, "mlock: expected true or false, found the number 1"),
        ({"mmap": "yes"}, 'mmap: expected true or false, found the string "yes"'),
        ({"run_id": None}, "run_id: expected a string, found null"),
        ({"run_id": 7}, "run_id: expected a string, found the number 7"),
        ({"upstream": []}, "upstream: expected an object, found an array"),
        ({"upstream": {"stage_id": "a", "stage_index": 0}}, "upstream.endpoint: is missing"),
        ({"upstream": STAGE["upstream"] | {"stage_index": "0"}}, "upstream.stage_index: expected an integer"),
        ({"cache_type_k": "f17"}, 'cache_type_k: expected one of "f32", "f16"'),
        ({"selected_device": 3}, "selected_device: expected an object, found the number 3"),
        ({"selected_device": {}}, "selected_device.backend_device: is missing"),
        (
            {"selected_device": {"backend_device": "CPU", "index": 0}},
            "selected_device.index: choosing a device by index is not available yet",
        ),
        ({"selected_device": {"backend_device": " "}}, "selected_device.backend_device: must not be empty"),
        ({"resident_tensor_names": "x"}, 'resident_tensor_names: expected an array, found the string "x"'),
        ({"resident_tensor_names": [1]}, "resident_tensor_names[0]: expected a string"),
    ],
)
def test_wrong_keys_and_types(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(STAGE | change)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_start": 20}, "layer_start: is 20, must be below layer_end, which is 20"),
        ({"layer_start": -1}, "layer_start: is -1, must be 0 to 4294967295"),
        ({"layer_start": 0}, "layer_start: is 0, but only stage 0 starts there, not stage 1"),
        ({"stage_index": 0}, "layer_start: is 10, but stage 0 starts at layer 0"),
        ({"stage_index": 0, "layer_start": 0}, "upstream: must be null, because stage 0 is the first"),
        ({"stage_index": 2}, "upstream.stage_index: is 0, must be 1 next to stage 2"),
        ({"upstream": None, "stage_index": 5}, "downstream.stage_index: is 2, must be 6 next to stage 5"),
        (
            {"upstream": STAGE["upstream"] | {"stage_id": "b"}},
            "upstream.stage_id: is this stage's own id 'b'",
        ),
        ({"lane_count": 0}, "lane_count: is 0, must be 1 to 256"),
        ({"ctx_size": 0}, "ctx_size: is 0, must be 1 to"),
        ({"ctx_size": 2**24, "lane_count": 256}, "ctx_size: times lane_count is 4294967296 cache cells"),
        ({"n_threads": 0}, "n_threads: is 0, must be 1 to"),
        ({"n_batch": 64, "n_ubatch": 65}, "n_ubatch: is 65, above n_batch 64"),
        ({"direct_io": True, "mmap": True}, "direct_io: excludes mmap"),
        ({"direct_io": True, "mlock": True}, "direct_io: excludes mlock"),
        (
            {"flash_attn_type": "disabled", "cache_type_v": "q8_0"},
            'cache_type_v: "q8_0" needs flash_attn_type',
        ),
        ({"run_id": " "}, "run_id: must not be empty"),
        ({"model_path": None}, "model_path: is missing"),
        (
            {"load_mode": "layer-package", "model_path": None},
            "model_path: is missing; load_mode layer-package needs a folder with model-package.json, or",
        ),
        ({"package_ref": "hf://a/b"}, "package_ref: has no effect with load_mode runtime-slice"),
        (
            {"load_mode": "layer-package", "package_ref": "hf://a/b"},
            "package_ref: names another package than model_path; leave one of them out",
        ),
        ({"source_model_sha256": "abc"}, "source_model_sha256: is 'abc', must be 64 hexadecimal digits"),
        ({"source_model_bytes": 0}, "source_model_bytes: is 0, must be 1 to"),
        ({"manifest_sha256": "0" * 64}, "manifest_sha256: has no effect with load_mode runtime-slice"),
        (
            {"load_mode": "layer-package", "manifest_sha256": "abc"},
            "manifest_sha256: is 'abc', must be 64 hexadecimal digits",
        ),
        (
            {"load_mode": "x"},
            'load_mode: "x" is unknown; known are runtime-slice, artifact-slice',
        ),
        ({"bind_addr": "127.0.0.1"}, "bind_addr: '127.0.0.1' is not an endpoint"),
        ({"bind_addr": "127.0.0.1:65536"}, "bind_addr: '127.0.0.1:65536' has port '65536'"),
        (
            {"downstream": STAGE["downstream"] | {"endpoint": "host:0"}},
            "downstream.endpoint: 'host:0' has port",
        ),
    ],
)
def test_values_that_contradict(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(STAGE | change)
    assert str(caught.value).startswith(text)


UNAVAILABLE_FIELDS = [field for field in attrs.fields(StageConfig) if UNAVAILABLE in field.metadata]


@pytest.mark.parametrize("field", UNAVAILABLE_FIELDS, ids=lambda field: field.name)
def test_keys_of_missing_features_are_refused_unless_off(field: attrs.Attribute[Any]) -> None:
    values = {"dict": {}, "tuple": ["x"], "bool": True, "int": 1, "str": "something"}
    kind = str(get_type_hints(StageConfig)[field.name])
    on: Any = next(value for name, value in values.items() if name in kind)
    off = list(field.default) if field.default == () else field.default
    assert read(STAGE | {field.name: off}) == read(STAGE | {field.name: None}) == read(STAGE)
    with pytest.raises(ConfigError, match=f"^{field.name}: .+; leave the key out or set it to "):
        read(STAGE | {field.name: on})


@pytest.mark.parametrize(
    "name", [field.name for field in attrs.fields(StageConfig) if field.default is attrs.NOTHING]
)
def test_required_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: is missing$"):
        read({key: value for key, value in STAGE.items() if key != name})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "line 1, column 1: not JSON"),
        (b'{\n  "a": 1,\n  "b" 2}', "line 3, column 7: not JSON"),
        (b'{"a": "\xff"}', "line 1: not UTF-8 (byte 0xff)"),
        (b'{\n"a": "\xc3("}', "line 2: not UTF-8 (byte 0xc3)"),
        (b'{"ctx_size": NaN}', "not JSON: NaN is no JSON number"),
        (b'{"a": 1, "a": 2}', "a: the key appears twice"),
        (b"[]", "expected an object, found an array"),
        (b"[" * 100_000, "not a configuration: nested too deeply"),
        (b'{"ctx_size": ' + b"9" * 5000 + b"}", "not JSON: "),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "stage.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_stage_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        load_stage_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_topology(tmp_path)


def test_files_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "stage.json"
    config = read(STAGE)
    path.write_text(json.dumps(to_json_value(config)))
    assert load_stage_config(path) == config
    topology = read_topology(TOPOLOGY)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(to_json_value(topology)).encode())
    assert load_topology(path) == topology
    options = StageOptions(link_token="secret")
    assert from_json_value(to_json_value(options), StageOptions) == options


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from([field.name for field in attrs.fields(StageConfig)]), value=JSON)
def test_any_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    refused = ""
    try:
        read(STAGE | {name: value})
    except ConfigError as error:
        refused = str(error)
    assert "\n" not in refused


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"stage_index": "1\n2"}, r'stage_index: expected an integer, found the string "1\n2"'),
        ({"stage\x1b[2Jid": 1}, r"stage\x1b[2Jid: unknown key"),
        ({"bind_addr": "\u2028"}, r"\u2028"),
    ],
)
def test_what_is_quoted_cannot_break_the_line(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(STAGE | values)
    assert text in str(caught.value)


@given(data=st.binary(max_size=64))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        stage_config_from_json(data)


class TestTopology:
    def test_order_in_the_file_does_not_matter(self) -> None:
        topology = read_topology(TOPOLOGY | {"stages": TOPOLOGY["stages"][::-1]})
        assert [stage.stage_id for stage in topology.stages] == ["a", "b", "c"]
        assert topology.layer_count == 30
        assert topology.stage("b") == topology.stages[1]
        assert topology.stage("z") is None

    @pytest.mark.parametrize(
        ("stages", "text"),
        [
            ([], "stages: is empty"),
            (
                [placement("a", 0, 1, 10)],
                "stages: stage 'a' starts at layer 1, must start at 0, the first layer",
            ),
            (
                [placement("a", 0, 0, 10), placement("b", 1, 11, 20)],
                "stages: stage 'b' starts at layer 11, must start at 10, where",
            ),
            (
                [placement("a", 0, 0, 10), placement("b", 1, 9, 20)],
                "stages: stage 'b' starts at layer 9, must start at 10, where",
            ),
            (
                [placement("a", 0, 0, 10), placement("a", 1, 10, 20)],
                "stages: stage_id 'a' appears twice",
            ),
            (
                [placement("a", 0, 0, 10), placement("b", 2, 10, 20)],
                "stages: indexes are [0, 2], must be 0 to 1, each once",
            ),
            (
                [placement("a", 0, 0, 10), {"stage_id": "b", "stge_index": 1}],
                "stages[1].stge_index: unknown key",
            ),
            ([placement("a", 0, "0", 10)], "stages[0].layer_start: expected an integer"),
            ([placement("a", 0, 5, 5)], "stages[0].layer_start: is 5, must be below layer_end"),
            ([placement("a", 0, 0, 5, load_mode="package")], 'stages[0].load_mode: "package"'),
            ([placement("a", 0, 0, 5, endpoint="x")], "stages[0].endpoint: 'x' is not an endpoint"),
            ({}, "stages: expected an array, found an object"),
        ],
    )
    def test_refused(self, stages: Any, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read_topology(TOPOLOGY | {"stages": stages})
        assert str(caught.value).startswith(text)

    def test_a_stage_that_agrees(self) -> None:
        check_against_topology(read(STAGE), read_topology(TOPOLOGY))
        check_against_topology(read(STAGE | {"upstream": None, "downstream": None}), read_topology(TOPOLOGY))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"topology_id": "x"}, "topology_id: the stage says 'x', the topology says 'cut'"),
            ({"model_id": "x"}, "model_id: the stage says 'x', the topology says 'model'"),
            ({"stage_id": "x"}, "stage_id: 'x' is not in the topology, which has a, b, c"),
            ({"layer_start": 9}, "layer_start: the stage says 9, the topology says 10"),
            ({"layer_end": 21}, "layer_end: the stage says 21, the topology says 20"),
            (
                {"stage_index": 2, "upstream": None, "downstream": None},
                "stage_index: the stage says 2, the topology says 1",
            ),
            (
                {"downstream": STAGE["downstream"] | {"stage_id": "x"}},
                "downstream.stage_id: the stage says 'x', the topology says 'c'",
            ),
        ],
    )
    def test_a_stage_that_does_not(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            check_against_topology(read(STAGE | change), read_topology(TOPOLOGY))
        assert str(caught.value) == text

    def test_a_last_stage_with_a_downstream(self) -> None:
        topology = read_topology(TOPOLOGY | {"stages": TOPOLOGY["stages"][:2]})
        with pytest.raises(
            ConfigError, match="^downstream: must be null, because 'b' is the topology's last"
        ):
            check_against_topology(read(STAGE), topology)


class TestEndpoint:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("127.0.0.1:19000", "127.0.0.1", 19000),
            ("tcp://gpu-2.example:1", "gpu-2.example", 1),
            ("[::1]:65535", "::1", 65535),
            ("tcp://[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ],
    )
    def test_forms(self, text: str, host: str, port: int) -> None:
        endpoint = Endpoint.parse(text)
        assert endpoint == Endpoint(host, port)
        assert str(endpoint) == text.removeprefix("tcp://")
        assert Endpoint.parse(endpoint.url) == endpoint

    @pytest.mark.parametrize(
        "text",
        ["", "host", ":80", "host:", "host:x", "host:0", "host:70000", "host:-1", "host:8٠", "::1:80",
         "[::1]", "[x]:80", "http://host:80", "a b:80", "host/x:80", "u@host:80",
         "tls://tcp://host:80", "://host:80", "ws://host:80/path"],
    )  # fmt: skip
    def test_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^where: "):
            Endpoint.parse(text, where="where")

    def test_port_zero_is_for_binding(self) -> None:
        assert Endpoint.parse("0.0.0.0:0", allow_any_port=True) == Endpoint("0.0.0.0", 0)

    @pytest.mark.parametrize(
        ("host", "unspecified"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("localhost", False)]
    )
    def test_unspecified(self, host: str, unspecified: bool) -> None:
        assert Endpoint(host, 1).is_unspecified is unspecified


SCHEDULE = {"prefill_chunk_policy": "schedule"}


class TestOptions:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"max_inflight": 0}, "max_inflight: is 0, must be 1 to"),
            ({"reply_credit_limit": -1}, "reply_credit_limit: is -1, must be 0 to"),
            ({"downstream_connect_timeout_secs": 0}, "downstream_connect_timeout_secs: is 0"),
            ({"peer_timeout_secs": 0.9}, "peer_timeout_secs: is 0.9, must be 1 to 3600"),
            ({"peer_timeout_secs": 3601.0}, "peer_timeout_secs: is 3601, must be 1 to 3600"),
            ({"peer_timeout_secs": float("nan")}, "peer_timeout_secs: is nan, must be 1 to 3600"),
            ({"telemetry_queue_capacity": 0}, "telemetry_queue_capacity: is 0"),
            ({"link_token": ""}, "link_token: has 0 bytes"),
            ({"link_token": "é" * 33}, "link_token: has 66 bytes"),
            (
                {"downstream_wire_stall_probability": 2},
                "downstream_wire_stall_probability: is 2, must be",
            ),
        ],
    )
    def test_stage_options_refused(self, settings: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            StageOptions(**settings)
        assert str(caught.value).startswith(text)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"bind_addr": "9337"}, "bind_addr: '9337' is not an endpoint"),
            ({"bind_addr": "tls://127.0.0.1:1"}, "bind_addr: 'tls://127.0.0.1:1' has scheme tls://"),
            ({"model_id": ""}, "model_id: must not be empty"),
            ({"default_max_tokens": 0}, "default_max_tokens: is 0"),
            ({"generation_concurrency": 0}, "generation_concurrency: is 0"),
            ({"prefill_chunk_size": 0}, "prefill_chunk_size: is 0"),
            ({"prefill_chunk_policy": "big"}, "prefill_chunk_policy: is 'big', must be one of fixed, sch"),
            ({"prefill_chunk_policy": "schedule"}, "prefill_chunk_schedule: is missing"),
            (SCHEDULE | {"prefill_chunk_schedule": " "}, "prefill_chunk_schedule: is missing"),
            (SCHEDULE | {"prefill_chunk_schedule": "8,,8"}, "prefill_chunk_schedule: is '8,,8', must be"),
            (SCHEDULE | {"prefill_chunk_schedule": "8,0"}, "prefill_chunk_schedule: 0 in it must be 1 to"),
            (SCHEDULE | {"prefill_chunk_schedule": ()}, "prefill_chunk_schedule: must not be empty"),
            (SCHEDULE | {"prefill_chunk_schedule": (8,) * 1025}, "prefill_chunk_schedule: has 1025 sizes"),
            ({"prefill_chunk_schedule": "8"}, "prefill_chunk_schedule: has no effect with"),
            (
                SCHEDULE | {"prefill_chunk_schedule": "8", "prefill_chunk_size": 9},
                "prefill_chunk_size: has no",
            ),
            ({"prefill_adaptive_start": 0}, "prefill_adaptive_start: is 0"),
            ({"prefill_adaptive_step": 0}, "prefill_adaptive_step: is 0"),
            ({"prefill_adaptive_max": 127}, "prefill_adaptive_start: is 128, must be at most"),
            ({"prefill_adaptive_target_ms": 0}, "prefill_adaptive_target_ms: is 0"),
            ({"prefill_adaptive_target_ms": float("inf")}, "prefill_adaptive_target_ms: is inf"),
            ({"prefill_adaptive_target_ms": float("nan")}, "prefill_adaptive_target_ms: is nan"),
            (
                {"prefill_chunk_policy": "fixed", "prefill_adaptive_step": 64},
                "prefill_adaptive_step: has no effect with prefill_chunk_policy fixed",
            ),
            ({"generation_queue_capacity": 0}, "generation_queue_capacity: is 0"),
            (
                {"generation_admission_timeout_secs": -1.0},
                "generation_admission_timeout_secs: is -1, must be 0 to 86400",
            ),
            ({"stream_keep_alive_secs": float("nan")}, "stream_keep_alive_secs: is nan, must be 0 to 86400"),
            (
                {"adaptive_generation_min_concurrency": 1},
                "adaptive_generation_min_concurrency: needs adaptive_generation_concurrency",
            ),
            (
                {
                    "adaptive_generation_concurrency": True,
                    "adaptive_generation_min_concurrency": 3,
                    "generation_concurrency": 2,
                },
                "adaptive_generation_min_concurrency: is 3, above generation_concurrency 2",
            ),
        ],
    )
    def test_openai_options_refused(self, settings: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            OpenAIOptions(**settings)
        assert str(caught.value).startswith(text)

    @pytest.mark.parametrize(
        ("given", "policy"),
        [("fixed", "fixed"), (" Schedule", "schedule"), ("Adaptive", "adaptive-ramp")],
    )
    def test_chunk_policies(self, given: Any, policy: str) -> None:
        schedule: Any = " 64,128 , 256" if policy == "schedule" else None
        options = OpenAIOptions(prefill_chunk_policy=given, prefill_chunk_schedule=schedule)
        assert options.prefill_chunk_policy == policy
        assert options.prefill_chunk_schedule == ((64, 128, 256) if schedule else None)
        assert OpenAIOptions(prefill_chunk_policy="fixed", prefill_chunk_schedule=(8,))

    def test_defaults(self) -> None:
        assert OpenAIOptions().prefill_chunk_policy == "adaptive-ramp"
        assert OpenAIOptions().bind_endpoint == Endpoint("127.0.0.1", 9337)
        assert OpenAIOptions().default_max_tokens is None
        assert StageOptions().max_inflight == 4
        assert StageOptions().async_prefill_forward

    def test_the_link_token_is_not_shown(self) -> None:
        assert "hunter2" not in repr(StageOptions(link_token="hunter2"))
