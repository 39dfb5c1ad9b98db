"""What a test says that speaks to a stage by itself."""

from __future__ import annotations

from typing import TypeVar

import attrs

from skippy.config import StageConfig
from skippy.engine import EngineInfo
from skippy.protocol import (
    LIVENESS_EXTENSION,
    AdmissionRequest,
    ListenerHandshake,
    LoadedStage,
)
from skippy.sim.peers import lane_request as lane_request
from skippy.stage.admission import StageAdmission, identify_engine, make_admission
from skippy.stage.links import Link


def engine_admission(config: StageConfig, info: EngineInfo, *, heartbeats: bool = False) -> StageAdmission:
    """The admission of a stage that the test plays; by default one that does not know heartbeats."""
    admission = make_admission(config, None, info, identify_engine(config, info))
    if heartbeats:
        return admission
    return attrs.evolve(
        admission,
        loaded=_silent(admission.loaded),
        downstream=admission.downstream and _silent(admission.downstream),
        stage_zero=admission.stage_zero and _silent(admission.stage_zero),
    )


P = TypeVar("P", AdmissionRequest, LoadedStage)


def _silent(party: P) -> P:
    left = tuple(name for name in party.extensions if name != LIVENESS_EXTENSION)
    return attrs.evolve(party, extensions=left)


async def admit_peer(link: Link, loaded: LoadedStage) -> None:
    """The listener's half of the handshake, for a stage that the test plays."""
    handshake = ListenerHandshake(None, loaded)
    while not handshake.admitted:
        await link.send([handshake.data_to_send()])
        buffer = bytearray(4096)
        handshake.receive_data(buffer[: await link.receive_into(memoryview(buffer))])
    await link.send([handshake.data_to_send()])
