"""Why a request failed: the error inside a stage, and the annex in which it travels to the stage before."""

from __future__ import annotations

from skippy.protocol import FailureCode, ReplyAnnex, RequestFailure, encode_annex

from .errors import RequestFailed, SettingsRefused


def encode_reason(request_id: int, failure: RequestFailed) -> bytes:
    """The last frame of a connection."""
    refused = isinstance(failure, SettingsRefused)
    code = FailureCode.SETTINGS_REFUSED if refused else FailureCode.FAILED
    return encode_annex(ReplyAnnex(failure=RequestFailure(request_id, code, str(failure))))


def failure_of(reason: RequestFailure) -> RequestFailed:
    """What a later stage gave as its reason."""
    refused = reason.code is FailureCode.SETTINGS_REFUSED
    return (SettingsRefused if refused else RequestFailed)(reason.reason)
