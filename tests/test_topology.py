"""The planner: cuts, and the configuration values they become."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from skippy.config import Endpoint, check_against_topology
from skippy.topology import (
    LayerRange,
    PlanError,
    make_stage_configs,
    make_topology,
    parse_splits,
    plan_even,
    plan_splits,
)


def text(ranges: list[LayerRange]) -> str:
    return " ".join(map(str, ranges))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (30, 1, "0:30"),
        (30, 3, "0:10 10:20 20:30"),
        (31, 3, "0:11 11:21 21:31"),
        (32, 3, "0:11 11:22 22:32"),
        (3, 3, "0:1 1:2 2:3"),
    ],
)
def test_even(layers: int, stages: int, expected: str) -> None:
    assert text(plan_even(layers, stages)) == expected


@given(layers=st.integers(1, 500), stages=st.integers(1, 500))
def test_even_covers_every_layer_once(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(
            PlanError, match=f"^{stages} stages asked for, but the model has {layers} layers$"
        ):
            plan_even(layers, stages)
        return
    ranges = plan_even(layers, stages)
    assert [layer for r in ranges for layer in range(r.start, r.end)] == list(range(layers))
    counts = [r.count for r in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_no_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="^0 stages asked for"):
        plan_even(30, 0)


def test_splits() -> None:
    assert text(plan_splits(30, parse_splits("10, 12"))) == "0:10 10:12 12:30"
    assert text(plan_splits(30, [])) == "0:30"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([0], "cut 0 is outside the model; with 30 layers, cuts are 1 to 29"),
        ([30], "cut 30 is outside the model"),
        ([10, 10], "cut 10 comes after 10; cuts must ascend"),
        ([20, 10], "cut 10 comes after 20"),
    ],
)
def test_bad_splits(splits: list[int], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_splits(30, splits)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", ["", "a", "10,", "10;20", "-1", "1.5", "٣"])
def test_splits_that_are_no_numbers(value: str) -> None:
    with pytest.raises(PlanError, match="is no list of cuts"):
        parse_splits(value)


@pytest.mark.parametrize("value", ["", "10", "a:b", "1:2:3", "-1:4", "4:4", "5:4"])
def test_bad_layer_ranges(value: str) -> None:
    with pytest.raises(PlanError):
        LayerRange.parse(value)


def test_layer_range() -> None:
    layers = LayerRange.parse("10:20")
    assert (layers.start, layers.end, layers.count) == (10, 20, 10)


def test_configs_of_a_chain() -> None:
    endpoints = [Endpoint("127.0.0.1", 19000 + index) for index in range(3)]
    topology = make_topology(
        plan_even(30, 3), endpoints, topology_id="cut", model_id="m", hosts=["a", "b", "c"]
    )
    configs = make_stage_configs(topology, run_id="run", model_path="m.gguf", ctx_size=77)
    assert [stage.host for stage in topology.stages] == ["a", "b", "c"]
    for index, config in enumerate(configs):
        check_against_topology(config, topology)
        assert config.bind_endpoint == endpoints[index]
        assert config.ctx_size == 77
    first, middle, last = configs
    assert first.upstream is None
    assert first.downstream is not None
    assert middle.upstream is not None
    assert middle.downstream is not None
    assert last.downstream is None
    assert first.downstream.address == endpoints[1]
    assert middle.upstream.address == endpoints[0]
    assert middle.downstream.address == endpoints[2]


def test_endpoints_must_fit_the_ranges() -> None:
    with pytest.raises(PlanError, match="^2 layer ranges, but 1 endpoints$"):
        make_topology(plan_even(30, 2), [Endpoint("h", 1)], topology_id="t", model_id="m")
