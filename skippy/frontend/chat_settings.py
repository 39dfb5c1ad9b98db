"""What a chat request says about its template: tools, reasoning, variables, and a template of its own."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import attrs

from .fields import Fields, describe
from .tool_fields import ToolUse, parse_tool_use

MAX_TEMPLATE: Final = 256 * 1024
"""Characters of a request's own template."""
MAX_VARIABLES: Final = 32 * 1024
"""Characters of ``chat_template_kwargs`` as JSON."""
RESERVED_VARIABLES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)

ReasoningFormat = Literal["none", "auto", "deepseek"]
_REASONING_FORMATS: Final[tuple[ReasoningFormat, ...]] = ("none", "auto", "deepseek")
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")


@attrs.frozen(slots=True, kw_only=True)
class ChatSettings:
    """How a conversation is rendered, and its answer read.

    Attributes:
        reasoning_format: ``none``: reasoning stays in the content; ``auto``: it is split off if the template
            marks any; ``deepseek``: if not, it is what stands in ``<think>`` tags.
        reasoning_effort: for the template; None: nothing was said.
        variables: for the template.
        prefill_assistant: an assistant's message at the end is how the answer begins, and not one of its own.
        template: in place of the model's own; None: that.
    """

    tool_use: ToolUse = attrs.field(factory=ToolUse)
    reasoning_format: ReasoningFormat = "auto"
    reasoning_effort: str | None = None
    variables: dict[str, Any] = attrs.field(factory=dict)
    prefill_assistant: bool = True
    template: str | None = None


def parse_chat_settings(fields: Fields) -> ChatSettings:
    """Read the fields. Raises ApiError."""
    reasoning_format = fields.text("reasoning_format") or "auto"
    if reasoning_format not in _REASONING_FORMATS:
        known = ", ".join(_REASONING_FORMATS)
        raise fields.error("reasoning_format", f"is {reasoning_format[:40]!r}; it must be one of {known}")
    effort = fields.text("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise fields.error("reasoning_effort", f"is {effort[:40]!r}; it must be one of {', '.join(_EFFORTS)}")
    template = fields.text("chat_template")
    if template is not None and not 0 < len(template) <= MAX_TEMPLATE:
        text = f"has {len(template)} characters; it must have 1 to {MAX_TEMPLATE}"
        raise fields.error("chat_template", text)
    return ChatSettings(
        tool_use=parse_tool_use(fields),
        reasoning_format=reasoning_format,
        reasoning_effort=effort,
        variables=_variables(fields),
        prefill_assistant=fields.boolean("prefill_assistant", default=True),
        template=template,
    )


def _variables(fields: Fields) -> dict[str, Any]:
    value = fields.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.error("chat_template_kwargs", f"must be an object, not {describe(value)}")
    size = len(json.dumps(value))
    if size > MAX_VARIABLES:
        text = f"has {size} characters as JSON; at most {MAX_VARIABLES} are allowed"
        raise fields.error("chat_template_kwargs", text)
    for name in value:
        if name in RESERVED_VARIABLES:
            text = "is not a variable that a request can set"
            raise fields.error(f"chat_template_kwargs.{name}", text)
    return value
