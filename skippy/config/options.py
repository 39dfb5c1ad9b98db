"""Options of a running stage and of its OpenAI endpoint: command line flags, or a host's arguments."""

from __future__ import annotations

from typing import Literal

import attrs

from .endpoint import Endpoint
from .fields import key, require, require_range, require_text
from .stage import I32_MAX

MAX_LINK_TOKEN_BYTES = 64


@attrs.frozen(slots=True, kw_only=True)
class StageOptions:
    """How a stage runs, apart from what it is."""

    max_inflight: int = key(
        "Frames of one lane that may wait to be carried out, and as many that may wait to be sent on; more "
        "wait with their sender.",
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
    link_token: str | None = key(
        "Secret that stages show each other, 1 to 64 bytes; null: none is asked for.",
        default=None,
        repr=False,
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
        if self.link_token is not None:
            size = len(self.link_token.encode())
            require(1 <= size <= MAX_LINK_TOKEN_BYTES, f"link_token: has {size} bytes, must have 1 to 64")


@attrs.frozen(slots=True, kw_only=True)
class OpenAIOptions:
    """The OpenAI endpoint of a stage 0."""

    bind_addr: str = key("Where HTTP is served: `host:port`, port 0 for any.", default="127.0.0.1:9337")
    model_id: str | None = key("The name clients ask for; null: the stage's model_id.", default=None)
    default_max_tokens: int | None = key(
        "Tokens generated at most when a request does not say; null: the rest of the context.", default=None
    )
    generation_concurrency: int | None = key("Requests generated at once; null: lane_count.", default=None)
    prefill_chunk_size: int = key("Prompt tokens per chunk.", default=256)

    def __attrs_post_init__(self) -> None:
        Endpoint.parse(self.bind_addr, where="bind_addr", allow_any_port=True)
        require_text(self, "model_id")
        require_range(self, 1, I32_MAX, "default_max_tokens", "generation_concurrency", "prefill_chunk_size")

    @property
    def bind_endpoint(self) -> Endpoint:
        return Endpoint.parse(self.bind_addr, where="bind_addr", allow_any_port=True)
