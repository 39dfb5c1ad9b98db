"""What every part of one stage shares: who it is, whom it talks to, and its services."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from skippy.config import Endpoint, StageConfig, StageOptions, StageTopology
from skippy.engine import EngineInfo
from skippy.telemetry import Telemetry, get_logger

from .admission import StageAdmission
from .dialing import Admitted, DialWatch, dial_admitted
from .errors import StageStartError
from .grammars import Grammars
from .keeping import StageCache
from .links import Transport
from .liveness import Liveness
from .memory import FrameBudget
from .preconnect import WarmSlot
from .refusals import Refusals
from .returns import ReturnHub
from .scheduler import Scheduler
from .statistics import LastPrompt

if TYPE_CHECKING:
    from .lane import Lane

log = get_logger("skippy.stage")

HANDSHAKE_SECS = 20.0
"""How long a peer may take to show its link token; to ask for admission; at stage 0, to send its first
message; and stage 0, to be ready once the last stage dials it."""

MESSAGE_SECS = 300.0
"""Longest one message may take a stage, its waits for credit, for room and for its turn included. Far above a
slow prefill chunk; whatever stalls for longer costs the lane, not the stage."""

LAST_WORDS_SECS = 1.0
"""How long a peer may take to hear why its connection ends, and to close it then."""

REASON_SECS = 0.5
"""How long a lane that cannot send any more, or lost its return stream, still waits for the reason, which the
stage below sends up the lane before it closes it."""


@attrs.frozen(slots=True, kw_only=True)
class StageContext:
    """Shared, read-only parts of one running stage.

    Attributes:
        admission: what this stage tells its neighbours, and asks of them.
        transport: to dial stage 0 for a return stream.
        downstream_transport: to dial the next stage; conditioned where the options say so.
        downstream: endpoint of the next stage; None on the last one.
        downstream_watch: how dialling it goes, of all lanes together.
        return_endpoint: where the last stage finds stage 0; None on every other stage and in a chain of one.
        liveness: watches all connections.
        frame_budget: memory for received frames, shared by all connections.
        max_activation_bytes: largest activation one frame may carry into this stage.
        refusals: peers that the listener has refused, as far as the log has told of them.
        warm: a connection to the next stage that waits to be used, where the options ask for one.
        connection_numbers: a number for each lane, for messages and telemetry.
        lanes: the lanes that run now.
        cache: what the stage remembers of prompts; None where it remembers nothing.
        last_prompt: how long the stage took for the last one.
        grammars: checks and compiles those of requests.
        served: set once a request has ended in good order.
    """

    config: StageConfig
    options: StageOptions
    admission: StageAdmission
    scheduler: Scheduler
    transport: Transport
    downstream_transport: Transport
    telemetry: Telemetry
    hub: ReturnHub
    downstream: Endpoint | None
    return_endpoint: Endpoint | None
    max_activation_bytes: int
    liveness: Liveness
    frame_budget: FrameBudget = attrs.field(factory=FrameBudget)
    downstream_watch: DialWatch = attrs.field(factory=DialWatch)
    refusals: Refusals = attrs.field(factory=Refusals)
    warm: WarmSlot = attrs.field(factory=WarmSlot)
    connection_numbers: Callable[[], int] = attrs.field(factory=lambda: itertools.count(1).__next__)
    lanes: set[Lane] = attrs.field(factory=set)
    cache: StageCache | None = None
    last_prompt: LastPrompt = attrs.field(factory=LastPrompt)
    grammars: Grammars = attrs.field(factory=lambda: Grammars(None))
    served: trio.Event = attrs.field(factory=trio.Event)

    @property
    def info(self) -> EngineInfo:
        return self.scheduler.info

    @property
    def stage_index(self) -> int:
        return self.config.stage_index

    @property
    def source_host(self) -> str | None:
        """The address that outgoing connections come from: the one in ``bind_addr``, unless unspecified."""
        bind = self.config.bind_endpoint
        return None if bind.ip is None or bind.is_unspecified else bind.host

    @property
    def token(self) -> bytes | None:
        token = self.options.link_token
        return None if token is None else token.encode()

    async def dial_downstream(self, *, watch: DialWatch | None = None) -> Admitted:
        """A connection to the next stage, which must be there; as :func:`dial_admitted`, which it raises.

        Args:
            watch: is told how it goes; None makes a single attempt, of which nobody is told.
        """
        assert self.downstream is not None
        return await dial_admitted(
            self.downstream_transport,
            self.downstream,
            token=self.token,
            source_host=self.source_host,
            timeout_secs=self.options.downstream_connect_timeout_secs,
            request=self.admission.downstream,
            allow_plain=self.options.allow_plain_generation_8,
            retry=watch is not None,
            watch=watch,
            answer_secs=self.options.peer_timeout_secs,
        )

    @property
    def reply_credit(self) -> int:
        """Acknowledgements that may be outstanding downstream; 0 means each one is awaited."""
        limit = self.options.reply_credit_limit
        return limit if limit is not None else max(0, self.options.max_inflight - 1)


def find_neighbours(
    config: StageConfig, topology: StageTopology | None, info: EngineInfo
) -> tuple[Endpoint | None, Endpoint | None]:
    """The endpoints of the next stage and, for a last stage, of stage 0.

    ``config`` comes first; the topology fills in what it leaves out.

    Raises:
        StageStartError: a neighbour that the layer range calls for is not named anywhere.
    """
    peers = {} if topology is None else {s.stage_index: s.address for s in topology.stages}
    downstream = config.downstream.address if config.downstream else peers.get(config.stage_index + 1)
    if info.is_last and downstream is not None:
        raise StageStartError(
            f"{config.stage_id}: layers end at {config.layer_end}, the model's last, so there can be no "
            f"downstream, but one is configured ({downstream})"
        )
    if not info.is_last and downstream is None:
        raise StageStartError(
            f"{config.stage_id}: layers {config.layer_start}:{config.layer_end} of {info.layer_count} need a "
            "downstream stage; set `downstream` in the stage's configuration or give a topology"
        )
    stage_zero = None
    if info.is_last and not info.is_first:
        upstream = config.upstream
        stage_zero = peers.get(0)
        if stage_zero is None and upstream is not None and upstream.stage_index == 0:
            stage_zero = upstream.address
        if stage_zero is None:
            raise StageStartError(
                f"{config.stage_id}: the last stage returns predictions straight to stage 0, but does not "
                "know its endpoint; give a topology, or an `upstream` with stage_index 0"
            )
    return downstream, stage_zero
