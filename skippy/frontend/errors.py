"""Errors of the HTTP side, in OpenAI's envelope.

Every answer that is not a success has this body, whatever its status::

    {"error": {"message": "...", "type": "...", "param": "messages[0].role" or null, "code": "..."}}
"""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from skippy.protocol import SamplingConfig

from .generation import GenerationError, InvalidSampling

# The code of an error that names none of its own.
_CODES: Final = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "internal_server_error",
    503: "service_unavailable",
    504: "timeout",
}


def error_type(status: int) -> str:
    """OpenAI's ``type`` for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class ApiError(Exception):
    """A request that cannot be served, as the client will see it.

    Attributes:
        status: HTTP status.
        message: what was wrong, where, and what would be right.
        param: path of the request field at fault, or None.
        code: short machine-readable word.
        retry_after_secs: when to try again, for the header of that name; None: nothing is known.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str = "",
        retry_after_secs: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status, "error")
        self.retry_after_secs = retry_after_secs

    def envelope(self) -> dict[str, Any]:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


_SETTINGS: Final = {
    **{field.name: field.name for field in attrs.fields(SamplingConfig)},
    "penalty_last_n": "repeat_last_n",
    "top_logprobs": "logprobs",
}
"""Sampling settings by the names with which engines begin an error about one, and their names in requests."""


def setting_at_fault(text: str) -> str | None:
    """The request field that an engine's error about the sampling settings is about."""
    match = re.match("[a-z_]+", text)
    return None if match is None else _SETTINGS.get(match[0])


def from_generation_error(error: GenerationError) -> ApiError:
    """The client's view of a generation that failed."""
    return ApiError(
        str(error) or error.code,
        status=error.status,
        param=error.param or (setting_at_fault(str(error)) if isinstance(error, InvalidSampling) else None),
        code=error.code,
        retry_after_secs=error.retry_after_secs,
    )


def internal_error() -> ApiError:
    """For failures whose details are for the log, not for the client."""
    return ApiError("the server failed to handle this request; its log has the details", status=500)
