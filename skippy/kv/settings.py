"""What a loaded stage really does with its prefix cache: the configuration, resolved."""

from __future__ import annotations

from typing import Literal

import attrs

Payload = Literal["resident-kv", "kv-recurrent", "full-state"]


@attrs.frozen(slots=True, kw_only=True)
class KvSettings:
    """A prefix cache that is on.

    Attributes:
        payload: ``resident-kv``: entries are native sequences, and exported when these run out.
            ``kv-recurrent`` and ``full-state``: entries are exported states.
        lookup, record: what it is used for.
        max_entries: idle entries.
        max_bytes: bytes of exported state in memory; 0: no limit but the number of entries.
        min_tokens: shorter paths are neither recorded nor restored.
        stride_tokens: the grid of lengths at which a long prompt may be cut for a checkpoint.
        record_limit: checkpoints of one prompt; 0: as many as the grid has.
        extra_sequences: native sequences beside those of the lanes.
        shared_cells: all sequences share one pool of cache cells.
        max_resident_tokens: tokens in idle sequences where cells are shared; 0: no limit.
        activation_max_bytes: bytes of boundary rows in memory; 0: none are remembered.
        directory: where states outlive the process; None: nowhere.
        directory_max_bytes: bytes of files there.
        audit_rate: the share of hits that is computed again and compared, 0 to 1.
    """

    payload: Payload = "resident-kv"
    lookup: bool = True
    record: bool = True
    max_entries: int = 64
    max_bytes: int = 0
    min_tokens: int = 64
    stride_tokens: int = 128
    record_limit: int = 2
    extra_sequences: int = 0
    shared_cells: bool = False
    max_resident_tokens: int = 0
    activation_max_bytes: int = 0
    directory: str | None = None
    directory_max_bytes: int = 0
    audit_rate: float = 0.0
