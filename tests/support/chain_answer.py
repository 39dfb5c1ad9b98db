"""What a chain of real stages over memory links answers over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import httpx

from skippy import embed
from skippy.config import OpenAIOptions, StageOptions

from .cluster import toy_config, toy_topology


async def chain_answer(ranges: list[tuple[int, int]], settings: Sequence[Mapping[str, Any]]) -> str:
    """A greedy text of 12 tokens; ``settings`` are each stage's own, its ``model_path`` among them."""
    endpoints = [f"127.0.0.1:{index + 1}" for index in range(len(ranges))]
    topology, transport = toy_topology(ranges, endpoints), embed.MemoryTransport()
    configs = [
        attrs.evolve(toy_config(index, ranges, endpoints, n_threads=1), **own)
        for index, own in enumerate(settings)
    ]
    stages = tuple(
        attrs.evolve(stage, load_mode=config.load_mode)
        for stage, config in zip(topology.stages, configs, strict=True)
    )
    topology = attrs.evolve(topology, stages=stages)
    options = OpenAIOptions(bind_addr="127.0.0.1:0", prefill_chunk_policy="fixed")
    body = {"model": "toy", "prompt": "The cat sat on", "max_tokens": 12, "temperature": 0}
    async with contextlib.AsyncExitStack() as stack:
        for config in reversed(configs):
            stage = await stack.enter_async_context(
                embed.open_stage(config, topology, StageOptions(), transport=transport)
            )
        endpoint = await stack.enter_async_context(embed.open_openai(stage, options))
        await endpoint.wait_ready()
        async with httpx.AsyncClient(timeout=30) as http:
            response = await http.post(endpoint.url + "/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
    return text
