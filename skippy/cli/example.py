"""``skippy example-config``."""

from __future__ import annotations

import json

import click

EXAMPLE = {
    "run_id": "run-1",
    "topology_id": "topology-1",
    "model_id": "model-1",
    "stage_id": "stage-0",
    "stage_index": 0,
    "layer_start": 0,
    "layer_end": 1,
    "load_mode": "runtime-slice",
    "model_path": "model.gguf",
    "bind_addr": "127.0.0.1:19000",
    "ctx_size": 512,
    "lane_count": 4,
    "n_gpu_layers": 0,
    "upstream": None,
    "downstream": None,
}


@click.command("example-config")
def example_config() -> None:
    """Print a stage's JSON file to start from."""
    click.echo(json.dumps(EXAMPLE, indent=2))
