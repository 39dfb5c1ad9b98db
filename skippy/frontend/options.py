"""What a host may set on the HTTP side."""

from __future__ import annotations

from typing import Any

import attrs

from skippy.config import AccessOptions
from skippy.telemetry import Telemetry

MIB = 1024 * 1024


def _at_least_one(_: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{attribute.name} is {value}; it must be at least 1")


def _above_zero(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} is {value}; it must be above 0")


@attrs.frozen(slots=True, kw_only=True)
class FrontendOptions:
    """Settings of the OpenAI endpoint.

    Attributes:
        default_max_tokens: tokens to generate when a request names no limit; None is the rest of the context.
        max_body_bytes: request bodies larger than this are answered with 413.
        body_timeout_secs: how long a client may take to send its body (408 after that).
        stall_timeout_secs: a client that takes nothing for this long loses its generation and connection.
        keep_alive_secs: a stream that has not begun after this long begins with a comment, and has another
            one that often until its first token, and then after each such time in which no token came; inf:
            it begins with the first token, and has no comments.
        event_buffer: events that may wait between a generation and its response writer.
        template_cpu_secs: processor time of one template rendering, which may take five times that in all.
        template_memory_bytes: address space of the template worker process.
        allows_chat_templates: a request may bring a chat template of its own, whose texts of special tokens
            count as such.
        max_stored_responses: responses of ``/v1/responses`` that are kept in memory; 0: none.
        max_stored_response_bytes: of all of them together.
        keeps_prompts_on_disk: cached prompts outlive the process, so that clients may ask for that.
        max_prompt_bytes: size of a rendered prompt, in bytes of UTF-8.
        telemetry: where trace points go; None drops them.
        access: who may use the endpoint.
        host_names: under which it may be asked, beside those that ``access`` has.
    """

    default_max_tokens: int | None = attrs.field(default=None, validator=_at_least_one)
    max_body_bytes: int = attrs.field(default=4 * MIB, validator=_at_least_one)
    body_timeout_secs: float = attrs.field(default=30.0, validator=_above_zero)
    stall_timeout_secs: float = attrs.field(default=10.0, validator=_above_zero)
    keep_alive_secs: float = attrs.field(default=10.0, validator=_above_zero)
    event_buffer: int = attrs.field(default=16, validator=_at_least_one)
    template_cpu_secs: float = attrs.field(default=2.0, validator=_above_zero)
    template_memory_bytes: int = attrs.field(default=512 * MIB, validator=_at_least_one)
    max_prompt_bytes: int = attrs.field(default=4 * MIB, validator=_at_least_one)
    allows_chat_templates: bool = False
    max_stored_responses: int = attrs.field(default=1024, validator=attrs.validators.ge(0))
    max_stored_response_bytes: int = attrs.field(default=64 * MIB, validator=attrs.validators.ge(0))
    keeps_prompts_on_disk: bool = False
    telemetry: Telemetry | None = None
    access: AccessOptions = attrs.field(factory=AccessOptions)
    host_names: tuple[str, ...] = ()
