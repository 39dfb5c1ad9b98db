"""Why a request or its lane failed: the error in a stage, and the annex in which it travels upstream."""

from __future__ import annotations

from typing import Final

from skippy.protocol import FailureCode, ReplyAnnex, RequestFailure, encode_annex

from .errors import LaneLost, RequestFailed, SettingsRefused, StageError


def encode_reason(request_id: int, failure: StageError) -> bytes:
    """The last frame of a connection."""
    if isinstance(failure, RequestFailed):
        refused = isinstance(failure, SettingsRefused)
        code = FailureCode.SETTINGS_REFUSED if refused else FailureCode.FAILED
    else:
        code = FailureCode.LANE_LOST
    return encode_annex(ReplyAnnex(failure=RequestFailure(request_id, code, str(failure))))


_FAILURES: Final[dict[FailureCode, type[RequestFailed] | type[LaneLost]]] = {
    FailureCode.FAILED: RequestFailed,
    FailureCode.SETTINGS_REFUSED: SettingsRefused,
    FailureCode.LANE_LOST: LaneLost,
}


def failure_of(reason: RequestFailure) -> RequestFailed | LaneLost:
    """What a later stage gave as its reason."""
    return _FAILURES[reason.code](reason.reason)
