"""One stage as a service.

Here live the runtime thread, the scheduler, sessions, upstream connections, downstream lanes, prediction
returns and link backends. Import the names below from here. Never here: HTTP, prompts, text.
"""

from .answers import ReplySink
from .errors import (
    DownstreamUnavailable,
    LaneLost,
    RequestFailed,
    SettingsRefused,
    StageError,
    StageStartError,
)
from .lane import Lane
from .queues import PendingReply
from .service import Stage, open_stage

__all__ = [
    "DownstreamUnavailable",
    "Lane",
    "LaneLost",
    "PendingReply",
    "ReplySink",
    "RequestFailed",
    "SettingsRefused",
    "Stage",
    "StageError",
    "StageStartError",
    "open_stage",
]
