"""Options of a running stage and of its OpenAI endpoint: command line flags, or a host's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, cast, get_args

import attrs

from .access import AccessOptions
from .endpoint import Endpoint
from .errors import ConfigError
from .fields import key, require, require_range, require_text
from .stage import I32_MAX, U32_MAX

MAX_LINK_TOKEN_BYTES = 64
MAX_CHUNK_SIZES = 1024
"""Of a schedule, and so of what stage 0 tells other stages of it."""
MAX_WIRE_MS = 3_600_000
"""Longest that any part of a conditioned wire may hold a frame: one hour."""
MAX_WAIT_SECS = 86_400


@attrs.frozen(slots=True, kw_only=True)
class WireConditions:
    """How much worse than the real one the wire to the next stage is. Checked by :class:`StageOptions`."""

    delay_ms: float = 0.0
    mbps: float | None = None
    jitter_ms: float = 0.0
    stall_ms: float = 0.0
    stall_probability: float = 0.0


@attrs.frozen(slots=True, kw_only=True)
class StageOptions:
    """How a stage runs, apart from what it is."""

    max_inflight: int = key(
        "Frames of one lane that may wait to be carried out; more wait with their sender. Has nothing to do "
        "with lane_count.",
        default=4,
    )
    reply_credit_limit: int | None = key(
        "Prefill chunks that may be on their way downstream unacknowledged; 0: none, each is awaited; null: "
        "max_inflight - 1.",
        default=None,
    )
    async_prefill_forward: bool = key(
        "Send frames on while the next one is computed; off: wait until each has been handed to the system.",
        default=True,
    )
    downstream_connect_timeout_secs: int = key(
        "How long to try to reach the stage after this one.", default=60
    )
    peer_timeout_secs: float = key(
        "How long a neighbour may be silent, or get on too slowly with a frame, before the connection to it "
        "is given up; neighbours that have nothing to say send heartbeats.",
        default=10.0,
    )
    safe_mode: bool = key(
        "Compute one sequence at a time, in order of arrival, cut prompts into chunks of one size where the "
        "policy is adaptive, and restore only what was computed in the same chunks: a result depends on its "
        "request alone, not on load. The commands take it from SKIPPY_ITERATION_SCHEDULER_SAFE_MODE.",
        default=False,
    )
    verify_package: bool = key(
        "Check the SHA-256 of a layer package's parts before they are used, once for each state (size and "
        "modification time) of a file.",
        default=True,
    )
    precheck: bool = key(
        "Before a model of a shape that was never tried is cut: make a small random model like it, cut it in "
        "the same places and compare it with itself unsplit, once. A cut that is not exact is refused.",
        default=True,
    )
    warm_preconnect: bool = key(
        "Keep one connection to the stage after this one ready, for the next lane that needs one; commands "
        "take it from SKIPPY_BINARY_WARM_PRECONNECT.",
        default=False,
    )
    link_token: str | None = key(
        "Secret that stages show each other, 1 to 64 bytes; null: none is asked for.",
        default=None,
        repr=False,
    )
    allow_plain_generation_8: bool = key(
        "Also talk to peers that send no admission packet: nothing is compared with them, so a wrong cut or "
        "model goes unnoticed.",
        default=False,
    )
    tls_cert: str | None = key(
        "PEM file with this stage's certificate and what links it to its CA; for `tls://` and `wss://`.",
        default=None,
    )
    tls_key: str | None = key("PEM file with the key of tls_cert, without a password.", default=None)
    tls_ca: str | None = key(
        "PEM file with the CA that signs the chain's certificates. With it, who connects must show a "
        "certificate of it; null: anyone may, and the stages dialled are checked against the system's CAs.",
        default=None,
    )
    downstream_wire_delay_ms: float = key(
        "Test aid: hold each frame for the next stage this long; frames behind each other overlap.",
        default=0.0,
    )
    downstream_wire_mbps: float | None = key(
        "Test aid: send no faster to the next stage than this, in 10^6 bits per second; null: no limit.",
        default=None,
    )
    downstream_wire_jitter_ms: float = key(
        "Test aid: mean of an exponentially distributed delay of each frame, on top.", default=0.0
    )
    downstream_wire_stall_ms: float = key(
        "Test aid: how long the wire to the next stage stands still when it stalls.", default=0.0
    )
    downstream_wire_stall_probability: float = key(
        "Test aid: how likely a stall is before each frame, 0 to 1.", default=0.0
    )
    telemetry_level: Literal["off", "summary", "debug"] = key(
        "How much the commands record; a host hands its own Telemetry to open_stage.", default="summary"
    )
    telemetry_queue_capacity: int = key(
        "Events of the commands that may wait to be written; more are dropped.", default=1024
    )

    def __attrs_post_init__(self) -> None:
        require_range(self, 1, I32_MAX, "max_inflight", "telemetry_queue_capacity")
        require_range(self, 0, I32_MAX, "reply_credit_limit")
        require_range(self, 1, 86_400, "downstream_connect_timeout_secs")
        timeout = self.peer_timeout_secs
        require(1 <= timeout <= 3600, f"peer_timeout_secs: is {timeout:g}, must be 1 to 3600")
        if self.link_token is not None:
            size = len(self.link_token.encode())
            require(1 <= size <= MAX_LINK_TOKEN_BYTES, f"link_token: has {size} bytes, must have 1 to 64")
        require_text(self, "tls_cert", "tls_key", "tls_ca")
        for given, missing in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            require(
                getattr(self, given) is None or getattr(self, missing) is not None,
                f"{missing}: is missing; {given} needs it",
            )
        self._check_wire()

    def _check_wire(self) -> None:
        for part in ("delay", "jitter", "stall"):
            name = f"downstream_wire_{part}_ms"
            value = getattr(self, name)
            require(0 <= value <= MAX_WIRE_MS, f"{name}: is {value:g}, must be 0 to {MAX_WIRE_MS}")
        mbps = self.downstream_wire_mbps
        require(
            mbps is None or (mbps > 0 and math.isfinite(mbps)),
            f"downstream_wire_mbps: is {mbps}, must be above 0 and finite",
        )
        probability = self.downstream_wire_stall_probability
        require(
            0 <= probability <= 1, f"downstream_wire_stall_probability: is {probability:g}, must be 0 to 1"
        )
        require(
            (probability > 0) == (self.downstream_wire_stall_ms > 0),
            "downstream_wire_stall_probability: a stall needs a length and a probability, both above 0",
        )

    @property
    def wire_conditions(self) -> WireConditions | None:
        """What is asked of the wire to the next stage; None when nothing is."""
        conditions = WireConditions(
            delay_ms=self.downstream_wire_delay_ms,
            mbps=self.downstream_wire_mbps,
            jitter_ms=self.downstream_wire_jitter_ms,
            stall_ms=self.downstream_wire_stall_ms,
            stall_probability=self.downstream_wire_stall_probability,
        )
        return None if conditions == WireConditions() else conditions


ChunkPolicyName = Literal["fixed", "schedule", "adaptive-ramp"]


def _chunk_policy(text: str) -> ChunkPolicyName:
    """A policy's name, however it is written."""
    name = text.strip().lower()
    name = "adaptive-ramp" if name == "adaptive" else name
    known = get_args(ChunkPolicyName)
    require(name in known, f"prefill_chunk_policy: is {text!r}, must be one of {', '.join(known)}")
    return cast(ChunkPolicyName, name)


def _chunk_schedule(value: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Sizes, also as text with commas between them; None for nothing and for blank text."""
    if value is None:
        return None
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = [int(part) for part in value.split(",")]
        except ValueError:
            raise ConfigError(
                f"prefill_chunk_schedule: is {value!r}, must be whole numbers with commas between them"
            ) from None
    return tuple(value)


@attrs.frozen(slots=True, kw_only=True)
class OpenAIOptions(AccessOptions):
    """The OpenAI endpoint of a stage 0."""

    bind_addr: str = key("Where HTTP is served: `host:port`, port 0 for any.", default="127.0.0.1:9337")
    model_id: str | None = key("The name clients ask for; null: the stage's model_id.", default=None)
    default_max_tokens: int | None = key(
        "Tokens generated at most when a request does not say; null: the rest of the context.", default=None
    )
    generation_concurrency: int | None = key("Requests generated at once; null: lane_count.", default=None)
    generation_queue_capacity: int | None = key(
        "Requests that may wait on top of those; more are answered with 429; null: eight for each of "
        "those, 16 to 256.",
        default=None,
    )
    generation_admission_timeout_secs: float = key(
        "Longest wait for admission, predicted or real, before the answer is 429; 0: as long as the client "
        "waits.",
        default=0.0,
    )
    adaptive_generation_concurrency: bool = key(
        "Find out how many requests at once serve most tokens, up to generation_concurrency.", default=False
    )
    adaptive_generation_min_concurrency: int | None = key(
        "With adaptive_generation_concurrency: the fewest at once, where it starts; null: 1.", default=None
    )
    stream_keep_alive_secs: float = key(
        "A stream that has not begun after so long begins with a comment, and gets another one that often "
        "until its first token, and later whenever no token came for so long; 0: it begins with its first "
        "token, and has no comments. Errors before it begins have an HTTP status of their own, later ones "
        "come in the stream.",
        default=10.0,
    )
    replay_on_stage_loss: bool = key(
        "When a lane is lost, go on with its request on another one: prompt and generated tokens are "
        "computed again, and the client sees one unbroken answer. Off: the request fails.",
        default=True,
    )
    replay_timeout_secs: float = key(
        "How long such a request waits for a lane through the whole chain before it fails after all; 0: as "
        "long as the client waits.",
        default=60.0,
    )
    allow_chat_templates: bool = key(
        "A request may bring a chat template of its own (`chat_template`). It runs in the sandbox of the "
        "model's own, but decides what are special tokens.",
        default=False,
    )
    stored_responses: int = key(
        "Responses of `/v1/responses` that are kept in memory, to be gone on with or asked for later; 64 MiB "
        "of them at most. 0: none.",
        default=1024,
    )
    prefill_chunk_policy: ChunkPolicyName = key(
        "How a prompt is cut: `fixed`: into chunks of prefill_chunk_size; `schedule`: of "
        "prefill_chunk_schedule, whose last size repeats; `adaptive-ramp` (or `adaptive`): from "
        "prefill_adaptive_start on, by what is measured; in a chain of one, 512. `fixed` with a schedule "
        "means `schedule`.",
        default="adaptive-ramp",
        converter=_chunk_policy,
    )
    prefill_chunk_size: int = key(
        "Prompt tokens per chunk; with `adaptive-ramp`, the longest prompt that goes as one chunk.",
        default=256,
    )
    prefill_chunk_schedule: tuple[int, ...] | None = key(
        "Sizes of the first chunks, such as `64,128,256`; the last one repeats.",
        default=None,
        converter=_chunk_schedule,
    )
    prefill_adaptive_start: int = key("`adaptive-ramp`: tokens of the first chunk.", default=128)
    prefill_adaptive_step: int = key("`adaptive-ramp`: by how many tokens it grows and shrinks.", default=128)
    prefill_adaptive_max: int = key("`adaptive-ramp`: tokens per chunk at most.", default=384)
    prefill_adaptive_target_ms: float = key(
        "`adaptive-ramp`: how long a chunk should take the slowest stage at most, as far as that lets it be "
        "prefill_adaptive_start tokens.",
        default=100.0,
    )

    def __attrs_post_init__(self) -> None:
        _ = self.bind_endpoint
        self.check_access()
        require_text(self, "model_id")
        require_range(self, 1, U32_MAX, "default_max_tokens")
        require_range(self, 0, I32_MAX, "stored_responses")
        require_range(self, 1, I32_MAX, "generation_concurrency", "prefill_chunk_size")
        self._check_admission()
        self._check_chunks()

    def _check_admission(self) -> None:
        require_range(self, 1, I32_MAX, "generation_queue_capacity", "adaptive_generation_min_concurrency")
        for name in ("generation_admission_timeout_secs", "stream_keep_alive_secs", "replay_timeout_secs"):
            secs = getattr(self, name)
            require(0 <= secs <= MAX_WAIT_SECS, f"{name}: is {secs:g}, must be 0 to {MAX_WAIT_SECS}")
        least, most = self.adaptive_generation_min_concurrency, self.generation_concurrency
        require(
            least is None or self.adaptive_generation_concurrency,
            "adaptive_generation_min_concurrency: needs adaptive_generation_concurrency",
        )
        require(
            least is None or most is None or least <= most,
            f"adaptive_generation_min_concurrency: is {least}, above generation_concurrency {most}",
        )
        default = attrs.fields(OpenAIOptions).replay_timeout_secs.default
        require(
            self.replay_on_stage_loss or self.replay_timeout_secs == default,
            "replay_timeout_secs: has no effect without replay_on_stage_loss",
        )

    def _check_chunks(self) -> None:
        policy, schedule = self.prefill_chunk_policy, self.prefill_chunk_schedule
        require(schedule != (), "prefill_chunk_schedule: must not be empty")
        require(
            len(schedule or ()) <= MAX_CHUNK_SIZES,
            f"prefill_chunk_schedule: has {len(schedule or ())} sizes, must have {MAX_CHUNK_SIZES} at most",
        )
        for size in schedule or ():
            require(
                1 <= size <= I32_MAX, f"prefill_chunk_schedule: {size} in it must be 1 to {I32_MAX} tokens"
            )
        require(
            schedule is not None or policy != "schedule",
            "prefill_chunk_schedule: is missing; prefill_chunk_policy schedule needs it",
        )
        require(
            schedule is None or policy != "adaptive-ramp",
            "prefill_chunk_schedule: has no effect with prefill_chunk_policy adaptive-ramp; use schedule",
        )
        require(
            schedule is None
            or self.prefill_chunk_size == attrs.fields(OpenAIOptions).prefill_chunk_size.default,
            "prefill_chunk_size: has no effect with prefill_chunk_schedule",
        )
        knobs = [f"prefill_adaptive_{name}" for name in ("start", "step", "max")]
        require_range(self, 1, I32_MAX, *knobs)
        require(
            self.prefill_adaptive_start <= self.prefill_adaptive_max,
            f"prefill_adaptive_start: is {self.prefill_adaptive_start}, must be at most "
            f"prefill_adaptive_max, {self.prefill_adaptive_max}",
        )
        target = self.prefill_adaptive_target_ms
        require(
            target > 0 and math.isfinite(target),
            f"prefill_adaptive_target_ms: is {target:g}, must be above 0 and finite",
        )
        for name in (*knobs, "prefill_adaptive_target_ms"):
            default = getattr(attrs.fields(OpenAIOptions), name).default
            require(
                policy == "adaptive-ramp" or getattr(self, name) == default,
                f"{name}: has no effect with prefill_chunk_policy {policy}; use adaptive-ramp",
            )

    @property
    def bind_endpoint(self) -> Endpoint:
        return Endpoint.parse(self.bind_addr, where="bind_addr", allow_any_port=True, schemes=("tcp",))
