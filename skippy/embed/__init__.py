"""The public surface for a Trio host: a stage, and an OpenAI endpoint on it, as async context managers.

    from skippy.embed import open_openai, open_stage

    async with open_stage(config, topology) as stage:
        async with open_openai(stage, OpenAIOptions()) as endpoint:
            print(endpoint.url)
            await trio.sleep_forever()

Everything runs in the host's own tasks: leaving a block, or cancelling it, stops what it started. If
something inside fails for good, the block is cancelled and the failure is raised from it.

Here live these two blocks: ``stages`` opens a stage, ``model_part`` finds the layers that it loads and says
which model they are of, ``endpoint`` opens HTTP on it. Import the names below from here; a host needs them,
:mod:`skippy.config` and :mod:`skippy.telemetry`, and nothing else of skippy. Never here: anything that a
frame, a token or a request passes through, command lines, signals, processes.
"""

from typing import TYPE_CHECKING, Any

from skippy.stage import (
    ControlPiece,
    InventoryEntry,
    Stage,
    StageStartError,
    Tokenizer,
    TokenizeRequest,
    TokenizerError,
    TokenizeResult,
    TokenizerIdentity,
)
from skippy.stage.links import MemoryTransport, TcpTransport, Transport

from .stages import open_stage

if TYPE_CHECKING:
    from .endpoint import OpenAIEndpoint, open_openai

__all__ = [
    "ControlPiece",
    "InventoryEntry",
    "MemoryTransport",
    "OpenAIEndpoint",
    "Stage",
    "StageStartError",
    "TcpTransport",
    "TokenizeRequest",
    "TokenizeResult",
    "Tokenizer",
    "TokenizerError",
    "TokenizerIdentity",
    "Transport",
    "open_openai",
    "open_stage",
]


def __getattr__(name: str) -> Any:
    """HTTP is imported by who asks for it: of a chain's stages that is one.

    Half a second of imports, so ask before an event loop runs: ``from skippy.embed import open_openai``.
    """
    if name in ("OpenAIEndpoint", "open_openai"):
        from . import endpoint

        return getattr(endpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that nobody has asked for yet."""
    return sorted({*globals(), *__all__})
