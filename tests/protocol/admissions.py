"""A stage that is loaded, the request that fits it, and strategies around them."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from fuzz import stages
from fuzz.stages import DESCRIPTOR
from skippy.protocol import (
    AdmissionProfile,
    AdmissionRequest,
    AdmissionSidecar,
    ConnectionRole,
    StageAdmissionDescriptor,
    with_descriptor,
)

(PROFILE,) = DESCRIPTOR.profiles
_ALIKE = {"topology_id": "topology", "model_id": "model", "context_length": 4096, "batch_rows": 512}
LOADED = attrs.evolve(stages.LOADED, input_width=576, extensions=("annex", "other"), **_ALIKE)
BARE = attrs.evolve(stages.BARE_REQUEST, activation_width=576, extensions=(), **_ALIKE)
REQUEST = with_descriptor(BARE, DESCRIPTOR)

FIRST = attrs.evolve(
    LOADED,
    stage_id="first",
    stage_index=0,
    input_width=0,
    descriptor=attrs.evolve(DESCRIPTOR, layer_start=0, layer_end=2),
)
RETURN = attrs.evolve(
    BARE,
    role=ConnectionRole.RETURN,
    sender_id="last",
    sender_index=2,
    target_id="first",
    target_index=0,
    layer_start=0,
    layer_end=2,
    activation_width=0,
)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
indexes = st.integers(0, 2**32 - 1)
sorted_names = st.lists(names, min_size=1, max_size=5, unique=True).map(lambda n: tuple(sorted(n)))
hexes = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def descriptors(draw: st.DrawFn) -> StageAdmissionDescriptor:
    start = draw(st.integers(0, 200))
    identities = draw(st.fixed_dictionaries({a.name: names for a in attrs.fields(AdmissionProfile)[1:]}))
    return StageAdmissionDescriptor(
        package_id="sha256:" + draw(hexes),
        plan_id="skippy-plan:v1:" + draw(hexes),
        layer_start=start,
        layer_end=start + draw(st.integers(1, 200)),
        resident_tensor_ids=draw(sorted_names),
        profiles=tuple(AdmissionProfile(profile_id=i, **identities) for i in draw(sorted_names)),
        sidecars=tuple(AdmissionSidecar(1, name) for name in draw(st.just(()) | sorted_names)),
    )


@st.composite
def requests(draw: st.DrawFn) -> AdmissionRequest:
    maybe_name, maybe_count = st.none() | names, st.none() | st.integers(1, 2**32 - 1)
    bare = AdmissionRequest(
        role=draw(st.sampled_from(ConnectionRole)),
        sender_id=draw(names),
        sender_index=draw(st.integers(-1, 2**32 - 1)),
        target_id=draw(maybe_name),
        target_index=draw(indexes),
        layer_start=draw(indexes),
        layer_end=draw(maybe_count),
        run_id=draw(names),
        topology_id=draw(names),
        model_id=draw(names),
        layer_count=draw(maybe_count),
        package_id=draw(maybe_name),
        activation_width=draw(indexes),
        cache_type_k=draw(maybe_name),
        cache_type_v=draw(maybe_name),
        context_length=draw(st.integers(1, 2**32 - 1)),
        batch_rows=draw(st.integers(1, 2**32 - 1)),
        extensions=draw(st.just(()) | sorted_names),
    )
    descriptor = draw(st.none() | descriptors())
    return bare if descriptor is None else with_descriptor(bare, descriptor)
