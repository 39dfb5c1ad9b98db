"""One stage as a service.

Here live the runtime thread, the scheduler, sessions, upstream connections, downstream lanes, prediction
returns and link backends. Import the names below from here. Never here: HTTP, prompts, text.
"""

from .errors import (
    DownstreamUnavailable,
    LaneLost,
    RequestFailed,
    SettingsRefused,
    StageError,
    StageStartError,
)
from .interfaces import ReplySink
from .lane import Lane
from .queues import PendingReply
from .runs import ChainRun, LocalRun
from .service import ENDING_SECS, Stage, open_stage
from .settings import GenerationSettings
from .tokenizer import (
    ControlPiece,
    InventoryEntry,
    Tokenizer,
    TokenizeRequest,
    TokenizerError,
    TokenizeResult,
    TokenizerIdentity,
)

__all__ = [
    "ENDING_SECS",
    "ChainRun",
    "ControlPiece",
    "DownstreamUnavailable",
    "GenerationSettings",
    "InventoryEntry",
    "Lane",
    "LaneLost",
    "LocalRun",
    "PendingReply",
    "ReplySink",
    "RequestFailed",
    "SettingsRefused",
    "Stage",
    "StageError",
    "StageStartError",
    "TokenizeRequest",
    "TokenizeResult",
    "Tokenizer",
    "TokenizerError",
    "TokenizerIdentity",
    "open_stage",
]
