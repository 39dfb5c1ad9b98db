"""A stage that is loaded, and a request that it admits."""

from __future__ import annotations

from typing import Final

from skippy.protocol import (
    ANNEX_EXTENSION,
    AdmissionProfile,
    AdmissionRequest,
    ConnectionRole,
    LoadedStage,
    StageAdmissionDescriptor,
    with_descriptor,
)

TOKEN: Final = b"a link token"
_PACKAGE: Final = "sha256:" + "0a" * 32
DESCRIPTOR: Final = StageAdmissionDescriptor(
    package_id=_PACKAGE,
    plan_id="skippy-plan:v1:" + "0b" * 32,
    layer_start=2,
    layer_end=4,
    resident_tensor_ids=("blk.2.attn_q.weight", "blk.3.attn_q.weight"),
    profiles=(
        AdmissionProfile(
            profile_id="default",
            graph_identity="llama",
            profile_identity="p",
            slice_identity="2-4",
            source_snapshot_identity=_PACKAGE,
            graph_configuration_id="g",
            backend_id="toy",
        ),
    ),
)
LOADED: Final = LoadedStage(
    stage_id="middle",
    stage_index=1,
    run_id="run",
    topology_id="three",
    model_id="tiny",
    layer_count=6,
    input_width=8,
    cache_type_k="f16",
    cache_type_v="f16",
    context_length=512,
    batch_rows=64,
    descriptor=DESCRIPTOR,
    extensions=(ANNEX_EXTENSION,),
)
BARE_REQUEST: Final = AdmissionRequest(
    role=ConnectionRole.LANE,
    sender_id="first",
    sender_index=0,
    target_id="middle",
    target_index=1,
    layer_start=2,
    layer_end=4,
    run_id="run",
    topology_id="three",
    model_id="tiny",
    layer_count=6,
    package_id=_PACKAGE,
    activation_width=8,
    cache_type_k="f16",
    cache_type_v="f16",
    context_length=512,
    batch_rows=64,
    extensions=(ANNEX_EXTENSION,),
)
REQUEST: Final = with_descriptor(BARE_REQUEST, DESCRIPTOR)
