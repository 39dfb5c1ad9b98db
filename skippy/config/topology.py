"""The whole chain: the JSON object of ``topology.json``, and a stage's place in it."""

from __future__ import annotations

import attrs

from .endpoint import Endpoint
from .errors import ConfigError
from .fields import key, require, require_range, require_text
from .stage import U32_MAX, StageConfig, check_load_mode


@attrs.frozen(slots=True, kw_only=True)
class StagePlacement:
    """One stage of a topology."""

    stage_id: str = key("Names the stage; unique.")
    stage_index: int = key("Position in the chain, from 0 without gaps.")
    host: str | None = key("The machine, for people to read.", default=None)
    endpoint: str = key(
        "Where the stage listens: `host:port` (TCP), or with `tls://`, `ws://` or `wss://` in front."
    )
    layer_start: int = key("First layer; where the stage before ends.")
    layer_end: int = key("One after the last layer.")
    load_mode: str = key("As in the stage's own file.")

    def __attrs_post_init__(self) -> None:
        require_text(self, "stage_id", "host")
        require_range(self, 0, U32_MAX, "stage_index", "layer_start", "layer_end")
        require(
            self.layer_start < self.layer_end,
            f"layer_start: is {self.layer_start}, must be below layer_end, which is {self.layer_end}",
        )
        check_load_mode(self.load_mode)
        Endpoint.parse(self.endpoint)

    @property
    def address(self) -> Endpoint:
        return Endpoint.parse(self.endpoint)


@attrs.frozen(slots=True, kw_only=True)
class StageTopology:
    """All stages of a chain, in any order in the file, sorted by index here.

    Valid once built: indexes run from 0 without gaps, ids are unique, layer ranges start at 0 and touch.
    """

    topology_id: str = key("Names the cut.")
    model_id: str = key("Names the model.")
    stages: tuple[StagePlacement, ...] = key(
        "The stages.", converter=lambda stages: tuple(sorted(stages, key=lambda stage: stage.stage_index))
    )

    def __attrs_post_init__(self) -> None:
        require_text(self, "topology_id", "model_id")
        require(bool(self.stages), "stages: is empty; a chain has at least one stage")
        seen: set[str] = set()
        end = 0
        for index, stage in enumerate(self.stages):
            require(
                stage.stage_index == index,
                f"stages: indexes are {[s.stage_index for s in self.stages]}, "
                f"must be 0 to {len(self.stages) - 1}, each once",
            )
            require(stage.stage_id not in seen, f"stages: stage_id {stage.stage_id!r} appears twice")
            seen.add(stage.stage_id)
            require(
                stage.layer_start == end,
                f"stages: stage {stage.stage_id!r} starts at layer {stage.layer_start}, must start at {end}, "
                + ("the first layer" if index == 0 else "where the stage before it ends"),
            )
            end = stage.layer_end

    @property
    def layer_count(self) -> int:
        return self.stages[-1].layer_end

    def stage(self, stage_id: str) -> StagePlacement | None:
        return next((stage for stage in self.stages if stage.stage_id == stage_id), None)


def check_against_topology(config: StageConfig, topology: StageTopology) -> None:
    """Refuse a stage whose file and topology tell different stories.

    Raises:
        ConfigError: naming the first key that differs, and both values.
    """
    for name in ("topology_id", "model_id"):
        mine, theirs = getattr(config, name), getattr(topology, name)
        require(mine == theirs, f"{name}: the stage says {mine!r}, the topology says {theirs!r}")
    placement = topology.stage(config.stage_id)
    if placement is None:
        known = ", ".join(stage.stage_id for stage in topology.stages)
        raise ConfigError(f"stage_id: {config.stage_id!r} is not in the topology, which has {known}")
    for name in ("stage_index", "layer_start", "layer_end", "load_mode"):
        mine, theirs = getattr(config, name), getattr(placement, name)
        require(mine == theirs, f"{name}: the stage says {mine!r}, the topology says {theirs!r}")
    index = config.stage_index
    is_last = index == len(topology.stages) - 1
    require(
        not is_last or config.downstream is None,
        f"downstream: must be null, because {config.stage_id!r} is the topology's last stage",
    )
    for name, peer in (("upstream", config.upstream), ("downstream", config.downstream)):
        if peer is not None:
            expected = topology.stages[peer.stage_index].stage_id
            require(
                peer.stage_id == expected,
                f"{name}.stage_id: the stage says {peer.stage_id!r}, the topology says {expected!r}",
            )
