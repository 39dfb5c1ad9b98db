"""A served chain of real processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import openai

from bench.ports import reserve_port
from tests.support.processes import Process, running

LAYERS = 30


@attrs.define
class Served:
    """An OpenAI endpoint and its process: a running `skippy run`, or stage 0."""

    process: Process
    url: str
    model: str


@attrs.define
class ServedChain(Served):
    """Stages that were started one by one, first to last."""

    stages: list[Process]


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """The official client of an endpoint."""
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


@contextlib.contextmanager
def serve(
    model: Path, stages: int | None, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`skippy run` on a port of the system's choice, one thread per stage, ended with the block."""
    command = ["run", "--model", str(model), "--bind", "127.0.0.1:0", "--threads", "1", *arguments]
    if stages is not None:
        command += ["--stages", str(stages)]
    with running(command, env) as process:
        url = process.wait_for(r"OpenAI endpoint: (\S+)")[1]
        name = process.wait_for(r"serves (\S+) in")[1]
        yield Served(process, url, name)


def write_chain(
    folder: Path, model: Path, hosts: Sequence[str], *, scheme: str | None = None, **keys: Any
) -> list[list[str]]:
    """Configuration files of a chain with one stage on each address, and the command of each stage.

    Args:
        scheme: of all endpoints.
        keys: of every stage's file.
    """
    prefix = f"{scheme}://" if scheme else ""
    endpoints = [f"{prefix}{host}:{reserve_port(host)}" for host in hosts]
    cuts = [LAYERS * i // len(hosts) for i in range(len(hosts) + 1)]
    placements: list[dict[str, Any]] = [
        {
            "stage_id": f"stage-{i}",
            "stage_index": i,
            "endpoint": endpoints[i],
            "layer_start": cuts[i],
            "layer_end": cuts[i + 1],
            "load_mode": "runtime-slice",
        }
        for i in range(len(hosts))
    ]
    topology = {"topology_id": "chain", "model_id": "smollm2", "stages": placements}
    (folder / "topology.json").write_text(json.dumps(topology))
    commands = []
    for i, placement in enumerate(placements):
        peers = {
            name: {key: placements[j][key] for key in ("stage_id", "stage_index", "endpoint")}
            for name, j in (("upstream", i - 1), ("downstream", i + 1))
            if 0 <= j < len(hosts)
        }
        stage = {key: value for key, value in placement.items() if key != "endpoint"}
        config = {
            "run_id": "test",
            "topology_id": "chain",
            "model_id": "smollm2",
            "bind_addr": endpoints[i],
            "model_path": str(model),
            "ctx_size": 512,
            "n_threads": 1,
            **stage,
            **peers,
            **keys,
        }
        path = folder / f"stage-{i}.json"
        path.write_text(json.dumps(config))
        commands.append(["run", "--config", str(path), "--topology", str(folder / "topology.json")])
    commands[0] += ["--openai-bind-addr", "127.0.0.1:0"]
    return commands


@contextlib.contextmanager
def serve_chain(commands: Sequence[Sequence[str]], *arguments: str) -> Iterator[ServedChain]:
    """The stages of :func:`write_chain`, each with ``arguments``, ended with the block."""
    with contextlib.ExitStack() as stack:
        stages = [
            stack.enter_context(running(["serve-binary", *command[1:], *arguments]))
            for command in reversed(commands)
        ][::-1]
        url = stages[0].wait_for(r"(http://\S+/v1)")[1]
        stages[0].wait_for("^ready$")
        yield ServedChain(stages[0], url, "smollm2", stages)
