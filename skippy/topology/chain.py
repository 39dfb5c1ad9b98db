"""A plan and its endpoints to the configuration values of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skippy.config import Endpoint, PeerConfig, StageConfig, StagePlacement, StageTopology

from .plan import LayerRange, PlanError

LOAD_MODE = "runtime-slice"


def make_topology(
    ranges: Sequence[LayerRange],
    endpoints: Sequence[Endpoint],
    *,
    topology_id: str,
    model_id: str,
    load_mode: str = LOAD_MODE,
    hosts: Sequence[str] | None = None,
) -> StageTopology:
    """The topology with one stage per range; stage ``i`` is called ``stage-i``.

    Raises:
        PlanError: not as many endpoints as ranges.
        skippy.config.ConfigError: ranges that do not touch, or a bad endpoint.
    """
    if len(ranges) != len(endpoints):
        raise PlanError(f"{len(ranges)} layer ranges, but {len(endpoints)} endpoints")
    return StageTopology(
        topology_id=topology_id,
        model_id=model_id,
        stages=tuple(
            StagePlacement(
                stage_id=f"stage-{index}",
                stage_index=index,
                host=hosts[index] if hosts is not None else None,
                endpoint=endpoint.url,
                layer_start=layers.start,
                layer_end=layers.end,
                load_mode=load_mode,
            )
            for index, (layers, endpoint) in enumerate(zip(ranges, endpoints, strict=True))
        ),
    )


def make_stage_configs(topology: StageTopology, *, run_id: str, **settings: Any) -> list[StageConfig]:
    """The configuration of every stage of ``topology``, in order.

    Args:
        topology: from :func:`make_topology`.
        run_id: names the run.
        settings: further keys of :class:`~skippy.config.StageConfig`, the same for all stages.
    """
    peers = [
        PeerConfig(stage_id=stage.stage_id, stage_index=stage.stage_index, endpoint=stage.endpoint)
        for stage in topology.stages
    ]
    return [
        StageConfig(
            run_id=run_id,
            topology_id=topology.topology_id,
            model_id=topology.model_id,
            stage_id=stage.stage_id,
            stage_index=index,
            layer_start=stage.layer_start,
            layer_end=stage.layer_end,
            load_mode=stage.load_mode,
            bind_addr=str(stage.address),
            upstream=peers[index - 1] if index > 0 else None,
            downstream=peers[index + 1] if index + 1 < len(peers) else None,
            **settings,
        )
        for index, stage in enumerate(topology.stages)
    ]
