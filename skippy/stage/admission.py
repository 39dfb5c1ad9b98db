"""What this stage tells its neighbours at admission, and what it expects of them.

The model's identity comes from the file that was loaded (:func:`identify_model`) or, for an engine that the
host brought, from its name and shape (:func:`identify_engine`). Both sides of a connection must come to the
same descriptor on their own, so everything here is a pure function of model, range and settings.
Comparison and bytes: :mod:`skippy.protocol.admission`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from skippy.config import StageConfig, StageTopology
from skippy.engine import EngineInfo
from skippy.models import (
    FAMILIES,
    RULES_VERSION,
    GGUFHeader,
    LayerRangeError,
    SliceInfo,
    plan_slice,
    read_gguf,
    read_model,
    weights_sha256,
)
from skippy.models.info import is_slice, split_layer_name
from skippy.models.plan import is_copied
from skippy.protocol import (
    ANNEX_EXTENSION,
    LIVENESS_EXTENSION,
    RESTORE_EXTENSION,
    WAVES_EXTENSION,
    AdmissionProfile,
    AdmissionRequest,
    ConnectionRole,
    LoadedStage,
    StageAdmissionDescriptor,
    with_descriptor,
)
from skippy.protocol.strict_json import canonical_json

Range = tuple[int, int]
ENGINE_PACKAGE: Final = "llama-cpp-python"
LANE_EXTENSIONS: Final = (WAVES_EXTENSION, LIVENESS_EXTENSION, RESTORE_EXTENSION, ANNEX_EXTENSION)
"""Between two stages."""
STAGE_ZERO_EXTENSIONS: Final = (LIVENESS_EXTENSION, RESTORE_EXTENSION, ANNEX_EXTENSION)
"""With stage 0, which makes the waves."""
RETURN_EXTENSIONS: Final = (LIVENESS_EXTENSION, ANNEX_EXTENSION)
"""What a return stream has."""


@attrs.frozen(slots=True, kw_only=True)
class ModelIdentity:
    """The model that a stage's part belongs to.

    Attributes:
        package_id: ``sha256:`` and the digest of the whole model's file.
        graph: the model's architecture.
        rules: how parts are made of it.
        backend: what computes.
        tensors: names of the tensors of ``[start, end)``, ascending; None where this stage cannot know.
        source_sha256: finds the digest of the whole model's file, in hex; may read all of it, and raise
            ModelError. None: this stage cannot know it.
        state_readers: who can read states of this stage (:func:`skippy.kv.identity.stage_identity`), where
            anybody has to know.
    """

    package_id: str
    graph: str
    rules: str
    backend: str
    tensors: Callable[[int, int], tuple[str, ...] | None]
    source_sha256: Callable[[], str] | None = None
    state_readers: bytes | None = None


def identify_model(part: SliceInfo, source: Path, ranges: Iterable[Range]) -> ModelIdentity:
    """The identity of the model that ``part`` was cut from. Blocks: it reads headers.

    Args:
        source: the configured file: the whole model, or the part itself. Only the former tells what other
            stages hold.
        ranges: layers of the stages that this one dials.

    Raises:
        GGUFError: a file cannot be read.
    """
    known: dict[Range, tuple[str, ...]] = {
        (part.layer_start, part.layer_end): resident_tensors(read_gguf(part.path), part)
    }
    header = read_model(source)
    if not is_slice(header):
        for start, end in ranges:
            try:
                plan = plan_slice(header, start, end)
            except LayerRangeError:
                continue  # the topology belongs to another model; admission says so
            known[start, end] = tuple(sorted(t.source.name for t in plan.tensors if t.source is not None))
    return ModelIdentity(
        package_id="sha256:" + (part.source_sha256 or _whole_file_digest(header)),
        graph=part.architecture,
        rules=f"skippy-slice-rules:{RULES_VERSION}",
        backend=f"{ENGINE_PACKAGE} {_engine_version()}",
        tensors=lambda start, end: known.get((start, end)),
        source_sha256=functools.partial(weights_sha256, part),
    )


def resident_tensors(header: GGUFHeader, part: SliceInfo) -> tuple[str, ...]:
    """Names, in the whole model's numbering, of the tensors that a part holds, ascending.

    Holes and spare layers do not count. Agrees with what :func:`~skippy.models.plan_slice` copies.
    """
    names: list[str] = []
    family = FAMILIES.get(part.architecture)
    for name in header.tensors:
        place = split_layer_name(name)
        if place is not None:
            index, rest = place
            if 0 <= index - part.front_layers < part.own_layers:
                names.append(f"blk.{index - part.front_layers + part.layer_start}.{rest}")
        elif is_copied(name, family, first=part.is_first, last=part.is_last, tied=part.tied):
            names.append(name)
    return tuple(sorted(names))


def _whole_file_digest(header: GGUFHeader) -> str:
    """Of the list of tensors: a whole model has no neighbour to compare with, so nothing else is hashed."""
    listed = [[t.name, list(t.dims), int(t.type)] for t in header.tensors.values()]
    return hashlib.sha256(canonical_json([header.file_size, listed])).hexdigest()


def _engine_version() -> str:
    try:
        return importlib.metadata.version(ENGINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def identify_engine(config: StageConfig, info: EngineInfo) -> ModelIdentity:
    """The identity of a model whose engine the host brought: its name and shape, layer by layer."""
    shape = {"model": config.model_id, "layers": info.layer_count, "width": info.hidden_size}
    return ModelIdentity(
        package_id="sha256:" + _digest(shape),
        graph=config.model_id,
        rules="layers",
        backend="host",
        tensors=lambda start, end: tuple(sorted(f"blk.{index}" for index in range(start, end))),
    )


def dialled_ranges(config: StageConfig, topology: StageTopology | None) -> list[Range]:
    """Layers of the stages that this one dials, as far as the topology tells."""
    indexes = (config.stage_index + 1, 0)
    stages = () if topology is None else topology.stages
    return [(s.layer_start, s.layer_end) for s in stages if s.stage_index in indexes]


def describe(
    identity: ModelIdentity, config: StageConfig, info: EngineInfo, layers: Range
) -> StageAdmissionDescriptor | None:
    """The descriptor of the stage with these layers, run with this stage's settings; None if not known."""
    start, end = layers
    tensors = identity.tensors(start, end)
    if not tensors:
        return None
    settings = {
        "cache_type_k": config.cache_type_k,
        "cache_type_v": config.cache_type_v,
        "context_length": info.context_length,
        "hidden_size": info.hidden_size,
        "layer_count": info.layer_count,
    }
    configuration = "sha256:" + _digest(settings)
    plan = {
        "package_id": identity.package_id,
        "layers": [start, end],
        "rules": identity.rules,
        "graph_configuration": settings,
        "backend": identity.backend,
    }
    profile = AdmissionProfile(
        profile_id="default",
        graph_identity=identity.graph,
        profile_identity="any-batch",
        slice_identity=f"{identity.rules}:{start}-{end}",
        source_snapshot_identity=identity.package_id,
        graph_configuration_id=configuration,
        backend_id=identity.backend,
    )
    return StageAdmissionDescriptor(
        package_id=identity.package_id,
        plan_id="skippy-plan:v1:" + _digest(plan),
        layer_start=start,
        layer_end=end,
        resident_tensor_ids=tensors,
        profiles=(profile,),
    )


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


@attrs.frozen(slots=True, kw_only=True)
class StageAdmission:
    """One stage's side of every admission.

    Attributes:
        loaded: what peers are compared with.
        downstream: what the next stage is asked; None on a last one.
        stage_zero: what stage 0 is asked on a return stream; None where none is dialled.
    """

    loaded: LoadedStage
    downstream: AdmissionRequest | None
    stage_zero: AdmissionRequest | None


def make_admission(
    config: StageConfig,
    topology: StageTopology | None,
    info: EngineInfo,
    identity: ModelIdentity,
) -> StageAdmission:
    """The admission of a loaded stage. Raises LocalProtocolError for a model that cannot be described."""
    ask = functools.partial(_ask, config, topology, info, identity)
    downstream = stage_zero = None
    if not info.is_last:
        downstream = ask(ConnectionRole.LANE, config.stage_index + 1, info.layer_end, info.output_width)
    elif not info.is_first:
        stage_zero = ask(ConnectionRole.RETURN, 0, 0, 0)
    return StageAdmission(
        loaded=_loaded(config, info, identity), downstream=downstream, stage_zero=stage_zero
    )


def _loaded(config: StageConfig, info: EngineInfo, identity: ModelIdentity) -> LoadedStage:
    own = describe(identity, config, info, (info.layer_start, info.layer_end))
    assert own is not None, "a stage knows its own tensors"
    own.check()
    return LoadedStage(
        stage_id=config.stage_id,
        stage_index=config.stage_index,
        run_id=config.run_id,
        topology_id=config.topology_id,
        model_id=config.model_id,
        layer_count=info.layer_count,
        input_width=info.input_width,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        context_length=info.context_length,
        batch_rows=info.max_batch,
        descriptor=own,
        extensions=STAGE_ZERO_EXTENSIONS if info.is_first else LANE_EXTENSIONS,
    )


def _ask(
    config: StageConfig,
    topology: StageTopology | None,
    info: EngineInfo,
    identity: ModelIdentity,
    role: ConnectionRole,
    index: int,
    start: int,
    width: int,
) -> AdmissionRequest:
    """What the stage ``index``, whose layers begin at ``start``, is asked, as far as it is known."""
    known = {} if topology is None else {s.stage_index: s for s in topology.stages}
    placement, peers = known.get(index), (config.upstream, config.downstream)
    peer = next((p for p in peers if p is not None and p.stage_index == index), None)
    end = None if placement is None else placement.layer_end
    request = AdmissionRequest(
        role=role,
        sender_id=config.stage_id,
        sender_index=config.stage_index,
        target_id=peer.stage_id if peer else placement.stage_id if placement else None,
        target_index=index,
        layer_start=start,
        layer_end=end,
        run_id=config.run_id,
        topology_id=config.topology_id,
        model_id=config.model_id,
        layer_count=info.layer_count,
        package_id=identity.package_id,
        activation_width=width,
        cache_type_k=config.cache_type_k,
        cache_type_v=config.cache_type_v,
        context_length=info.context_length,
        batch_rows=info.max_batch,
        extensions=LANE_EXTENSIONS if role is ConnectionRole.LANE else RETURN_EXTENSIONS,
    )
    descriptor = None if end is None else describe(identity, config, info, (start, end))
    return request if descriptor is None else with_descriptor(request, descriptor)
